"""What a run under a host can be, and what it must come to: its policy, its workers, and a judge in plain PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from potluck.agree.policy import ApplyPolicy, Async, Auto, Cadence, Sync
from potluck.fleet.invite import Invite
from potluck.sharding.blocks import find_blocks
from potluck.sharding.strategy import FullShard, ShardGradOp, ShardingStrategy
from potluck.sums import slices
from potluck.sums.slices import plan_parts
from tests.fleet import judges, test_fleet_turns
from tests.fleet.fleet import EPOCHS, STEPS, Fault, Fleet, Worker, assert_same, build, start_node
from tests.fleet.judges import Gradients, assert_close, kinds, plain, plain_run
from tests.odd import BIG, SEEN, assert_constant
from tests.parity.test_coded_sums import rounded

Weights = dict[str, torch.Tensor]
Judge = Callable[[Fleet | None, Weights], None]
"""Of a run whose host is a process of its own there is no Fleet, and so no record here of who did what."""

SHORT: dict[str, Any] = {"anchor": 1, "max_anchor": 2}
"""Several windows to an epoch, also where agreeing costs more than so small a model."""


# Judges


def parts_of_model() -> list[list[tuple[str, torch.nn.Parameter]]]:
    model = build()[0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    before, slices.SMALL_BYTES = slices.SMALL_BYTES, 1024  # as workers of tests/fleet have it
    try:
        return [[(names[id(p)], p) for p in unit] for _, unit in plan_parts(model, find_blocks(model))]
    finally:
        slices.SMALL_BYTES = before


@cache
def one_process(wire: str = "fp32") -> Weights:
    """The weights of a run that nobody left, with the same rounding."""
    if wire == "fp32":
        return plain_run()
    parts = parts_of_model()
    assert len(parts) > 3

    def arrives(gradients: Gradients) -> Gradients:
        found: Gradients = {}
        for part in parts:
            flat = torch.cat([gradients.get(name, torch.zeros_like(p)).reshape(-1) for name, p in part])
            pieces = rounded(wire, flat).split([p.numel() for _, p in part])
            found |= {name: piece.view_as(p) for (name, p), piece in zip(part, pieces, strict=True)}
        return {name: found[name] for name in gradients}

    return plain_run(rounded=arrives)


def to_the_bit(fleet: Fleet | None, weights: Weights, wire: str = "fp32") -> None:
    assert_same(weights, one_process(wire))


def with_a_scheduler(fleet: Fleet | None, weights: Weights) -> None:
    assert_same(weights, plain_run(schedule=judges.cosine))


def nearly(fleet: Fleet | None, weights: Weights, clip: float | None = None) -> None:
    assert_close(weights, plain(clip))


def by_record(fleet: Fleet | None, weights: Weights, *, moments: bool = False, **known: Any) -> None:
    """Each range by a replica of its own, and then their mean."""
    assert fleet is not None
    assert_close(weights, judges.judge(fleet, moments=moments, **known))
    if moments and not all(kinds(fleet).values()):
        with pytest.raises(AssertionError):  # the judge would see it if they were not averaged
            assert_close(weights, judges.judge(fleet, **known))


def of_turns(fleet: Fleet | None, weights: Weights) -> None:
    test_fleet_turns.assert_close(weights)


def check_odd_layers(weights: Weights) -> None:
    """Buffers of every kind, BatchNorm's, and a parameter that nobody uses."""
    assert_constant(weights, "odd.")
    assert torch.equal(weights["unused.weight"], build()[0].state_dict()["unused.weight"])
    steps = int(weights["norm.num_batches_tracked"])  # of whoever had the first slice of each step
    assert steps > 0 and weights["norm.running_mean"].any()
    assert weights["odd.seen"] == SEEN + 10 * steps and weights["odd.big"] == BIG + 2 * steps
    assert weights["odd.flags"].tolist() == [steps % 2 == 0, steps % 2 == 1]


# Kinds


class Size(NamedTuple):
    """A worker's. Without a strategy one rank has all of the model, and several are a HybridShard."""

    ranks: int = 1
    strategy: ShardingStrategy | None = None
    shared: bool = False
    """It shares memory with the host, as one on the same machine."""


