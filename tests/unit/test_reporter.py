"""A tracker cannot hold up a run: real processes that hang, fail, fall behind or end."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from potluck.errors import ConfigError
from potluck.events import Event, EventFile, Noticed, RunEnded, RunStarted, StepDone, WorkerStep
from potluck.trackers import known, reporter
from potluck.trackers.reporter import Reporter, Tracking
from potluck.trackers.scalars import MOST_WORKERS, Scalars, flat

STARTED = RunStarted(
    name="a", folder="", workers=1, device="", parameters=1, unit="rows", batch_size=1, steps_total=0, from_step=0
)
ENDED = RunEnded(reason="finished", step=1, rows_seen=1, seconds=1.0, loss=None, validation_loss=None, skipped=0)
HANGS = "import threading; threading.Event().wait()"
FOLLOWS = """
import sys
from pathlib import Path
from potluck.trackers.process import _lines
for line in _lines(Path(sys.argv[1]), 0):
"""
TAKES = FOLLOWS + "    print('.', flush=True)\n"
KEEPS = FOLLOWS + "    open(sys.argv[2], 'a').write(line + chr(10)); print('.', flush=True)\n"
WAITS = FOLLOWS + "    print('.', flush=True); break\n" + HANGS
FAILS = FOLLOWS + "    print('UsageError: No API key configured.', flush=True); sys.exit(1)\n"
MANY = 8192


def step(number: int, workers: int = 0) -> StepDone:
    parts = tuple(WorkerStep(rank=rank, rows=1, samples=1.0, busy_s=rank, wait_s=0.0) for rank in range(workers))
    return StepDone(
        step=number, epoch=0, rows_seen=1, samples=1.0, loss=1.0, lr=0.1, grad_norm=1.0, seconds=0.1, workers=parts
    )


@pytest.fixture
def said() -> list[str]:
    return []


class Followed:
    """A file of events, and a process that follows it: both hear each event."""

    def __init__(self, code: str, place: Path, said: list[str]) -> None:
        self.file = EventFile(place / "events.jsonl")
        self.reporter = Reporter(
            "mine", [sys.executable, "-c", code, str(place / "events.jsonl"), str(place)], said.append
        )

    def __call__(self, event: Event) -> None:
        self.file(event)
        self.reporter(event)


@pytest.fixture
def start(said: list[str], tmp_path: Path) -> Iterator[Callable[..., Followed]]:
    begun: list[Followed] = []

    def start(code: str) -> Followed:
        begun.append(Followed(code.replace("sys.argv[2]", "sys.argv[2] + '/heard'"), tmp_path, said))
        return begun[-1]

    yield start
    for each in begun:
        each.reporter._process.kill()
        each.reporter._reader.join(10)
        assert not each.reporter._reader.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_all_that_is_told_arrives_in_order_and_the_end_waits_for_it(
    start: Callable[..., Followed], said: list[str], tmp_path: Path
) -> None:
    mine = start(KEEPS)
    for event in (STARTED, *map(step, range(1, 101)), ENDED):
        mine(event)
    mine.reporter.end()
    mine.reporter.wait(30)
    heard = (tmp_path / "heard").read_text().splitlines()
    assert len(heard) == 102 and '"step": 57' in heard[57] and said == []


def test_what_had_to_wait_is_told_with_the_time_at_which_it_happened(
    start: Callable[..., Followed], tmp_path: Path
) -> None:
    EventFile(tmp_path / "events.jsonl")(step(1))
    told_at = time.time()
    wait_until(lambda: time.time() > told_at + 0.1)
    mine = start(KEEPS)
    mine(ENDED)
    mine.reporter.end()
    mine.reporter.wait(30)
    first, last = (json.loads(line)["time"] for line in (tmp_path / "heard").read_text().splitlines())
    assert first <= told_at + 0.001 and last >= told_at + 0.099


def test_one_that_hangs_costs_a_step_nothing_and_is_said_once(
    start: Callable[..., Followed], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "HANGS_S", 0.2)
    mine = start(HANGS)
    mine(STARTED)
    wait_until(lambda: mine.reporter.silent_s > 0.2)
    slowest = 0.0
    for number in range(1, MANY):
        began = time.perf_counter()
        mine(step(number))
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 0.5, "a step waited for the tracker"
    mine.reporter.end()
    began = time.perf_counter()
    mine.reporter.wait(600)
    assert time.perf_counter() - began < 30, "one that is known to hang is not waited for"
    assert len(said) == 2, said
    assert "The tracker mine has taken nothing for 0 s. Training does not wait for it" in said[0]
    assert f"The tracker mine did not take {MANY:,} records of" in said[1]


def test_the_end_waits_a_bounded_time(start: Callable[..., Followed], said: list[str]) -> None:
    mine = start(WAITS)
    mine(STARTED)
    mine(ENDED)
    wait_until(lambda: mine.reporter.taken == 1)
    mine.reporter.end()
    mine.reporter.wait(0.2)
    assert said == ["The tracker mine did not take 1 record of 2. They are in events.jsonl, if the run has a folder."]


def test_one_that_is_slow_is_told_everything_that_was_written_before_the_end(
    start: Callable[..., Followed], said: list[str], tmp_path: Path
) -> None:
    """Nothing is left out because too much waits, however many lines are behind it."""
    mine = start(KEEPS)
    for number in range(MANY):
        mine(step(number, workers=5))
    mine.reporter.end()
    mine.reporter.wait(60)
    heard = [json.loads(line)["step"] for line in (tmp_path / "heard").read_text().splitlines()]
    assert heard == list(range(MANY)) and said == []


def test_one_that_fails_is_said_once_and_left_out(start: Callable[..., Followed], said: list[str]) -> None:
    mine = start(FAILS)
    mine(STARTED)
    mine.reporter._reader.join(30)
    for number in range(100):
        mine(step(number))
    mine.reporter.end()
    mine.reporter.wait(30)
    assert said == [
        "The tracker mine failed, and is left out from here on; the run continues: UsageError: No API key configured."
    ]


def test_a_notice_from_a_trackers_thread_and_a_step_do_not_wait_for_each_other(said: list[str], tmp_path: Path) -> None:
    """The notice is an event, which this reporter hears too."""
    told: list[Reporter] = []
    file = EventFile(tmp_path / "events.jsonl")
    is_there = threading.Event()

    def notice(words: str) -> None:
        is_there.wait(30)
        file(Noticed(sentence=words))
        told[0](Noticed(sentence=words))
        said.append(words)

    code = "print('mine: this run is at home', flush=True)\n" + TAKES
    mine = Reporter("mine", [sys.executable, "-c", code, str(tmp_path / "events.jsonl")], notice)
    told.append(mine)
    is_there.set()
    wait_until(lambda: bool(said))
    file(ENDED)
    mine(ENDED)
    mine.end()
    mine.wait(30)
    assert said == ["mine: this run is at home"]


def test_one_that_is_unknown_or_not_installed_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"track takes 'tensorboard', 'wandb', .*, not 'wanb'"):
        Tracking(["wanb"], tmp_path, tmp_path / "events.jsonl", print)
    monkeypatch.setitem(known.LIBRARIES, "wandb", "surely_not_installed")
    (tmp_path / "surely_not_installed").mkdir()  # a folder is no library
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"wandb is not installed here: pip install '\./potluck\[wandb\]'"):
        Tracking(["wandb"], tmp_path, tmp_path / "events.jsonl", print)


def test_all_numbers_have_names_and_workers_are_summed_up_where_they_are_many() -> None:
    scalars = Scalars()
    record = {"event": "step_done", "step": 3, "time": 1.0, "schema": 1, "loss": 0.5, "workers": []}
    worker = {"rank": 0, "name": "a/b c", "rows": 2, "samples": 2.0, "busy_s": 1.0, "wait_s": 0.0, "send_s": 0.0}
    assert scalars.of(record | {"workers": [worker]}) == (
        3,
        {"train/loss": 0.5} | {f"workers/a-b-c/{k}": v for k, v in worker.items() if k not in ("rank", "name")},
    )
    many = [worker | {"name": f"w{n}", "rows": n} for n in range(MOST_WORKERS)]
    _, found = scalars.of(record | {"workers": many})
    assert found["workers/least/rows"] == 0 and found["workers/most/rows"] == MOST_WORKERS - 1
    assert found["workers/mean/rows"] == (MOST_WORKERS - 1) / 2 and len(found) == 1 + 15
    told = {"event": "validated", "step": 4, "time": 1.0, "schema": 1, "loss": None, "metrics": {"top 1": 0.9}}
    assert scalars.of(told) == (4, {"validation/top-1": 0.9})
    left = {"event": "worker_went", "worker": 7, "name": "x", "reason": "", "polite": True, "workers": 2, "time": 1.0}
    assert scalars.of(left) == (4, {"worker_went/workers": 2.0}), "at the last step"
    assert flat({"a": {"b": {"c": 1}, "d": 2}}) == {"a.b.c": 1, "a.d": 2}
