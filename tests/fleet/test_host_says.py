"""What a host tells before a run and after it, with the real server behind it: no worker computes here."""

import math
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from potluck.events import Event, Noticed, read_events
from potluck.fleet.client import Client
from potluck.fleet.effects import Finish, StepRecord
from potluck.launch import host as host_module
from potluck.launch.host import _Host
from potluck.launch.options import HostArgs, HostOptions, host_args
from potluck.wire.codec import encode
from potluck.wire.messages import JoinRequest, Ready
from tests.fleet.fleet import wait_until
from tests.quick import first_of
from tests.unit.test_description import with_parts

LARGE = with_parts(13_000_000, 13_000_000)
LARGE = replace(LARGE, parts=LARGE.parts[:-1])  # with buffers it would be nothing for plain peers


def order_of(folder: Path, *, insecure: bool) -> HostArgs:
    options = HostOptions(what="demo", workers=0, out=str(folder), patience_s=20.0, at_least=9, insecure=insecure)
    return host_args(options)


@pytest.mark.parametrize("insecure", first_of([True, False]))
def test_a_host_that_takes_plain_peers_says_what_entrenars_client_cannot_take(
    insecure: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def heard(words: str) -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return words in said

    with ExitStack() as stack:
        host = _Host(order_of(tmp_path / "run", insecure=insecure), stack)
        host.server.start()
        worker = Client(host._invite("127.0.0.1"), name="w", kind="k", say=lambda sentence: None)
        worker.connect()
        stack.callback(worker.close)
        worker.send(Ready(LARGE.to_json(), 0, "hash", 0))
        wait_until(lambda: "worker_came" in (tmp_path / "run" / "events.jsonl").read_text())
        if not insecure:
            assert not heard("entrenar")
            return
        wait_until(
            lambda: heard(
                "whole gradient is a message of 104,000,021 bytes, and entrenar's own client refuses messages"
            )
        )
        assert host.server.core.standing.version == 0
        peer = stack.enter_context(socket.create_connection(("127.0.0.1", host.server.port), timeout=20))
        peer.sendall(encode(JoinRequest("rusty", 0, "cpu"), "entrenar"))
        wait_until(lambda: heard("rusty is a plain peer. The average of this model's whole gradient"))
        assert "It can take part if it sends block gradients, not whole ones." in said


def test_a_run_whose_last_steps_had_no_loss_ends_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A plain peer that sends parts tells none, and may compute a step alone."""
    with ExitStack() as stack:
        host = _Host(order_of(tmp_path, insecure=True), stack)
        core = host.server.core
        for step, loss in enumerate((3.0, math.nan, math.nan), 1):
            record = StepRecord(step, 0, 0, 8, 8 * step, 8.0, loss, (), ())
            host.journal.record(record)
            host._on_step(record, 0.1, 1.0, "")
            core.standing = replace(core.standing, version=step, step=step)
        host._end(Finish("finished"))
        assert host._summarize(Finish("finished")) == 0
    assert "Finished 3 steps in" in (said := capfd.readouterr().out) and "loss nan" in said
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    ended = [record for record in read_events(tmp_path / "events.jsonl") if record["event"] == "run_ended"]
    assert math.isnan(ended[0]["loss"]) and ended[0]["step"] == 3


class HungFile:
    """Events written to a file system that answers nobody."""

    made: "HungFile"

    def __init__(self, path: Path) -> None:
        self.answers, self.heard = threading.Event(), list[Event]()
        HungFile.made = self
        path.touch()

    def __call__(self, event: Event, at: float = 0.0) -> None:
        self.answers.wait()
        self.heard.append(event)

    def close(self) -> None:
        pass


def test_a_file_of_events_that_hangs_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are emitted within the coordinator's lock."""
    monkeypatch.setattr("potluck.launch.host.EventFile", HungFile)
    told = [Noticed(sentence=f"number {number}") for number in range(3)]
    with ExitStack() as stack:
        host = _Host(order_of(tmp_path, insecure=True), stack)
        emitting = threading.Thread(target=lambda: [host.events.emit(event) for event in told], daemon=True)
        emitting.start()
        emitting.join(20)
        is_held, heard = emitting.is_alive(), list(HungFile.made.heard)
        HungFile.made.answers.set()
        assert not is_held and not heard
    assert [event for event in HungFile.made.heard if event in told] == told


def test_a_script_that_does_not_come_to_init_is_named_once_and_its_end_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "import time\nfrom pathlib import Path\nwhile not Path('ends').exists():\n    time.sleep(0.1)\n"
    )
    monkeypatch.setattr(host_module, "NOT_JOINED_S", 0.5)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []

    def hear(event: Event) -> None:
        said.extend([event.sentence] if isinstance(event, Noticed) else [])

    with ExitStack() as stack:
        host = _Host(host_args(HostOptions(what="own.py", workers=1, out=str(tmp_path / "run"))), stack)
        host.events.listeners.append(hear)
        running = threading.Thread(target=host.run, args=(lambda invite: None,), daemon=True)
        running.start()
        wait_until(lambda: len(said) == 1)
        (tmp_path / "ends").touch()
        wait_until(lambda: len(said) == 2)
        host.server.request_stop()
        running.join(30)
        assert not running.is_alive()
    assert said[0].startswith("own.py has run for 0.5 s and has not come to potluck.init()")
    assert said[1].startswith(
        "The worker on this machine has ended without joining: the script came to its end and never"
    )
