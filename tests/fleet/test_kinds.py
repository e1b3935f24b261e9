"""Runs of each kind that nothing happens to: what plain PyTorch computes; and what a loop may do meanwhile."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from potluck.agree.policy import Async, Auto, Cadence, Sync
from potluck.events import CheckpointSaved, Decided, Validated
from potluck.replica.replica import StepConfig
from potluck.save.checkpoint import CheckpointConfig
from potluck.sharding.strategy import FullShard, HybridShard, ShardGradOp
from potluck.train.schedule import ScheduleConfig
from tests.fleet.fleet import (
    BATCH,
    EPOCHS,
    ROWS,
    STEPS,
    Fleet,
    assert_same,
    build,
)
from tests.fleet.judges import cosine, kinds, rows_of
from tests.fleet.kinds import (
    ASYNC,
    BARE,
    BOTH,
    BOTH_AND_MOMENTS,
    CADENCE,
    CADENCE_OF_TWO,
    CODED_MOMENTS,
    FIRST,
    KINDS,
    MOMENTS,
    NODE,
    NODE_AND_WHOLE,
    SHORT,
    Kind,
    Size,
    by_record,
    coded,
    nearly,
    to_the_bit,
)
from tests.fleet.test_fleet_turns import gan, gan_of_fetched_rows
from tests.parity.test_coded_sums import BLOCKS
from tests.quick import first_of

pytestmark = pytest.mark.timeout(90)


def judged(policy: Any, *sizes: Size, falls: bool = False, **options: Any) -> Kind:
    """Windows whose weights plain replicas say from the record."""
    judge = partial(by_record, moments=getattr(policy, "moments", False) or isinstance(policy, Auto), falls=falls)
    options |= {"schedule": cosine} if falls else {}
    return Kind(policy, judge, sizes or (Size(),), BARE | options)


def clipped(strategy: Any, **step: Any) -> Kind:
    """A node and a worker that is alone. The norm, too, has to be the same to the bit on both."""
    options = BARE | {"step": StepConfig(clip=0.3, **step)}
    return Kind(judge=partial(nearly, clip=0.3), sizes=(Size(2, strategy), Size()), options=options)


def of_any_ranks(strategy: Any) -> Kind:
    """The last slices have fewer rows than three ranks. In one epoch."""
    sizes = tuple(Size(ranks, strategy) for ranks in (2, 3, 1))
    return Kind(sizes=sizes, options={"epochs": 1, "steps": STEPS // EPOCHS})


def of_turns(policy: Any, trains: Any = gan, judge: Any = None) -> Kind:
    return Kind(policy, judge, trains=trains, options=KINDS["turns"].options)


NEAR = Size(shared=True)
NEAR_NODE = (Size(2, shared=True),)
UNEVEN = FullShard(weights=(1.0, 3.0))
QUICK: dict[str, tuple[Kind, int]] = {
    "sync": (KINDS["sync"], 2),
    # A worker has more slices than the run has steps, so such a pass ends in the middle of one.
    "sync, passes of len(loader)": (Kind(judge=to_the_bit, options={"by_len": True}), 2),
    "sync, FullShard and whole": (clipped(FullShard()), 2),
    "sync of 1, 2 and 3 ranks": (of_any_ranks(FullShard()), 3),
    "bf16": (KINDS["bf16"], 1),
    "cadence alone": (judged(CADENCE), 1),
    "cadence, buffers": (KINDS["cadence"], 2),
    "cadence, int4": (KINDS["cadence int4"], 2),
    "cadence, node and whole": (judged(CADENCE, *NODE_AND_WHOLE), 2),
    "cadence, ShardGradOp and whole": (judged(CADENCE, Size(2, ShardGradOp()), Size()), 2),
    "cadence, two strategies": (
        Kind(CADENCE, sizes=(Size(2, ShardGradOp()), Size(2, FullShard(weights=(1.0, 2.0))))),
        2,
    ),
    "cadence, moments": (judged(MOMENTS), 2),
    "both alone": (judged(BOTH), 1),
    "both, node and whole": (judged(BOTH, *NODE_AND_WHOLE), 2),
    "both and moments, node and whole": (judged(BOTH_AND_MOMENTS, *NODE_AND_WHOLE, falls=True), 2),
}
UNDISTURBED: dict[str, tuple[Kind, int]] = QUICK | {
    "sync, turns of rows fetched ahead": (of_turns(Sync(), gan_of_fetched_rows, KINDS["turns"].judge), 2),
    "sync alone": (KINDS["sync"], 1),
    "sync of four": (KINDS["sync"], 4),
    "sync, uneven and whole": (clipped(UNEVEN), 2),
    "sync, ShardGradOp and whole": (clipped(ShardGradOp()), 2),
    "sync, ShardGradOp uneven and whole": (clipped(ShardGradOp(weights=(2.0, 1.0))), 2),
    "sync, ShardGradOp of whole gradients": (clipped(ShardGradOp(keep_gradients=True)), 2),
    "sync, HybridShard and whole": (clipped(HybridShard(intra_node_size=2)), 2),
    "sync, ShardGradOp offloaded": (clipped(ShardGradOp(), offload_optimizer=True), 2),
    "sync of 1, 2 and 3 ranks, by memory": (of_any_ranks(FullShard(weights="memory")), 3),
    "sync of 1, 2 and 3 ranks, ShardGradOp": (of_any_ranks(ShardGradOp()), 3),
    **{f"{wire} of {count}": (coded(wire), count) for wire in BLOCKS for count in (1, 3)},
    "cadence": (judged(CADENCE), 2),
    "cadence, passes of len(loader)": (Kind(CADENCE, options={"by_len": True}), 2),
    "cadence, turns": (of_turns(CADENCE), 2),
    "cadence near": (judged(CADENCE, NEAR), 3),
    "cadence, node alone": (judged(CADENCE, *NODE), 1),
    "cadence, nodes": (judged(CADENCE, *NODE), 2),
    "async near": (judged(ASYNC, NEAR), 2),
    "async": (judged(ASYNC), 3),
    "async, near nodes": (judged(ASYNC, *NEAR_NODE), 2),
    "async, uneven and whole": (judged(ASYNC, Size(2, UNEVEN), Size()), 2),
    "async, int4": (Kind(ASYNC, options={"wire": "int4"}), 2),
    "async, int4, node and whole": (Kind(ASYNC, sizes=NODE_AND_WHOLE, options={"wire": "int4"}), 2),
    "async, moments": (judged(Async.published(anchor=2, max_anchor=3, moments=True), falls=True), 2),
    "both near": (judged(BOTH, NEAR), 3),
    "both, async": (judged(Async.published(**SHORT, together=FIRST)), 2),
    "both and moments near": (judged(BOTH_AND_MOMENTS, NEAR, falls=True), 3),
    "both and moments, int4": (Kind(CODED_MOMENTS, options={"wire": "int4"}), 2),
    "both and moments, int4, FullShard and whole": (
        Kind(CODED_MOMENTS, sizes=(Size(2, FullShard()), Size()), options=BARE | {"wire": "int4"}),
        2,
    ),
    "all together alone": (KINDS["all together"], 1),
    "all together near": (judged(Cadence.published(**SHORT, together=1.0), NEAR), 2),
    "auto, turns": (of_turns(Auto()), 2),
    "auto": (judged(Auto(together=0.2), falls=True), 2),
}


@pytest.mark.parametrize("name", first_of(UNDISTURBED, len(QUICK)))
def test_a_run_that_nothing_happens_to_is_what_plain_pytorch_computes(name: str, tmp_path: Path) -> None:
    kind, count = UNDISTURBED[name]
    fleet = Fleet(tmp_path, at_least=count)
    names = [f"w{number}" for number in range(count)]
    for worker in names:
        kind.join(fleet, worker)
    kind.check(fleet.finish(epochs=kind.epochs), fleet)
    assert all(any(rows_of(fleet, worker)) for worker in names)
    assert {row["name"] for record in fleet.records for row in record.workers} == set(names)
    assert fleet.server.core.refused.total() == 0  # none was taken for one that had drifted away
    assert fleet.server.core.steps_done == kind.steps and fleet.server.core.standing.rows_seen == kind.epochs * ROWS
    if not kind.has_windows:
        assert [record.step for record in fleet.records] == list(range(1, kind.steps + 1))
    elif not isinstance(kind.policy, Auto):
        check_decisions(fleet, kind.policy.together, count)


def check_decisions(fleet: Fleet, together: float, count: int) -> None:
    """Each window was decided on once, and why."""
    assert len(fleet.records) > EPOCHS
    decided = [event for event in fleet.events if isinstance(event, Decided)]
    assert [d.version for d in decided[: len(fleet.records)]] == list(range(len(fleet.records)))
    found, first = list(kinds(fleet).values()), decided[0].reason
    assert found == sorted(found, reverse=True)
    assert sum(found) == (math.ceil(together * EPOCHS * ROWS / BATCH) if together < 1 else STEPS)
    if together:
        assert first.endswith(f"In the first {100 * together:.0f} % of the run all agree in every step.")
    elif count == 1:
        assert first == f"Only w0 is there, so nothing is averaged: {BATCH} rows."
    else:
        assert first.startswith("Nothing was measured yet, so all count as equally fast")
        assert any(d.divergence > 0 for d in decided)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (FullShard(), {}),
        (ShardGradOp(weights=(2.0, 1.0)), BARE | {"wire": "int4"}),
        (FullShard(), BARE | {"wire": "int4"}),
    ],
    ids=["FullShard", "ShardGradOp int4", "FullShard int4"],
)
def test_nodes_compute_the_same_bits_however_many_they_are(
    strategy: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """Coded, a block's numbers lie on both ranks."""
    kind, found = Kind(sizes=(Size(2, strategy),), options=options), []
    for count in (1, 2):
        (place := tmp_path / f"{count}").mkdir()
        fleet = Fleet(place, at_least=count)
        for number in range(count):
            kind.join(fleet, f"w{number}")
        found.append(fleet.finish())
        assert fleet.server.core.refused.total() == 0
        kind.check(found[-1])
    assert_same(*found)


