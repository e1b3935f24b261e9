"""About a minute of the differential tester: new seeds each day, and some cells of docs/matrix.md."""

import ast
import copy
import datetime
import itertools
import math
import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.differential import (
    blocks,
    cases,
    data,
    habits,
    judge,
    models,
    nets,
    odd_blocks,
    odd_cases,
    odd_nets,
    optimizers,
    plain,
    refusals,
)
from tests.differential.cases import Case, Leg, draw_case, read_case
from tests.differential.compare import compare, compare_calm_steps, is_chaotic
from tests.differential.drawn import drawn_tables
from tests.differential.matrix import PAGE, RIGHT, UNTRIED, Cell, cells, drawn_part, mark, page, read_page
from tests.differential.optimizers import OPTIMIZERS, STEADY
from tests.differential.plain import fails_alike
from tests.differential.refusals import is_allowed
from tests.differential.runner import run_case
from tests.differential.verdict import Verdict, verdict_of

SECONDS = {"sync": 7, "stages": 7, "windows": 7, "legs": 7}
"""For each kind of run. Each has a test of its own, so that several of them run at a time."""
SHORT = 3.0
"""A case is not begun if less is left."""


def first_seed() -> int:
    """Of today, or POTLUCK_SEED: some hundred follow each other, as far as time allows."""
    return int(os.environ.get("POTLUCK_SEED") or datetime.date.today().strftime("%y%m%d000"))


def repeat(verdict: Verdict, kind: str = "") -> str:
    seed = verdict.case.seed
    again = f"POTLUCK_SEED={seed} pytest tests/differential -k {kind}\nor: " if kind else ""
    line = verdict.case.line()
    return f"{verdict.kind} {verdict.detail}\nRepeat: {again}python -m tests.differential --case {line!r}"


@pytest.mark.timeout(240)  # the last case may be a hang
@pytest.mark.parametrize("kind", SECONDS)
def test_whatever_is_drawn_gives_the_numbers_of_one_process_or_is_refused(kind: str) -> None:
    deadline, kinds = time.monotonic() + SECONDS[kind], []
    for case in (draw_case(seed, kind) for seed in itertools.count(first_seed())):
        if kinds and time.monotonic() > deadline - SHORT:
            break
        if "compile" in case.line():
            continue  # takes longer than all the others
        verdict = verdict_of(case)
        assert not verdict.is_fault, repeat(verdict, kind)
        kinds.append(verdict.kind)
    print(f"{len(kinds)} runs, of which {kinds.count('right')} were right, and the others refused")


def test_some_cells_of_the_page_are_as_it_says() -> None:
    told = read_page(PAGE.read_text(encoding="utf-8"))
    table = {cell.key: cell for cell in cells()}
    assert {key for key, shown in told.items() if shown != UNTRIED} <= {key for key, cell in table.items() if cell.case}
    assert set(table) <= set(told)
    assert not [key for key, shown in told.items() if shown.startswith("**")], "the page shows faults"
    tried = [key for key in table if told[key] != UNTRIED]
    by_outcome = [[key for key in tried if is_right == (told[key] == RIGHT)] for is_right in (True, False)]
    draw = random.Random(first_seed())
    for key in [draw.choice(keys) for keys in by_outcome if keys]:
        cell = table[key]
        assert cell.case is not None
        verdict = verdict_of(cell.case)
        assert " ".join(mark(verdict).split()) == told[key], f"{cell.name}: {repeat(verdict)}"


def test_the_judge_shares_no_code_with_potluck() -> None:
    zoo = (models, blocks, odd_blocks, nets, odd_nets, optimizers, habits, data)
    for module in (judge, cases, odd_cases, plain, refusals, *zoo):
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not [name for name in names if name.split(".")[0] == "potluck"], module


