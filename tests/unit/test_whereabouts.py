"""A call that needs all ranks, made by some alone, is named in seconds; a rank that is merely slow is waited for."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import potluck
from potluck.environment import LAST_WORDS
from potluck.link import whereabouts
from potluck.link.whereabouts import END, LEFT, RUNS, STEP, CallLog, Whereabouts, find_mistake, tell_waiting
from tests.quick import first_of
from tests.ranks import run_ranks, try_ranks

SAVE, MEAN = "fleet.save()", "fleet.mean()"


def log_of(*names: str, place: str = "") -> Whereabouts:
    log = CallLog()
    for name in names:
        with log.within(name, 3 if name != STEP else log.after_step):
            log.note()
    return log.now(place)


def test_ranks_that_have_made_different_calls_are_named_with_where_they_are() -> None:
    ranks = {
        0: log_of(STEP, STEP, SAVE, place="train.py, line 7"),
        1: log_of(STEP, STEP, STEP, STEP, place="train.py, line 5"),
        2: log_of(STEP, STEP, SAVE),
    }
    sentence = find_mistake(ranks)
    assert sentence is not None and sentence == find_mistake(dict(reversed(ranks.items())))
    assert sentence.startswith(
        "fleet.save() was called on worker 0, 2 after step 3 (train.py, line 7), and not on worker 1: worker 1 is at"
        " fleet.step() (train.py, line 5). "
    )
    ended = find_mistake({0: log_of(STEP, MEAN), 1: log_of(STEP, END)})
    assert ended is not None and "worker 1 is at the end of its script" in ended
    left = find_mistake({0: log_of(STEP, STEP), 1: log_of(STEP, LEFT, place="own.py, line 9"), 2: log_of(STEP, MEAN)})
    assert left is not None and left.startswith("The loop of worker 1 has ended after step 3 (own.py, line 9), and ")
    assert "let `break` depend on what is the same for all" in left


@given(
    calls=st.lists(st.sampled_from([STEP, SAVE, MEAN]), max_size=60),
    lengths=st.lists(st.integers(0, 60), min_size=2, max_size=4),
)
def test_a_rank_that_is_only_behind_has_made_no_mistake(calls: list[str], lengths: list[int]) -> None:
    assert find_mistake({rank: log_of(*calls[:length]) for rank, length in enumerate(lengths)}) is None


@given(calls=st.lists(st.sampled_from([STEP, SAVE, MEAN]), max_size=60), at=st.integers(0, 59))
def test_a_call_that_one_rank_leaves_out_is_found_as_long_as_it_is_remembered(calls: list[str], at: int) -> None:
    at = min(at, len(calls))
    differ = {0: log_of(*calls[:at], "fleet.evaluate()"), 1: log_of(*calls)}
    runs = sum(1 for a, b in zip(["", *calls[at:]], calls[at:], strict=False) if a != b)
    found = find_mistake(differ)
    if at == len(calls):
        assert found is None  # the other is behind
    elif runs < RUNS:
        assert found is not None and found.startswith("fleet.evaluate() was called on worker 0")


def test_those_who_are_waited_for_are_named_and_not_blamed() -> None:
    ranks = {0: log_of(STEP, MEAN), 1: log_of(STEP, place="train.py, line 9")}
    sentence = tell_waiting(0, ranks, 3)
    assert sentence is not None and "fleet.mean() on worker 0 has waited" in sentence
    assert "for worker 1, 2; worker 1 was last at train.py, line 9. It may be slow" in sentence
    assert tell_waiting(0, {0: log_of(STEP, MEAN), 1: log_of(STEP, MEAN)}, 2) is None


def test_a_step_in_which_all_wait_at_different_lines_is_told_and_a_slow_rank_is_not() -> None:
    waits = {rank: log_of(STEP, place=f"train.py, line {rank}")._replace(waits=True) for rank in range(2)}
    sentence = tell_waiting(0, waits, 2)
    assert sentence is not None and "worker 0 at train.py, line 0, worker 1 at train.py, line 1." in sentence
    assert tell_waiting(0, waits, 3) is None
    assert tell_waiting(0, waits | {1: waits[1]._replace(waits=False)}, 2) is None  # it computes
    assert tell_waiting(0, waits | {1: waits[1]._replace(place=waits[0].place)}, 2) is None  # bytes travel


# Real ranks


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


CALLS = {
    "save": lambda fleet, folder, data: fleet.save(folder),
    "evaluate": lambda fleet, folder, data: fleet.evaluate(loss_of, data, 4),
    "state_dict": lambda fleet, folder, data: fleet.state_dict(),
    "gather": lambda fleet, folder, data: fleet.gather(1.0),
    "mean": lambda fleet, folder, data: fleet.mean(1.0),
    "wait_for_saves": lambda fleet, folder, data: fleet.wait_for_saves(),
    "keep_best": lambda fleet, folder, data: fleet.keep_best(1.0, folder),
    "early_stop": lambda fleet, folder, data: fleet.early_stop(1.0, patience=2),
    "load": lambda fleet, folder, data: fleet.load(Path(folder) / "before"),
}


def train(folder: str, options: dict[str, Any], call: str, *, is_slow: bool, at_end: bool = False) -> None:
    whereabouts.LOOK_S, whereabouts.QUIET_S, whereabouts.WAITING_S = 0.05, 0.2, 0.4
    os.environ[LAST_WORDS] = f"{folder}/words-{os.environ['RANK']}"
    torch.manual_seed(0)
    with potluck.init(**options) as fleet:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _, loader = fleet.prepare(model, optimizer, data, batch_size=4)  # type: ignore[assignment]

        if call == "load":  # from what all have saved
            fleet.save(Path(folder) / "before")
            fleet.wait_for_saves()

        def make_call() -> None:
            if is_slow and fleet.rank == 1:
                time.sleep(1.0)
            if is_slow or fleet.rank == 0:
                CALLS[call](fleet, folder, data)

        calls = iter(() if at_end else [make_call])
        fleet.after_agreement.append(lambda: next(calls, lambda: None)())
        for batch in loader:
            fleet.backward(loss_of(model, batch), samples=len(batch[0]))
            fleet.step()
        if at_end:
            make_call()


def stuck(folder: str, options: dict[str, Any], call: str, at_end: bool) -> None:
    train(folder, options, call, is_slow=False, at_end=at_end)


def slow(folder: str, options: dict[str, Any], call: str) -> None:
    train(folder, options, call, is_slow=True)


WINDOWS = potluck.Cadence.published(anchor=1, max_anchor=1)
ALONE: list[tuple[str, dict[str, Any], bool]] = [
    ("save", {}, False),
    ("evaluate", {"strategy": potluck.FullShard()}, False),
    ("keep_best", {}, False),
    ("mean", {"policy": WINDOWS}, False),
    ("save", {}, True),
    ("gather", {"strategy": potluck.ShardGradOp()}, False),
    ("state_dict", {"strategy": potluck.FullShard()}, False),
    ("wait_for_saves", {}, False),
    ("load", {}, True),
    ("early_stop", {}, True),
    ("evaluate", {"policy": WINDOWS}, True),
]


@pytest.mark.parametrize(("call", "options", "at_end"), first_of(ALONE, 3), ids=str)
def test_a_call_on_rank_0_alone_ends_the_run_with_a_sentence(
    tmp_path: Path, call: str, options: dict[str, Any], at_end: bool
) -> None:
    found = try_ranks(2, stuck, str(tmp_path), options, call, at_end, timeout_s=60, grace_s=30)
    said = [path.read_text() for path in tmp_path.glob("words-*")]
    said += [each.data for each in found if each.kind == "failed"]
    assert found[0].kind in ("died", "failed"), found
    assert all(each.kind != "late" for each in found), found
    # Gloo may end the process of either rank by itself, when bytes come that do not fit; the other one then says this.
    told = f"fleet.{call}() was called on worker 0", f"in fleet.{call}() after step"
    assert any(each in words for each in told for words in said), said


def resume_on_rank_0_alone(folder: str, options: dict[str, Any]) -> None:
    whereabouts.LOOK_S, whereabouts.QUIET_S, whereabouts.WAITING_S = 0.05, 0.2, 0.4
    os.environ[LAST_WORDS] = f"{folder}/words-{os.environ['RANK']}"
    with potluck.init(**options) as fleet:
        model = nn.Linear(4, 1)
        data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
        model, _, loader = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=4)  # type: ignore[assignment]
        if fleet.rank == 0:
            fleet.load(folder)
        for batch in loader:
            fleet.backward(loss_of(model, batch), samples=len(batch[0]))
            fleet.step()


@pytest.mark.parametrize("options", first_of([{}, {"strategy": potluck.FullShard()}, {"policy": WINDOWS}]), ids=str)
def test_a_load_on_rank_0_alone_names_in_seconds_who_is_missing(tmp_path: Path, options: dict[str, Any]) -> None:
    """As scripts of DDP have it: before the first step, in a group of three."""
    started = time.monotonic()
    found = try_ranks(3, resume_on_rank_0_alone, str(tmp_path), options, timeout_s=60, grace_s=30)
    seconds = time.monotonic() - started
    said = [path.read_text() for path in tmp_path.glob("words-*")]
    said += [each.data for each in found if each.kind == "failed"]
    assert all(each.kind in ("died", "failed") for each in found), found
    # Gloo may end one of them before the third has told where it is: then the others name each other.
    told = (
        r"fleet\.load\(\) was called on worker 0 \(.*\), and not on worker (1, 2|1|2): worker \d is at fleet\.step\(\)"
    )
    assert any(re.search(told, words) for words in said), said
    assert seconds < 20


@pytest.mark.parametrize("options", first_of([{}, {"strategy": potluck.FullShard()}, {"policy": WINDOWS}]), ids=str)
def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path, options: dict[str, Any]) -> None:
    run_ranks(2, slow, str(tmp_path), options, "mean")