@pytest.mark.parametrize("size", [Size(1), Size(2)], ids=["workers", "nodes"])
def test_steps_that_are_not_finite_are_skipped_where_they_occur(size: Size, tmp_path: Path) -> None:
    kind, fleet = Kind(ASYNC, sizes=(size,), options={"spoiled": 17}), Fleet(tmp_path, at_least=2)
    for number in range(2):
        kind.join(fleet, f"w{number}")
    kind.check(fleet.finish())
    assert all(record.loss > 0 for record in fleet.records)
    assert fleet.server.core.refused.total() == 0
    assert [int((tmp_path / f"w{number}.skipped").read_text()) for number in range(2)] == [EPOCHS, EPOCHS]


# What a loop does meanwhile


def save_and_look_at_every_batch(place: Path) -> None:
    """As an own loop might that was written for steps that all take together."""
    from potluck.engine.engine import Engine

    step = Engine.step

    def busy(self: Any) -> Any:
        found = step(self)
        if self.version and not self.stopping and self.version < 4:
            self.save(place)
            x, y = build()[2]
            self.evaluate(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x[:9], y[:9]), 4)
        return found

    Engine.step = busy  # type: ignore[method-assign]


@pytest.mark.parametrize("size", first_of([Size(1), Size(2)], are_single=True), ids=["worker", "node"])
def test_saving_and_looking_within_a_window_see_what_was_agreed_on(size: Size, tmp_path: Path) -> None:
    kind, fleet = judged(CADENCE_OF_TWO, size), Fleet(tmp_path)
    kind.join(fleet, "only", save_and_look_at_every_batch, rank=None)
    kind.check(fleet.finish(), fleet)
    assert len({e.loss for e in fleet.events if isinstance(e, Validated)}) == 3  # one for each version