def test_a_case_is_repeated_by_its_line() -> None:
    drawn = [draw_case(seed) for seed in range(200)]
    assert [read_case(case.line()) for case in drawn] == drawn
    assert {case.optimizer for case in drawn} >= set(OPTIMIZERS)
    words = " ".join(case.line() for case in drawn)
    for word in ("FullShard(weights", "HybridShard", "Async", "moments", "DataStore", "interleaved", "enter@"):
        assert word in words, word


def test_odd_cases_are_repeated_by_their_lines_and_have_all_that_is_odd() -> None:
    drawn = [odd_cases.draw_any(seed) for seed in range(2000)]
    assert [read_case(case.line()) for case in drawn] == drawn
    words = {word for case in drawn for word in case.model.replace("/", ",").split(",")}
    assert words >= {kind.__name__.lower() for kind in (*odd_blocks.ANY, *odd_blocks.IMAGES)}
    assert words >= set(odd_nets.ODD_TRAITS)
    assert {habit.partition("@")[0] for case in drawn for habit in case.habits} >= set(habits.HABITS)
    assert {case.optimizer for case in drawn} >= {*OPTIMIZERS, *optimizers.ODD_OPTIMIZERS}
    assert {case.scheduler for case in drawn} >= {*optimizers.SCHEDULERS, *optimizers.ODD_SCHEDULERS}
    assert {case.data for case in drawn} == {"", *data.KINDS}
    assert {leg.slow.split("/")[1] for case in drawn for leg in case.legs if leg.slow} == set(odd_cases.PLACES)
    switches = Counter(word for case in drawn for leg in case.legs for word in leg.switches.split(", "))
    for word in ("compile=True", "precision='bf16'", "precision='fp16'", "offload_optimizer=True"):
        assert switches[word] > 10, "in an hour there are no more cases than here"
    assert {leg.policy.partition("(")[0] for case in drawn for leg in case.legs} == {"Sync", "Cadence", "Async", "Auto"}
    assert words >= set(models.ADAPTED) or not models.HAS_PEFT
    hosts = {(leg.policy.partition("(")[0], "bf16" in leg.switches) for case in drawn if case.host for leg in case.legs}
    assert hosts == {("Sync", False), ("Sync", True), ("Cadence", False), ("Auto", False)}


def test_a_case_has_words_that_go_together_and_none_that_is_empty() -> None:
    for case in (odd_cases.draw_any(seed) for seed in range(2000)):
        *rest, traits = case.model.split("/")
        assert all(rest) and all(rest[2].split(",")) and (not traits or all(traits.split(","))), case.model
        assert "types" not in traits.split(",") or case.dtype == "float64", case.line()
        attends_to_itself = rest[0] == "vectors" and {"mha", "encoder"} & set(rest[2].split(","))
        assert not attends_to_itself or not case.optimizer.startswith(optimizers.SHARP), case.line()


def test_without_peft_no_adapter_is_drawn_and_all_else_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [odd_cases.draw_any(seed) for seed in range(500)]
    monkeypatch.setattr(odd_cases, "HAS_PEFT", False)
    without = [odd_cases.draw_any(seed) for seed in range(500)]
    adapted = [set(models.ADAPTED) & set(case.model.rpartition("/")[2].split(",")) for case in drawn]
    assert [case for case in without if any(word in case.model for word in models.ADAPTED)] == []
    assert [a for a, is_adapted in zip(drawn, adapted, strict=True) if not is_adapted] == [
        b for b, is_adapted in zip(without, adapted, strict=True) if not is_adapted
    ]


@pytest.mark.timeout(120)
def test_windows_under_a_host_are_judged_by_what_plain_replicas_and_their_mean_are() -> None:
    """Of ranges by whoever did them, while one joins, one leaves and one is killed; and the judge bites."""
    case = Case(
        dtype="float32",
        rows=96,
        epochs=4,
        data="in-order",
        host="2,join@3,leave@6,join@7,kill@12",
        legs=(Leg(policy="Cadence(anchor=1, max_anchor=2, together=0.2)"),),
    )
    told, found = run_case(case)
    expected = judge.judge(case, told)
    assert not compare(case, expected, told, found)
    assert len(told[0]) > 1, "only one worker did anything"
    assert {0} < set(told[0][0]["anchors"]), "some steps are taken together, and others are not"
    alone = copy.deepcopy(told)
    alone[0][0]["anchors"] = [0] * len(alone[0][0]["anchors"])
    off = judge.judge(case, alone)
    assert off.complaints or compare(case, off, told, found)