@dataclass(frozen=True)
class Kind:
    """What a run is, and what its weights must be."""

    policy: ApplyPolicy = Sync()
    judge: Judge | None = None
    """Beside that all who see the end hold the same bits, and that each row was used once: Fleet.finish() says so."""
    sizes: tuple[Size, ...] = (Size(),)
    """Of the first worker, the second, and so on; then the first again."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of each worker, as tests.fleet.fleet knows them."""
    trains: Fault | None = None
    """Sets another loop than the usual one."""

    @property
    def steps(self) -> int:
        return int(self.options.get("steps", STEPS))

    @property
    def epochs(self) -> int:
        return int(self.options.get("epochs", EPOCHS))

    @property
    def has_windows(self) -> bool:
        return not isinstance(self.policy, Sync)

    @property
    def has_odd_layers(self) -> bool:
        return self.trains is None and not self.options.get("bare")

    def join(
        self, fleet: Fleet, name: str, fault: Fault | None = None, *, rank: int | None = 0, **options: Any
    ) -> list[Worker]:
        """Adds a worker, with the fault in one of its ranks, or in all of them."""
        number = sum("." not in worker.name for worker in fleet.workers)
        started = self.start(fleet.invite, fleet.folder, name, number, fault, rank=rank, **options)
        fleet.workers += started
        return started

    def start(
        self,
        invite: Invite,
        folder: Path,
        name: str,
        number: int = 0,
        fault: Fault | None = None,
        *,
        rank: int | None = 0,
        **options: Any,
    ) -> list[Worker]:
        """Starts the run's worker of that number, each rank a process."""
        size = self.sizes[number % len(self.sizes)]
        own = {"policy": self.policy, "shared": size.shared, **self.options, **options}
        if size.strategy is not None:
            own["strategy"] = size.strategy
        faults = {
            each: partial(_all_of, [found for found in (self.trains, fault if rank in (None, each) else None) if found])
            for each in range(size.ranks)
        }
        if size.ranks == 1:
            return [Worker(invite, folder, name, faults[0], own)]
        return start_node(invite, folder, name, size.ranks, faults, own)

    def check(self, weights: Weights, fleet: Fleet | None = None) -> None:
        """All that must hold of what they end with."""
        never = ("odd.mask", "odd.gap")
        assert all(torch.isfinite(value).all() for name, value in weights.items() if name not in never)
        if self.has_odd_layers:
            check_odd_layers(weights)
        if self.judge is not None:
            self.judge(fleet, weights)


def _all_of(faults: Sequence[Fault], place: Path) -> None:
    for fault in faults:
        fault(place)


FIRST = 0.3
"""Of 424 rows: four batches of 32."""
NODE = (Size(2),)
NODE_AND_WHOLE = (Size(2), Size())
BARE: dict[str, Any] = {"bare": True}
CADENCE, ASYNC = Cadence.published(**SHORT), Async.published(**SHORT)
CADENCE_OF_TWO = Cadence.published(anchor=2, max_anchor=2)
BOTH = Cadence.published(**SHORT, together=FIRST)
MOMENTS = Cadence.published(**SHORT, moments=True)
BOTH_AND_MOMENTS = Cadence.published(**SHORT, moments=True, together=FIRST)
CODED_MOMENTS = Cadence.published(**SHORT, moments=True, together=0.4)


def coded(wire: str, **what: Any) -> Kind:
    return Kind(judge=partial(to_the_bit, wire=wire), options={"wire": wire}, **what)


KINDS: dict[str, Kind] = {
    "sync": Kind(judge=to_the_bit),
    "sync with a scheduler": Kind(judge=with_a_scheduler, options={"schedule": judges.cosine}),
    "sync near": Kind(judge=to_the_bit, sizes=(Size(shared=True),)),
    "sync near and far": Kind(judge=to_the_bit, sizes=(Size(shared=True), Size())),
    "sync split": Kind(sizes=(Size(2, FullShard()),)),
    "sync of 2 1 3": Kind(
        judge=nearly, sizes=(Size(2, FullShard()), Size(1, FullShard()), Size(3, FullShard())), options=BARE
    ),
    "sync of 1 2": Kind(judge=nearly, sizes=(Size(1, FullShard()), Size(2, FullShard())), options=BARE),
    "sync of 2 1": Kind(judge=nearly, sizes=(Size(2, ShardGradOp()), Size(1, FullShard())), options=BARE),
    "int4": coded("int4"),
    "int8": coded("int8"),
    "bf16": coded("bf16"),
    "turns": Kind(judge=of_turns, trains=test_fleet_turns.gan, options={"steps": 2 * STEPS}),
    "cadence": Kind(CADENCE),
    "cadence judged": Kind(
        CADENCE, partial(by_record, optimizer_of=judges.sgd), options={"bare": True, "sgd": True, "lr": 0.05}
    ),
    "cadence of 2": Kind(CADENCE_OF_TWO),
    "cadence of 2 nodes": Kind(CADENCE_OF_TWO, sizes=NODE),
    "cadence nodes": Kind(CADENCE, sizes=NODE),
    "cadence int4": Kind(CADENCE, options={"wire": "int4"}),
    "async": Kind(ASYNC),
    "async nodes": Kind(ASYNC, sizes=NODE),
    "async int8": Kind(ASYNC, options={"wire": "int8"}),
    "both": Kind(BOTH),
    "all together": Kind(Cadence.published(**SHORT, together=1.0), to_the_bit),
    "auto": Kind(Auto(together=0.0)),
}
"""Those to which faults happen."""