TRAINED = {name: KINDS[name] for name in ("cadence", "cadence nodes", "sync", "async")}
TRAINED["sync, FullShard and whole"] = Kind(sizes=(Size(2, FullShard()), Size()))


@pytest.mark.parametrize("name", first_of(TRAINED, 2))
def test_trainer_counts_batches_of_the_run_and_ends_where_it_should(name: str, tmp_path: Path) -> None:
    """Of 32 rows: 7 to an epoch, and 10 in all. It looks every 3, and saves every 4, at the next agreement."""
    fleet, kind = Fleet(tmp_path, at_least=2), TRAINED[name]
    settings: dict[str, Any] = {
        "epochs": 5,
        "max_steps": 10,
        "validate_every": 3,
        "checkpoint": CheckpointConfig(every=4),
        "schedule": ScheduleConfig(warmup=0.5),
    }
    for number in range(2):
        kind.join(fleet, f"w{number}", fit=settings, steps=10)
    fleet.finish(epochs=1)
    last = fleet.records[-1]
    assert last.rows_seen == ROWS + 3 * BATCH and fleet.server.core.steps_done == 10
    ended = [fleet.server.core.description.steps_at(r.epoch, r.row + r.rows) for r in fleet.records]  # type: ignore[union-attr]
    looked = [e.step for e in fleet.events if isinstance(e, Validated)]
    assert looked == sorted({next(step for step in ended if step >= at) for at in (3, 6, 9)} | {10})
    saved = [e.step for e in fleet.events if isinstance(e, CheckpointSaved)]
    assert saved == sorted({next(step for step in ended if step >= at) for at in (4, 8)} | {10})
    # A window's last step has the rate of the rows that all have done by then.
    rates = [0.01 * settings["schedule"].factor(r.rows_seen, last.rows_seen) for r in fleet.records]
    assert fleet.rates == pytest.approx(rates)
