"""What goes with what, over the whole table: each combination is built, or refused by a sentence.

`python -m tests.unit.test_composition` prints the table into docs/composition.md.
"""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from potluck import composition
from potluck.agree.policy import ApplyPolicy, Async, Auto, Cadence, Sync
from potluck.composition import MOST_RANKS, Composition, Wanted, compose, ranks_per_worker, settled
from potluck.errors import ConfigError
from potluck.sharding.strategy import FullShard, HybridShard, NoShard, ShardGradOp, ShardingStrategy
from potluck.stages.protocol import DataStore, Direct, Pipeline, Stages

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

POLICIES: dict[str, ApplyPolicy] = {
    "Sync": Sync(),
    "Cadence": Cadence(),
    "Cadence.published()": Cadence.published(),
    "Async": Async(),
    "Auto": Auto(),
}
STRATEGIES: dict[str, ShardingStrategy] = {
    "NoShard": NoShard(),
    "ShardGradOp": ShardGradOp(),
    "ShardGradOp(keep_gradients)": ShardGradOp(keep_gradients=True),
    'ShardGradOp(weights="memory")': ShardGradOp(weights="memory"),
    "FullShard": FullShard(),
    'FullShard(weights="memory")': FullShard(weights="memory"),
    "HybridShard(1)": HybridShard(intra_node_size=1),
    "HybridShard(2)": HybridShard(intra_node_size=2),
}
STAGES: dict[str, Stages | None] = {
    "whole replicas": None,
    "two stages, 1f1b": Stages(protocol=Pipeline(micro_batch_size=2), count=2),
    "two stages, zero-bubble": Stages(protocol=Pipeline(micro_batch_size=2, schedule="zero-bubble"), count=2),
    "two stages, whole batches": Stages(protocol=Direct(), count=2),
    "two stages through a store": Stages(protocol=DataStore(url="file:///somewhere"), count=2),
}
PLACES = {
    "one worker": Wanted(world=1),
    "a group of 2": Wanted(world=2),
    "a group of 4": Wanted(world=4),
    "under a host, one rank to a worker": Wanted(has_host=True),
    "under a host, two ranks to this worker": Wanted(has_host=True, world=2),
}
OFFLOAD = ", with offload_optimizer"
CODED = ', with wire = "int4"'
SWITCHES: dict[str, dict[str, Any]] = {
    "": {},
    OFFLOAD: {"offload_optimizer": True, "on_gpu": True},
    CODED: {"wire": "int4"},
}


def everything() -> Iterator[tuple[str, str, str, Wanted]]:
    """Each combination, with its table, its row and its column."""
    for place, stages, switch in itertools.product(PLACES, STAGES, SWITCHES):
        for strategy, policy in itertools.product(STRATEGIES, POLICIES):
            wanted = replace(PLACES[place], stages=STAGES[stages], strategy=STRATEGIES[strategy], **SWITCHES[switch])
            yield f"{place.capitalize()}, {stages}{switch}", strategy, policy, replace(wanted, policy=POLICIES[policy])


def answer(wanted: Wanted) -> Composition | str:
    try:
        return compose(wanted)
    except ConfigError as error:
        return str(error)


def words(found: Composition) -> str:
    """How many replicas, of how many stages, over how many ranks each."""
    return f"{found.replicas} x {found.stages} x {found.ranks_per_stage}"


def page() -> str:
    tables: dict[str, dict[str, list[str]]] = {}
    letters: dict[str, str] = {}
    for table, row, _, wanted in everything():
        found = answer(wanted)
        if isinstance(found, str):
            cell = letters.setdefault(found, _letter(len(letters)))
        else:
            cell = words(found)
        tables.setdefault(table, {}).setdefault(row, []).append(cell)
    lines, left = [HEAD], []
    for table, rows in tables.items():
        cells = sorted({cell for row in rows.values() for cell in row}, key=lambda cell: (len(cell), cell))
        if any(switch and table.endswith(switch) and rows == tables[table.removesuffix(switch)] for switch in SWITCHES):
            continue
        if all(cell in letters.values() for cell in cells):
            left.append(f"- {table}: {', '.join(cells)}")
            continue
        lines += [f"\n## {table}\n", f"| | {' | '.join(POLICIES)} |", "|---" * (len(POLICIES) + 1) + "|"]
        lines += [f"| {row} | {' | '.join(found)} |" for row, found in rows.items()]
    lines += ["\n## Where nothing is built\n", *left]
    lines += ["\n## Why\n", *(f"- **{letter}**: {sentence}" for sentence, letter in letters.items())]
    return "\n".join(lines) + "\n"


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"a{_letter(number - 26)}"


HEAD = """# What is built from what

Printed by `python -m tests.unit.test_composition`: do not edit. Every combination of strategy, policy, stages and
place, with and without `step.offload_optimizer` on a GPU, and with numbers that travel in fewer bits (`wire`, of which
all but fp32 have the same answers), as `composition.py` answers it before anything is built:
*replicas x stages x ranks that hold one stage of one replica between them*, or a letter for the reason that it is
refused. A switch that changes nothing has no table. Under a host there are as many replicas as workers, of whom there
may be any number. Which combinations give the numbers of one process is measured in [matrix.md](matrix.md)."""


