"""The story that `make demo-fleet` tells is what the events show, and its verdict can be a bad one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo_fleet.__main__ import (
    EventTail,
    FleetOrder,
    check,
    epochs_of,
    find_folder,
    is_within_epoch,
    shown_name,
)
from examples.demo_fleet.story import Comparison, FleetStory, Progression, together
from potluck.errors import ConfigError

NAMES = {11: "joiner-1", 12: "joiner-2", 14: "joiner-4"}


def at(time: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": time} | fields


def came(time: float, pid: int, workers: int) -> dict[str, Any]:
    return at(time, "worker_came", name=f"my-box-{pid}", kind="a CPU", workers=workers, step=0)


def went(time: float, pid: int, *, polite: bool) -> dict[str, Any]:
    return at(time, "worker_went", name=f"my-box-{pid}", reason="it closed the connection", polite=polite, workers=1)


def done(time: float, step: int, *pids: int) -> dict[str, Any]:
    workers = [{"name": f"my-box-{pid}", "rows": 6} for pid in pids]
    return at(time, "step_done", step=step, loss=2.5, workers=workers)


def started(time: float, from_step: int) -> dict[str, Any]:
    return at(time, "run_started", parameters=1000, steps_total=30, batch_size=12, from_step=from_step)


def proof(time: float, epoch: int, used: int = 360) -> dict[str, Any]:
    sentence = f"Epoch {epoch + 1}: it is so."
    return at(time, "epoch_done", epoch=epoch, used=used, total=360, same_weights=True, sentence=sentence)


def ended(time: float, reason: str = "finished") -> dict[str, Any]:
    return at(time, "run_ended", reason=reason, step=30, seconds=9.0)


def heard(story: FleetStory, *records: dict[str, Any]) -> str:
    return "\n".join(told.text for record in records for told in story.hear(record))


def a_story() -> FleetStory:
    """Two joined, and did four steps."""
    story = FleetStory(lambda name: shown_name(name, NAMES))
    said = heard(story, came(1, 11, 1), came(2, 12, 2), started(3, 0), *(done(3 + s, s, 11, 12) for s in range(1, 5)))
    assert said.splitlines() == [
        "joiner-1 joins (a CPU); 1 worker now.",
        "joiner-2 joins (a CPU); 2 workers now.",
        "Training 1k parameters: 30 steps of 12 rows.",
    ]
    return story


def test_a_killed_worker_is_told_of_by_what_the_events_show() -> None:
    story = a_story()
    told = story.on_kill("joiner-2", 7.5)
    assert told.text == "joiner-2 is killed (-9), after step 4."
    assert heard(story, done(7.6, 5, 11, 12)) == "", "a step that it still had its part in tells nothing of the others"
    assert heard(story, went(7.8, 12, polite=False), done(8.0, 6, 11)).splitlines() == [
        "joiner-2 is lost (it closed the connection); 1 worker now.",
        "Step 6 is done 0.5 s after the kill, by joiner-1. No step was lost, and none was done twice.",
    ]
    assert heard(story, done(9, 7, 11)) == ""
    assert heard(story, came(10, 14, 2)) == "joiner-4 joins in the middle of the run, after step 7; 2 workers now."
    assert story.joined_late == {"joiner-4": 7} and story.present == ["joiner-1", "joiner-4"]


@pytest.mark.parametrize(
    ("next_step", "ends"),
    [
        (5, "No step was lost, and none was done twice."),
        (7, "those since step 4 were in the journal. No step was done twice."),
        (3, "2 steps had to be done again."),
    ],
)
def test_a_killed_host_is_told_of_with_the_steps_that_were_done_again(next_step: int, ends: str) -> None:
    story = a_story()
    assert story.on_kill("the host", 7.5, is_host=True).text == "The host is killed (-9), after step 4."
    records = (came(9, 11, 1), came(9, 12, 2), started(9, next_step - 1), done(9.5, next_step, 11, 12))
    said = heard(story, *records).splitlines()
    assert said[:3] == [
        "joiner-1 is back by itself; 1 worker now.",
        "joiner-2 is back by itself; 2 workers now.",
        f"The host has read its journal, and resumes after step {next_step - 1}.",
    ]
    assert said[3].startswith(f"Step {next_step} is done 2.0 s after the kill, by joiner-1 and joiner-2")
    assert said[3].endswith(ends)
    assert story.run.repeated == (next_step <= 4)


def finished() -> tuple[FleetStory, Progression]:
    """Two runs that came to the same, one of them disturbed."""
    story, other = a_story(), Progression()
    story.on_kill("joiner-2", 7.5)
    heard(story, went(7.8, 12, polite=False), done(8, 5, 11), proof(9, 0), ended(10))
    for record in (started(1, 0), done(2, 5, 11), proof(3, 0), ended(4)):
        other.hear(record)
    return story, other


def test_equal_hashes_and_whole_proofs_keep_the_promise() -> None:
    story, other = finished()
    comparison = Comparison(story, other, ("ab" * 32, "ab" * 32))
    assert comparison.faults() == []
    rows = {name: (ours, theirs) for name, ours, theirs in comparison.rows()}
    assert rows["what was done to it"] == ("step 4: joiner-2 killed (-9)", "nothing")
    assert rows["epoch 1: used exactly once"] == ("360 of 360 rows", "360 of 360 rows")
    assert rows["loss of the last step"] == ("2.5", "2.5")


def broken_promises() -> Iterator[tuple[Comparison, str]]:
    story, other = finished()
    yield Comparison(story, other, ("ab" * 32, "ac" * 32)), "The weights of the disturbed run are not those"
    story, other = finished()
    story.hear(proof(11, 0, used=-1))
    yield Comparison(story, other, ("ab", "ab")), "Of epoch 1 of the disturbed run there is no proof"
    story, other = finished()
    other.hear(proof(11, 1))
    yield Comparison(story, other, ("ab", "ab")), "Of epoch 2 of the disturbed run there is no proof"
    story, other = finished()
    other.hear(ended(11, "interrupted"))
    yield Comparison(story, other, ("ab", "ab")), "The undisturbed run did not finish."
    story, other = finished()
    story.on_kill("the host", 9.0, is_host=True)
    yield Comparison(story, other, ("ab", "ab")), "The host was killed, and the events do not show"


def test_each_broken_promise_is_said() -> None:
    for comparison, sentence in broken_promises():
        faults = comparison.faults()
        assert len(faults) == 1 and faults[0].startswith(sentence), faults


def test_events_are_read_once_they_are_whole(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "events.jsonl")
    assert tail.read() == []
    with (tmp_path / "events.jsonl").open("ab", buffering=0) as file:
        file.write(b'{"event": "a"}\n{"eve')
        assert tail.read() == [{"event": "a"}]
        file.write(b'nt": "b"}\n{"event": "cut by a ki')
        assert tail.read() == [{"event": "b"}]
        file.write(b'\n{"event": "c"}\n')  # what a host that is started again writes
        assert tail.read() == [{"event": "c"}] and tail.read() == []


def test_the_host_is_not_killed_as_an_epoch_ends() -> None:
    places = [step for step in range(1, 31) if is_within_epoch(Progression(step=step, total=30), 3)]
    assert places == [4, 5, 6, 14, 15, 16, 24, 25, 26]
    assert is_within_epoch(Progression(step=10, total=30), 10), "epochs too short to choose in"


def test_orders_that_cannot_keep_the_promise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for order, sentence in (
        (FleetOrder(joiners=1), "at least two"),
        (FleetOrder(settings=["policy.kind=cadence"]), "the policy is not changed here"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check(order)
    assert epochs_of(FleetOrder()) == 3 and epochs_of(FleetOrder(settings=["fit.epochs=7"])) == 7
    assert find_folder(None) == Path("runs/demo-fleet")
    (tmp_path / "runs/demo-fleet/disturbed/checkpoints").mkdir(parents=True)
    assert find_folder(None) == Path("runs/demo-fleet-2")
    with pytest.raises(ConfigError, match="already holds a run"):
        find_folder("runs/demo-fleet")


def test_names_in_a_sentence() -> None:
    assert [together(list("abc")[:n]) for n in range(4)] == ["nobody", "a", "a and b", "a, b and c"]