def told(
    losses: list[list[float]], windows: list[list[list[list[int]]]], evaluated: float | None = 0.0
) -> dict[str, object]:
    rows = [row for window in windows for step in window for micro in step for row in micro]
    return {
        "replica": 0,
        "lane": 0,
        "windows": windows,
        "epochs": [[0, row] for row in rows],
        "ends": [len(windows)],
        "events": losses,
        "proofs": [],
        "evaluated": evaluated,
        "average": {},
    }


def test_the_judge_bites() -> None:
    """A run that is right, and the same with one number, one row or one step off."""
    case = Case(rows=4, batch=2, legs=(Leg(),))
    windows = [[[[0, 3]]], [[[1, 2]]]]
    expected = judge.judge(case, [[told([], windows)]])
    right = [[told(expected.steps[0], windows, expected.evaluated)]]
    assert not compare(case, expected, right, expected.tensors)
    off = {name: tensor.clone() for name, tensor in expected.tensors.items()}
    off["enter.weight"][0, 0] += 1e-6
    assert "enter.weight is off by 1e-06" in compare(case, expected, right, off)[0]
    late = [[told([expected.steps[0][0], [float("nan"), float("nan"), 0.0]], windows)]]
    assert "only one of them was skipped" in compare(case, expected, late, expected.tensors)[0]
    twice = judge.judge(case, [[told([], [[[[0, 3]]], [[[1, 1]]]])]])
    assert twice.complaints == ["(epoch, row) (0, 1) was used 2 times", "(epoch, row) (0, 2) was used 0 times"]


def test_the_judge_misses_what_a_checkpoint_lacks_unless_it_is_a_large_frozen_base() -> None:
    windows = [[[[0, 3]]], [[[1, 2]]]]
    for model, lacking, is_right in (
        ("vectors/4/large,mlp/frozen", ("frozen", "blocks.0.inside.table"), True),
        ("vectors/4/large,mlp/frozen", ("frozen", "head.weight"), False),
        ("vectors/8/mlp,mlp/frozen", ("frozen",), False),
    ):
        case = Case(model=model, rows=4, batch=2)
        expected = judge.judge(case, [[told([], windows)]])
        right = [[told(expected.steps[0], windows, expected.evaluated)]]
        found = {name: tensor for name, tensor in expected.tensors.items() if name not in lacking}
        complaints = compare(case, expected, right, found)
        assert complaints == ([] if is_right else [f"{lacking[-1]} is not in the checkpoint"])
        changed = replace(case, habits=("clamp",))
        expected = judge.judge(changed, [[told([], windows)]])
        found = {name: tensor for name, tensor in expected.tensors.items() if name not in lacking}
        assert "frozen is not in the checkpoint" in compare(changed, expected, right, found)


def test_a_refusal_is_a_finding_unless_the_case_asks_for_it() -> None:
    sentence = "head.weight was used outside of its module's forward. It is split over ranks."
    assert is_allowed(sentence, Case(habits=("l2",)))
    assert is_allowed(sentence, Case(habits=("freeze@2",)))
    assert not is_allowed(sentence, Case())
    assert not is_allowed("Instead of the tied 1 came the tied 0. The workers do not follow the same plan.", Case())
    cells_told = {*read_page(PAGE.read_text(encoding="utf-8")).items()}
    table = {cell.key: cell.case for cell in cells()}
    refused = [(shown, table[key]) for key, shown in cells_told if shown not in (RIGHT, UNTRIED)]
    assert not [shown for shown, case in refused if case is None or not is_allowed(shown, case)]


