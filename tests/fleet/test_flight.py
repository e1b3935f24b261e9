"""What a coordinator heard and decided is written down, and leads to the same decisions again."""

import json
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.events import Stalled
from potluck.fleet import flight
from potluck.fleet.client import Client
from potluck.fleet.coordinator import feed
from potluck.fleet.flight import START, FlightRecorder, segments
from potluck.fleet.flight_lines import freeze, line_of, thaw
from potluck.fleet.invite import Invite
from potluck.fleet.replaying import Replay, replay
from potluck.fleet.waits import tell_owed, tell_waits
from potluck.wire.messages import Heartbeat, Hello, Wrote
from tests.fleet.seeds import POLICIES, seeds
from tests.fleet.simulation import simulate
from tests.fleet.virtual import Fleet, host
from tests.fleet.virtual.faults import FaultScript
from tests.fleet.virtual.toy import SECRET


def double(samples: str) -> str:
    return b64encode((2 * np.frombuffer(b64decode(samples), "<f8")).tobytes()).decode()


def state_of(core: Any) -> dict[str, Any]:
    return {
        "after": START,
        "inputs": 0,
        "potluck": "0",
        "time": 0.0,
        "clock": 0.0,
        "heard": freeze({}),
        "core": freeze(core),
    }


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What each host of a simulated run hears, from its first input on: its state, and lines."""
    found: list[list[Any]] = []

    def decide(self: Any, name: str, *what: Any) -> None:
        if not hasattr(self, "tape"):
            self.tape = [json.dumps(state_of(self.core))]
            found.append(self.tape)
        decided = feed(self.core, self.clock.now, name, *what)
        if name == "message" and isinstance(what[1], Hello):
            what = what[0], replace(what[1], secret="" if what[1].secret == SECRET else "wrong"), *what[2:]
        self.tape.append(line_of(self.clock.now, name, what, decided))
        self.act(decided)

    monkeypatch.setattr(host.Host, "decide", decide)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_happens_to_a_run_its_coordinator_decides_the_same_again(policy: str, tapes: list[list[Any]]) -> None:
    lines = 0
    for seed in seeds(3):
        tapes.clear()
        simulate(seed, policy, Counter())
        for tape in tapes:
            again = Replay()
            again.begin(json.loads(tape[0]))
            for place, line in enumerate(tape[1:]):
                if place % 29 == 0:  # as where the ring has lost its beginning
                    again.core = thaw(json.loads(json.dumps(freeze(again.core))))
                assert again.feed(*json.loads(line)), (seed, again.difference)
        lines += sum(map(len, tapes))
    assert lines > 100


def test_an_input_that_is_missing_or_another_is_noticed_where_it_first_matters(tapes: list[list[Any]]) -> None:
    Fleet(workers=2).finish()
    (tape,) = tapes
    lines = [json.loads(line) for line in tape]
    reports = [place for place, line in enumerate(lines) if place and "SliceReport" in str(line[2])]
    for is_missing, wrong in ((True, reports[3]), (False, reports[4])):
        again = Replay()
        again.begin(lines[0])
        for place, (now, name, what, *told) in enumerate(lines[1:], 1):
            if place == wrong:
                if is_missing:
                    continue
                step, slices, samples, *more = what[1]["SliceReport"]
                what = [what[0], {"SliceReport": [step, slices, double(samples), *more]}]
            if not again.feed(now, name, what, *told):
                break
        assert place >= wrong and " then" in again.difference, (is_missing, again.difference)


def recorded(fleet: Fleet, folder: Path, until: Any) -> FlightRecorder:
    """Runs the fleet until something holds, and writes down what its host hears from now on."""
    recorder = FlightRecorder(folder, fleet.core)
    here = fleet.host

    def decide(name: str, *what: Any) -> None:
        now = here.clock.now
        decided = feed(here.core, now, name, *what)
        recorder.note(now, name, what, decided)
        if len(recorder._waiting) > 50:
            recorder.write()
        here.act(decided)

    here.decide = here.exchange.act = decide  # type: ignore[method-assign]
    fleet.run_until(until, 2000)
    recorder.close()
    return recorder


def test_a_ring_that_has_lost_its_beginning_replays_from_the_state_in_its_oldest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "SEGMENT_BYTES", 4000)
    run = Fleet(workers=3, epochs=8)
    recorded(run, tmp_path, lambda: run.host.finish is not None)
    kept = segments(tmp_path)
    assert len(kept) <= flight.SEGMENTS and kept[0][0] > 1
    assert sum(path.stat().st_size for _, path in kept) < 8 * 4000
    done = replay(tmp_path)
    assert not done.difference and not done.notes and done.inputs > 100
    assert done.first_step > 0 and done.core is not None
    assert done.core.standing == run.core.standing and done.core.finished == run.core.finished


def test_a_missing_file_a_cut_one_and_a_damaged_line_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "SEGMENT_BYTES", 4000)
    run = Fleet(workers=3, epochs=8)
    recorded(run, tmp_path, lambda: run.host.finish is not None)
    first, second, *_ = [path for _, path in segments(tmp_path)]
    whole = replay(tmp_path).inputs
    first.write_bytes(first.read_bytes()[:-700])  # as where a host was killed; the next file begins with its own state
    cut = replay(tmp_path)
    assert cut.inputs < whole and not cut.difference and "Some inputs are missing after step" in cut.notes[0]
    second.unlink()
    less = replay(tmp_path)
    assert less.inputs < cut.inputs and not less.difference and len(less.notes) == 1
    assert cut.core is not None and less.core is not None and less.core.standing == cut.core.standing
    first.write_bytes(zlib.compress(b'{"begins": {"core": ["at", 5]}}\n', wbits=31))
    assert "cannot be read" in replay(tmp_path).notes[0]


def test_a_worker_that_hangs_is_named_by_the_replay(tmp_path: Path) -> None:
    run = Fleet(workers=2, faults=FaultScript().stall("w1", at_step=3, seconds=600), patience_s=1000.0)
    recorded(run, tmp_path, lambda: run.clock.now > 200)
    done = replay(tmp_path)
    assert not done.difference and done.core is not None
    sentence = tell_waits(done.core, done.clock)
    assert sentence.startswith("The host and 1 other worker wait for w1, which is computing its gradient of step"), (
        sentence
    )
    owed = "\n".join(tell_owed(done.core, done.clock))
    assert "w1: computing its gradient, owes slices" in owed and "w0: sending its gradient" in owed, owed


def test_a_worker_whose_gradient_the_host_leaves_unread_is_not_who_is_waited_for(tmp_path: Path) -> None:
    """One is stopped after its report and before its gradient; the other's gradient waits for that one's."""
    run = Fleet(workers=2, faults=FaultScript().stall("w1", at_step=3, seconds=600), patience_s=1000.0)
    recorded(run, tmp_path, lambda: run.clock.now > 200)
    done = replay(tmp_path)
    assert done.core is not None
    w0, w1 = sorted(done.core.membership.members.values(), key=lambda member: member.name)
    w1.reported |= {number for node in w1.nodes for number in range(*node)}
    assert tell_waits(done.core, done.clock).startswith("The host waits for w0 and w1, each of which is sending")
    sentence = tell_waits(done.core, done.clock, held=[w0.peer])
    assert sentence.startswith("The host and 1 other worker wait for w1, which is sending its gradient"), sentence


def test_no_secret_no_row_and_no_tensor_is_written_down(tmp_path: Path) -> None:
    run = Fleet(workers=2, save_every=2, gather_every=1)
    recorded(run, tmp_path, lambda: run.host.finish is not None)
    text = b"".join(zlib.decompressobj(wbits=31).decompress(path.read_bytes()) for _, path in segments(tmp_path))
    assert b"Hello" in text and b"Gather" in text and b"StateChunk" in text
    assert SECRET.encode() not in text
    weights = next(iter(run.workers.values())).state.weights
    assert weights.tobytes()[:16] not in text and repr(float(weights[0])).encode() not in text
    assert all(path.stat().st_mode & 0o077 == 0 for _, path in segments(tmp_path))


@pytest.mark.parametrize(
    "frozen",
    [
        [["at", 0], [["object", "os:system", {}]]],
        [["at", 0], [["object", "potluck.fleet.journal:sqlite3.Connection", {}]]],
        [["at", 0], [["object", "potluck.launch.processes:Worker", {}]]],
        ["enum", "builtins:print", "x"],
        ["anything", 1],
    ],
)
def test_nothing_but_parts_of_a_coordinator_comes_out_of_a_file(frozen: Any) -> None:
    with pytest.raises((Exception,), match=r"no part of a coordinator|nothing that was frozen|cannot|has no"):
        thaw(frozen)


def test_where_a_stuck_worker_is_comes_with_its_beat_and_is_shown_when_it_is_given_up() -> None:
    run = Fleet(workers=2, faults=FaultScript().stall("w1", at_step=3, seconds=600))
    run.run_until(lambda: run.core.standing.step == 2 and run.core.now is not None and run.clock.now > 101, 100)
    (member,) = [m for m in run.core.membership.members.values() if m.name == "w1"]
    words = "w1\nloop.py:3 in stare\x1b[2J\n" + "\n".join("x" * 300 for _ in range(12))
    run.host.decide("message", member.peer, Heartbeat(words, 0))
    run.run_until(lambda: any(isinstance(event, Stalled) for event in run.events), 100)
    (stalled,) = [event for event in run.events if isinstance(event, Stalled)][:1]
    first, *more = stalled.stack.splitlines()
    assert stalled.name == "w1" and first == "loop.py:3 in stare?[2J" and max(map(len, more)) <= 200
    run.host.decide("message", member.peer, Heartbeat("w1", 0))
    assert member.stack == stalled.stack  # an older worker's beat says nothing, and takes nothing back
    run.host.decide("message", member.peer, Wrote(1, "", ""))
    assert member.stack == ""
    run.host.decide("message", member.peer, Heartbeat("x" * 5000, 0))
    assert member.peer not in run.core.membership.members


def test_a_worker_that_has_done_nothing_for_half_of_patience_says_where_it_is_once() -> None:
    client = Client(Invite("127.0.0.1", 1, "secret", None), name="me", kind="cpu", say=print)
    assert client._beat().node_id == "me"  # type: ignore[attr-defined]
    client._moved_at -= 0.6 * client.patience_s
    words = client._beat().node_id.splitlines()  # type: ignore[attr-defined]
    here = [word for word in words if word.startswith("test_flight.py:") and "says_where_it_is_once" in word]
    assert words[0] == "me" and here and "/" not in "".join(words)
    assert client._beat().node_id == "me"  # type: ignore[attr-defined]
    client._moved_at -= 1.0
    with client._waiting():  # it waits for the host, and the host knows for whom
        assert client._beat().node_id == "me"  # type: ignore[attr-defined]