def test_every_combination_is_built_or_refused_by_a_sentence() -> None:
    found = [answer(wanted) for _, _, _, wanted in everything()]
    assert len(found) == len(POLICIES) * len(STRATEGIES) * len(STAGES) * len(PLACES) * len(SWITCHES)
    for (_, _, _, wanted), one in zip(everything(), found, strict=True):
        if isinstance(one, str):
            assert (one.endswith(".") and ". " in one) or "use the Sync policy" in one, one
        else:
            assert one.replicas * one.stages * one.ranks_per_stage == _workers(wanted, one)
            assert (one.window is None) == (settled(wanted).policy.kind == "sync")
            assert (one.split is None) == (one.ranks_per_stage == 1) or isinstance(
                one.split, HybridShard | FullShard | ShardGradOp
            )


def _workers(wanted: Wanted, found: Composition) -> int:
    return found.ranks_per_stage if wanted.has_host else wanted.world


def test_one_worker_runs_under_every_policy() -> None:
    """A run of one is how people debug."""
    for policy in POLICIES.values():
        assert words(compose(Wanted(policy=policy))) == "1 x 1 x 1"


def test_the_page_has_the_table_of_today() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_host_takes_nodes_whose_files_it_takes() -> None:
    from potluck.fleet.file_stream import MAX_FILES

    assert (MAX_FILES - 3) // 2 == MOST_RANKS


def test_a_strategy_says_whether_a_workers_ranks_are_its_machines_affair() -> None:
    assert [ranks_per_worker(each, here=3) for each in (FullShard(), ShardGradOp(), NoShard())] == [3, 3, 1]
    assert ranks_per_worker(HybridShard(intra_node_size=2), here=3, asked=2) == 2
    with pytest.raises(ConfigError, match=r"--ranks is 3, and HybridShard has an intra_node_size of 2\."):
        ranks_per_worker(HybridShard(intra_node_size=2), here=3, asked=3)
    with pytest.raises(ConfigError, match=r"--ranks is 2, and NoShard keeps a replica on one\."):
        ranks_per_worker(NoShard(), here=2, asked=2)


def test_weights_are_of_the_ranks_of_a_worker_of_a_host() -> None:
    uneven = FullShard(weights=(1, 3))
    assert compose(Wanted(strategy=uneven, has_host=True, world=2)).split == uneven
    with pytest.raises(ConfigError, match=r"strategy.weights has 2 numbers, and this worker 3 ranks\."):
        compose(Wanted(strategy=uneven, has_host=True, world=3))
    with pytest.raises(ConfigError, match=r"A worker of 31 ranks is more than a host takes, which is 30\."):
        compose(Wanted(strategy=FullShard(), has_host=True, world=31))


def test_what_is_composed_needs_no_torch() -> None:
    look = f"import sys, {composition.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


@pytest.mark.parametrize("policy", [Cadence.published(), Async.published()])
def test_weights_of_stages_are_those_of_their_workers(policy: ApplyPolicy) -> None:
    stages = Stages(protocol=Direct(), count=2)
    found = compose(Wanted(strategy=FullShard(weights=(1, 2, 3, 4)), stages=stages, world=4))
    assert found.split_of(0) == FullShard(weights=(1.0, 3.0)) and found.split_of(1) == FullShard(weights=(2.0, 4.0))
    with pytest.raises(ConfigError, match="splits each stage over all workers that hold it"):
        compose(Wanted(policy=policy, strategy=FullShard(), stages=stages, world=4))


def test_every_form_of_numbers_but_fp32_has_the_same_answers() -> None:
    for _, _, _, wanted in everything():
        if wanted.wire == "int4" and not wanted.offload_optimizer:
            found = [str(answer(replace(wanted, wire=wire))).replace(wire, "?") for wire in ("bf16", "int8", "int4")]
            assert len({*found}) == 1


def test_shares_are_as_many_as_lanes() -> None:
    assert compose(Wanted(policy=Sync(shares=(2, 1)), world=2)).shares == (2, 1)
    with pytest.raises(ConfigError, match=r"policy.shares has 2 numbers, and the run 3 workers\."):
        compose(Wanted(policy=Sync(shares=(2, 1)), world=3))


KINDS = {
    *("Sync", "Cadence", "Async", "NoShard", "FullShard", "ShardGradOp", "HybridShard"),
    *("Link", "GroupLink", "StoreLink", "Alone", "Loader"),
}


def test_only_the_composition_asks_which_kind_an_answer_is() -> None:
    source = Path(composition.__file__).parent
    asked = re.compile(rf"isinstance\([^()]*,[^()]*\b({'|'.join(KINDS)})\b")
    found = {
        path.relative_to(source).as_posix() for path in source.rglob("*.py") if asked.search(path.read_text("utf-8"))
    }
    assert found == {"composition.py"}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")


def test_what_auto_sends_is_measured_between_workers_that_step_together() -> None:
    asked = Wanted(wire="auto", world=2)
    store = Stages(protocol=DataStore(url="file:///nowhere"), count=2)
    expected = {
        asked: ("fp32", True),
        replace(asked, strategy=FullShard()): ("fp32", True),
        replace(asked, world=1): ("fp32", False),
        replace(asked, policy=Async()): ("int4", False),
        replace(asked, stages=store, world=4): ("int4", False),
        replace(asked, has_host=True, world=1): ("int4", False),
    }
    for wanted, (wire, is_measured) in expected.items():
        found = compose(wanted)
        assert (found.wire, found.wire_is_measured) == (wire, is_measured)