def test_what_plain_pytorch_cannot_do_is_not_judged() -> None:
    case = Case(model="tokens/4/mlp/", habits=("penalty",))
    error = "RuntimeError: only Tensors of floating point dtype can require gradients"
    assert fails_alike(case, f"rank 1: {error}")
    assert not fails_alike(case, "rank 1: RuntimeError: something else")
    assert not fails_alike(Case(), f"rank 1: {error}")


def test_the_judge_of_a_chaotic_run_judges_the_steps_before() -> None:
    case = Case(rows=4, batch=2)
    windows = [[[[0, 3]]], [[[1, 2]]]]
    expected, shaken = (judge.judge(case, [[told([], windows)]], is_shaken=shaken) for shaken in (False, True))
    name = "enter.weight"
    assert not torch.equal(expected.tensors[name], shaken.tensors[name])
    loss, norm, samples = expected.steps[0][1]
    shaken.steps[0][1] = [loss + 1, norm, samples]
    assert not compare_calm_steps(case, expected, shaken, [[told([expected.steps[0][0], [7.0, 7.0, 2.0]], windows)]])
    assert compare_calm_steps(case, expected, shaken, [[told([[7.0, 7.0, 2.0], expected.steps[0][1]], windows)]])


def test_a_loss_that_the_runs_type_has_no_room_for_is_not_judged_and_the_steps_before_are() -> None:
    case = Case(rows=4, batch=2, dtype="float32")
    windows = [[[[0, 3]]], [[[1, 2]]]]
    expected = judge.judge(case, [[told([], windows)]])
    assert not is_chaotic(case, expected, expected)
    first, (_, norm, samples) = expected.steps[0]
    expected.steps[0][1], skipped = [4e50, norm, samples], [math.nan, math.nan, 0.0]
    assert is_chaotic(case, expected, expected)
    assert not is_chaotic(replace(case, dtype="float64"), expected, expected)
    assert not compare_calm_steps(case, expected, expected, [[told([first, skipped], windows)]])
    assert compare_calm_steps(case, expected, expected, [[told([skipped, skipped], windows)]])


def test_a_page_is_read_as_it_was_printed() -> None:
    sentence = "It cannot. Do that."
    marks = {
        Cell("T", "a", "b", Case()): "✓",
        Cell("T", "c", "b", Case()): sentence,
        Cell("T", "d", "b", None, "R"): "·",
    }
    wanted = {("T", "a", "b"): "✓", ("T", "c", "b"): sentence, ("T", "d", "b"): "·"}
    assert read_page(page(marks)) == wanted
    drawn = drawn_tables([Verdict(Case(), "right"), Verdict(Case(), "refused", sentence), Verdict(Case(), "right")])
    assert read_page(page(marks, drawn)) == wanted
    assert drawn_part(page(marks, drawn)) == drawn
    assert "\n| mlp | 2 + 1 | 0 |" in drawn


