"""A real server and workers of it that compute nothing, each in a process of its own that does what it is asked.

Servers and workers are those of Potluck; only what they train is made up: a gradient that never changes.
"""

import multiprocessing
import os
import resource
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.ranks import CPU_ONLY
from potluck.fleet import host_connector
from potluck.fleet.client import Client, ConnectionLost
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import Description, Part
from potluck.fleet.effects import StepRecord
from potluck.fleet.invite import Identity, Invite
from potluck.fleet.journal import Journal
from potluck.fleet.listener import Listener
from potluck.fleet.server import Server
from potluck.save.checkpoint_receiver import CheckpointReceiver
from potluck.wire.messages import Admitted, Applied, Committed, Message, Ready, SliceReport, Work

MB = 1_000_000
PART_BYTES = 4 * MB
PATIENCE_S = 10.0
SPAWN = multiprocessing.get_context("spawn")


class Actor:
    """An object in a process of its own. Several can be asked before the first has answered."""

    def __init__(self, kind: Callable[..., Any], *arguments: Any, context: BaseContext = SPAWN) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_act, args=(theirs, kind, arguments), daemon=True)  # type: ignore
        self.process.start()
        theirs.close()

    def ask(self, what: str, *arguments: Any) -> None:
        self._pipe.send((what, arguments))

    def answer(self, timeout_s: float = 120.0) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise SystemExit(f"{self.process.name} does not answer.")
            fine, found = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise SystemExit(f"{self.process.name} is gone.") from None
        if not fine:
            raise SystemExit(found)
        return found

    def has_answered(self) -> bool:
        return bool(self._pipe.poll())

    def call(self, what: str, *arguments: Any) -> Any:
        self.ask(what, *arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _act(pipe: Any, kind: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    allow_many_files()
    os.environ |= CPU_ONLY
    try:
        actor = kind(*arguments)
        while True:
            what, given = pipe.recv()
            pipe.send((True, time.process_time() if what == "cpu_s" else getattr(actor, what)(*given)))
    except (EOFError, KeyboardInterrupt):
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def allow_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def on_stage() -> Iterator[list[Actor]]:
    """Whoever is put into the list is gone afterwards."""
    actors: list[Actor] = []
    try:
        yield actors
    finally:
        for actor in reversed(actors):
            actor.kill()


def ask_all(actors: Sequence[Actor], what: str, *arguments: Any) -> list[Any]:
    for actor in actors:
        actor.ask(what, *arguments)
    return [actor.answer() for actor in actors]


def round_ms(actors: Sequence[Actor], count: int) -> float:
    """Milliseconds of one round, from the first that starts to the last that has ended; clocks are the machine's."""
    told = ask_all(actors, "rounds", count)
    return 1000 * (max(end for _, end in told) - min(start for start, _ in told)) / count


class Host:
    """A server as `potluck host` has it, with its journal on the disk. Loads no torch."""

    def __init__(
        self,
        folder: str,
        at_least: int,
        encrypted: bool = False,
        port: int = 0,
        patience_s: float = PATIENCE_S,
        address: str = "127.0.0.1",
    ) -> None:
        place = self._folder = Path(folder)
        identity = Identity.load_or_make(place / "identity")
        journal = Journal(place / "journal.sqlite")
        core = Coordinator(
            patience_s=patience_s,
            secret=identity.secret if encrypted else "",
            at_least=at_least,
            resumed=journal.resumed(),
        )

        def on_event(event: object) -> None:
            journal.keep("workers", str(len(core.membership.ready)))
            journal.keep("next worker", str(core.membership.next_id))

        tls = identity.server_context() if encrypted else None
        saver = CheckpointReceiver(place / "checkpoints", lambda path, reason: None)
        self.server = Server(core, host=address, port=port, tls=tls, journal=journal, saver=saver, on_event=on_event)
        self._invite = identity.invite(address, self.server.port, encrypted=encrypted)
        self.empty_bytes = memory_bytes("VmRSS")
        self.server.start()
        self.listening_at = time.monotonic()

    def listening(self) -> tuple[str, float]:
        return self._invite.line(), self.listening_at

    def record_ms(self) -> float:
        """What it takes to put one step on this disk: every round waits for that once."""
        took = []
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            journal = Journal(Path(folder) / "journal.sqlite")
            for step in range(1, 41):
                started = time.monotonic()
                journal.record(StepRecord(step, 0, step, 1, step, 1.0, 0.0, (), ((step, step + 1, 0),)))
                took.append(time.monotonic() - started)
            journal.close()
        return 1000 * median(took)

    def shares(self) -> bool:
        """Whether its workers show it their memory."""
        return all(connection.window is not None for connection in self.server.connections.values())

    def grown_bytes(self) -> int:
        """The most that this process ever held, beyond what it did before anybody came."""
        return memory_bytes("VmHWM") - self.empty_bytes

    def counts(self) -> dict[str, int]:
        """Who is there, and who was turned away."""
        core = self.server.core
        return dict(core.refused) | {"members": len(core.membership.members), "step": core.standing.version}


class Helper:
    """A worker that has its gradient at hand, and asks only for the average."""

    def __init__(
        self, invite: str, number: int, workers: int, size_bytes: int, payload: Any = None, shares: bool = True
    ) -> None:
        """`shares`: through the memory of one machine; else as between two."""
        counts = _split(size_bytes // 4, PART_BYTES // 4)
        self.mean = (workers + 1) / 2
        parts = tuple(Part(len(counts) - 1 - index, None, (count,)) for index, count in enumerate(counts))
        found = Invite.parse(invite)
        if not shares:
            host_connector.connect_local = lambda port: None  # type: ignore[assignment]
        self.client = Client(found, name=f"helper {number}", kind="helper", say=lambda text: None)
        self.client.connect()
        self.listener = Listener(self.client)
        self.client.description = Description(
            parts=parts, model="made up", rows=1 << 40, batch=workers, slices=workers, seed=0, unit=1.0,
            samples_per_row=1.0, policy="sync", told={},
        )  # fmt: skip
        self.client.make_room(sum(counts))
        self.payload = payload or [self.client.allocate(count) for count in counts]
        for gradients in self.payload if payload is None else ():
            gradients[:] = number + 1
        self.client.send(Ready(self.client.description.to_json(), 0, "same", 0))
        self._await(Admitted)

    def rounds(self, count: int, late_s: float = 0.0) -> tuple[float, float]:
        """When the first began and the last had ended."""
        started = time.monotonic()
        for _ in range(count):
            self._round(late_s)
        return started, time.monotonic()

    def _round(self, late_s: float = 0.0) -> None:
        work = self._await(Work)
        assert isinstance(work, Work)
        slices = np.concatenate([np.arange(*node) for node in work.nodes.reshape(-1, 2)])
        ones, nothing = np.ones(len(slices)), np.zeros(len(slices))
        self.client.send(SliceReport(work.step, slices.astype("<u4"), ones, nothing, 0.0, b""))
        time.sleep(late_s)
        for part, gradients in enumerate(self.payload):
            for _ in range(len(work.nodes) // 2):
                self.client.send_part(work.step, part, gradients)
        self._await(Committed)
        means = self.listener.take_means(work.step)
        assert means is not None and all(part[0] == part[-1] == self.mean for part in means.parts)
        self.listener.give_back(means)
        self.client.send(Applied(work.step, "same", 0.0, 0.0, ""))

    def _await(self, kind: type[Message]) -> Message:
        while not isinstance(message := self.listener.receive(30.0), kind):
            if message is None or isinstance(message, ConnectionLost):
                raise RuntimeError(f"waited for {kind.__name__}: {message}")
        return message


class Helpers:
    """Several of them in one process, which share one gradient."""

    def __init__(self, invite: str, workers: int, size_bytes: int) -> None:
        payload = [np.full(n, (workers + 1) / 2, np.float32) for n in _split(size_bytes // 4, PART_BYTES // 4)]
        self.helpers = [Helper(invite, number, workers, size_bytes, payload) for number in range(workers)]

    def rounds(self, count: int, late_s: float) -> None:
        """`late_s`: what the last one is behind the others in every round."""
        last = self.helpers[-1]
        threads = [
            threading.Thread(target=helper.rounds, args=(count, late_s if helper is last else 0.0))
            for helper in self.helpers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def start_star(
    actors: list[Actor], folder: str, workers: int, size_bytes: int, *, encrypted: bool = False, shares: bool = True
) -> tuple[Actor, list[Actor], str]:
    """A host and its helpers, who are all admitted: (host, helpers, invite).

    On one machine nothing is encrypted that travels through its memory: encryption is measured as between two.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    host = Actor(Host, folder, workers, encrypted)
    actors.append(host)
    invite, _ = host.call("listening")
    shares = shares and not encrypted
    helpers = [Actor(Helper, invite, number, workers, size_bytes, None, shares) for number in range(workers)]
    actors += helpers
    ask_all(helpers, "rounds", 2)  # warm
    return host, helpers, invite


def memory_bytes(what: str) -> int:
    """Of this process, as Linux's /proc names it: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def receive_all(connection: socket.socket, space: memoryview) -> None:
    while space:
        count = connection.recv_into(space)
        if not count:
            raise ConnectionResetError("the other end is gone")
        space = space[count:]


def _split(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]