ROUGH = "Async(anchor=2, max_anchor=2)"
FOUND = {
    "stages that share weights within themselves cut no backward in two": Case(
        model="tokens/4/attention,attention,attention/twins",
        legs=(Leg(world=2, stages="Stages(protocol=Pipeline(micro_batch_size=1, schedule='zero-bubble'), cuts=(1,))"),),
    ),
    "stages with hooks on a layer, which make its output a view, or on a weight cut no backward in two": Case(
        model="vectors/8/mlp,mlp,mlp/",
        habits=("hook-module", "hook-mask"),
        legs=(
            Leg(world=3, stages="Stages(protocol=Pipeline(micro_batch_size=2, schedule='zero-bubble'), cuts=(1, 2))"),
        ),
    ),
    "a loop may end after a step of which a worker has no rows": Case(
        model="images/8/conv,conv/counter",
        rows=10,
        batch=8,
        epochs=2,
        legs=(
            Leg(world=2, policy="Sync(shares=(2.0, 3.0))", until=2),
            Leg(world=2, policy="Sync(shares=(2.0, 3.0))", until=3),
            Leg(world=1),
        ),
    ),
    "what is saved as soon as it was loaded leaves the same rows to do": Case(
        rows=23, batch=5, legs=(Leg(world=3, policy=ROUGH, until=1), Leg(world=2, policy=ROUGH, until=1), Leg(world=1))
    ),
    "complex numbers drift apart and are averaged": Case(
        model="vectors/6/mlp,complex/", dtype="float32", legs=(Leg(world=2, policy="Async(anchor=2)"),)
    ),
    "what Adam keeps of complex numbers is averaged": Case(
        model="vectors/6/mlp,complex/",
        dtype="float32",
        optimizer="Adam(lr=0.01, eps=0.01)",
        legs=(Leg(world=2, policy="Async(anchor=2, moments=True)"),),
    ),
    "a worker of several stages saves the model's own parameters": Case(
        model="vectors/6/mlp,mlp,mlp/position",
        legs=(Leg(stages="Stages(protocol=Pipeline(micro_batch_size=3, schedule='interleaved'))"),),
    ),
    "a stage saves buffers that its layers replace": Case(
        model="vectors/6/mlp,odd,odd/", legs=(Leg(world=2, stages="Stages(protocol=Pipeline(micro_batch_size=3))"),)
    ),
    "a stage without a block is not compiled as a whole": Case(
        model="vectors/6/mlp,mlp,mlp/",
        legs=(Leg(world=2, stages="Stages(protocol=Direct(), cuts=(4,))", switches="compile=True"),),
    ),
    "rows that do not count leave no trace in a split stage's BatchNorm": Case(
        model="images/4/conv,conv,conv/",
        rows=13,
        batch=5,
        legs=(
            Leg(
                world=4,
                strategy="FullShard()",
                stages="Stages(protocol=Pipeline(micro_batch_size=2), count=2, cuts=(2,))",
            ),
        ),
    ),
    "an optimizer that steps parameters whole may hold frozen ones": Case(
        model="vectors/6/mlp,mlp/frozen",
        optimizer="Adafactor(lr=0.01)",
        legs=(Leg(world=2, strategy="FullShard(weights=(2.0, 1.0))"),),
    ),
    "stages of a model in channels_last are saved and loaded": Case(
        model="images/4/conv,bare/channels",
        optimizer="Adam(lr=0.01)",
        legs=(Leg(world=2, stages="Stages(protocol=Direct())", until=1), Leg(stages="Stages(protocol=Direct())")),
    ),
    "a rank that holds nothing of a model follows an average of nothing": Case(
        habits=("ema",), legs=(Leg(world=2, strategy="FullShard(weights=(1.0, 0.0))"),)
    ),
    "a loop's own write is refused where it is first done": Case(
        habits=("clamp",), legs=(Leg(world=2, strategy="FullShard(weights=(2.0, 1.0))"),)
    ),
    "a loss with a weight of its own is evaluated in stages that are split": Case(
        model="vectors/6/mlp,mlp/learned",
        legs=(
            Leg(
                world=4,
                strategy="FullShard(weights=(1.0, 2.0, 3.0, 1.0))",
                stages="Stages(protocol=Pipeline(micro_batch_size=5), count=2)",
            ),
        ),
    ),
    "an average begins with weights that were loaded after prepare()": Case(
        habits=("load", "ema"), legs=(Leg(world=2, strategy="ShardGradOp()", switches="offload_optimizer=True"),)
    ),
    "layers hear in which form the weights are that a split model loads": Case(
        model="vectors/4/mlp,oldspectralnorm/", habits=("load",), legs=(Leg(strategy="FullShard(weights=(1.0,))"),)
    ),
    "a stage whose layers have no parameters has nothing to split": Case(
        model="vectors/4/mlp,mlp,mlp/nested",
        legs=(
            Leg(
                world=3,
                strategy="ShardGradOp()",
                stages="Stages(protocol=Pipeline(micro_batch_size=3), cuts=(2, 3))",
            ),
        ),
    ),
    "a stage whose layers have no parameters has nothing to split in units": Case(
        model="vectors/4/mlp,mlp,mlp/nested",
        legs=(
            Leg(
                world=3,
                strategy="FullShard(weights=(1.0, 1.0, 1.0))",
                stages="Stages(protocol=Pipeline(micro_batch_size=3), cuts=(2, 3))",
            ),
        ),
    ),
    "a gradient through layers that are computed again is refused as what it is": Case(
        model="vectors/6/mlp,mlp,mlp/recompute",
        habits=("penalty",),
        legs=(Leg(world=2, stages="Stages(protocol=Pipeline(micro_batch_size=3))"),),
    ),
    "a weight that a reentrant checkpoint and the loss use is refused where gradients are split": Case(
        model="vectors/4/mlp,mlp/reentrant",
        habits=("l2",),
        legs=(Leg(world=2, strategy="ShardGradOp()"),),
    ),
    "an average leaves frozen weights as they are": Case(
        model="vectors/4/mlp,mlp/frozen", habits=("clamp", "ema"), legs=(Leg(world=2, strategy="ShardGradOp()"),)
    ),
    "an average of weights that one rank steps whole is refused": Case(
        optimizer="Signs(lr=0.01)", habits=("ema",), legs=(Leg(strategy="FullShard()"),)
    ),
    "what blocks hand on in a dataclass is rounded to bf16 as all else under FullShard": Case(
        model="tokens/8/complex,attention/structs",
        dtype="float32",
        legs=(Leg(strategy="FullShard()", switches="precision='bf16'"),),
    ),
    "what blocks hand on in a dataclass is rounded to bf16 under FullShard with weights, too": Case(
        model="tokens/8/complex,attention/structs",
        dtype="float32",
        legs=(Leg(world=2, strategy="FullShard(weights=(1.0, 2.0))", switches="precision='bf16'"),),
    ),
    "what one rank of several keeps of a parameter is not averaged between replicas": Case(
        optimizer="Centred(lr=0.05, momentum=0.9)",
        epochs=2,
        legs=(
            Leg(
                world=4, strategy="HybridShard(intra_node_size=2)", policy="Async(anchor=1, max_anchor=2, moments=True)"
            ),
        ),
    ),
    "BatchNorm under bf16 and FullShard": Case(
        model="images/4/conv,conv/", dtype="float32", legs=(Leg(strategy="FullShard()", switches="precision='bf16'"),)
    ),
}
"""Faults that random cases have found, and no other test had."""


@pytest.mark.slow
@pytest.mark.skipif(not models.HAS_PEFT, reason="needs peft")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("trait", models.ADAPTED)
@pytest.mark.parametrize(
    "options",
    [
        {"legs": (Leg(world=2, strategy="FullShard()"),)},
        {"legs": (Leg(world=2, stages="Stages(protocol=Pipeline(micro_batch_size=3))"),)},
        {"legs": (Leg(world=2, policy="Cadence(anchor=2)"),)},
        {"host": "2,join@1,kill@2", "data": "in-order", "dtype": "float32", "legs": (Leg(),)},
    ],
    ids=["FullShard", "stages", "windows", "host"],
)
def test_adapters_of_peft_train_as_plain_pytorch_and_peft_train_them(trait: str, options: dict[str, Any]) -> None:
    verdict = verdict_of(Case(model=f"vectors/8/mlp,mlp,norm/{trait}", optimizer=STEADY[2], **options))
    assert verdict.kind == "right", repeat(verdict)


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] if "compiled" in what else []) for what in FOUND]
)
def test_what_was_found_once_stays_right(what: str) -> None:
    verdict = verdict_of(FOUND[what])
    assert verdict.kind == ("refused" if "refused" in what else "right"), repeat(verdict)
