"""A host, its workers, and what is between them, on one clock."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from potluck.agree.records import Position
from potluck.events import Event, WorkerCame, WorkerWent
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import Description
from potluck.fleet.effects import StepRecord
from potluck.fleet.journal import Journal
from potluck.fleet.ledger import prove
from tests.fleet.virtual.clock import VirtualClock
from tests.fleet.virtual.disk import Disk
from tests.fleet.virtual.faults import FaultScript
from tests.fleet.virtual.host import Host
from tests.fleet.virtual.line import Line, Payload
from tests.fleet.virtual.plain import PlainPeer
from tests.fleet.virtual.toy import BATCH, EPOCHS, PATIENCE_S, ROWS, SECRET, Floats, State, undisturbed
from tests.fleet.virtual.worker import Worker


class Fleet:
    def __init__(
        self,
        *,
        workers: int = 0,
        faults: FaultScript | None = None,
        patience_s: float = PATIENCE_S,
        epochs: int = EPOCHS,
        at_least: int | None = None,
        journal: Path | str = ":memory:",
        plain_peers: bool = False,
        disk: Disk | None = None,
        **options: Any,
    ) -> None:
        """`workers` are called w0, w1, ..., come at once, and each has the `options`."""
        self.clock = VirtualClock()
        self.faults = faults or FaultScript()
        self.patience_s = patience_s
        self.epochs = epochs
        self.secret = SECRET
        self.events: list[Event] = []
        self.records: list[StepRecord] = []
        self.on_record: Callable[[StepRecord], None] = lambda record: None
        """Called when the journal has it."""
        self.on_parting: Callable[[Line, str], None] = lambda line, why: None
        """Called when the host parts with a peer."""
        self.on_begin: Callable[[int], None] = lambda slices: None
        """Called when a step begins, or begins anew."""
        self.on_payload: Callable[[Payload], None] = lambda payload: None
        """Called when one comes from a peer that the host has not parted with."""
        self.workers: dict[str, Worker] = {}
        self.plain: list[PlainPeer] = []
        self.restores = 0
        self.lost_at = 0.0
        """When a disk last lost what it had."""
        self.journal = Journal(Path(journal))
        self.disk = disk or Disk()
        self._at_least = at_least if at_least is not None else max(1, workers)
        self._are_plain_welcome = plain_peers
        self._next_peer = 0
        self._expected = 0
        self._next_id = 0
        self.host = self._start_host()
        for number in range(workers):
            self.add(f"w{number}", **options)

    @property
    def core(self) -> Coordinator:
        return self.host.core

    def _start_host(self) -> Host:
        standing = self.journal.standing()
        if not (standing and standing.version) and self.disk.newest is not None:
            standing = self.disk.standing
        resumed = replace(self.journal.resumed(standing), next_id=self._next_id, expected=self._expected)
        coordinator = Coordinator(
            patience_s=self.patience_s,
            secret=SECRET,
            at_least=self._at_least,
            plain_peers=self._are_plain_welcome,
            resumed=resumed,
        )
        return Host(self, coordinator, self.journal, self.disk)

    def crash_host(self, back_after_s: float = 1.0) -> None:
        """The coordinator dies; another resumes from its journal."""
        self._next_id = self.core.membership.next_id
        self.host.crash()

        def come_back() -> None:
            self.host = self._start_host()

        self.clock.after(back_after_s, come_back)

    def lose_steps(self, count: int) -> None:
        """A disk has told that it wrote what it had not: the last steps are not in the journal."""
        self.lost_at = self.clock.now
        self.journal.rewind(max(0, len(self.journal.steps()) - count))

    def lose_journal(self) -> None:
        """It is torn: it is set aside, and the next host has the newest checkpoint, and knows nobody."""
        self.lost_at = self.clock.now
        self.journal.close()
        self.journal = Journal(Path(":memory:"))
        self._next_id = self._expected = 0

    def lose_checkpoint(self) -> None:
        """The newest one."""
        self.lost_at = self.clock.now
        if self.disk.newest is not None:
            del self.disk.states[self.disk.newest]

    def add(self, name: str, *, at_s: float = 0.0, **options: Any) -> Worker:
        worker = self.workers[name] = Worker(self, name, **options)
        self.clock.after(at_s, worker.start)
        return worker

    def add_plain(self, name: str, **options: Any) -> None:
        self.plain.append(PlainPeer(self, name, **options))
        self.plain[-1].start()

    def connect(self, on_down: Callable[[Line, Any], None], latency_s: float = 0.001) -> Line:
        self._next_peer += 1
        line = Line(self.clock, self.host, self._next_peer, on_down, latency_s)
        self.host.accept(line)
        return line

    def stranger(self) -> Line:
        """A connection that the test speaks on by itself. What comes back is in `received`."""
        return self.connect(lambda line, item: None)

    def hear(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerCame | WorkerWent):  # as the host's journal has it
            self._expected = len(self.core.membership.ready)

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def member(self, name: str) -> Any:
        return next((m for m in self.core.membership.members.values() if m.name == name), None)

    def run_until(self, condition: Callable[[], bool], limit_s: float = 1000.0) -> None:
        assert self.clock.run(condition, limit_s), f"it did not come about in {limit_s} s: {self.describe()}"

    def run_for(self, seconds: float) -> None:
        self.clock.run(lambda: False, seconds)

    def finish(self, limit_s: float = 2000.0) -> "Fleet":
        """Until the run is over, as it should be: the same weights everywhere, and each row used once."""
        self.run_until(lambda: self.host.finish is not None, limit_s)
        assert self.host.finish is not None and not self.host.finish.failed, self.host.finish
        self.run_for(1.0)
        self.assert_right()
        return self

    def assert_right(self) -> None:
        if not self.lost_at:
            for epoch in range(self.epochs):
                assert prove(self.journal.ranges(epoch), ROWS).holds, prove(self.journal.ranges(epoch), ROWS)
        described = self.core.description
        if described is not None and described.windowed is not None:
            self._assert_one_end(described)
            return
        steps = self.epochs * -(-ROWS // BATCH)
        ended = [worker for worker in self.workers.values() if worker.state.step == steps]
        assert ended, f"nobody saw the end: {[(w.name, w.state.step, w.error) for w in self.workers.values()]}"
        for worker in ended:
            assert self.is_undisturbed(worker), f"{worker.name} has other weights"
        assert self.lost_at or self.journal.steps() == list(range(1, steps + 1))

    def _assert_one_end(self, described: Description) -> None:
        """Whatever the windows were, there is one result of them; where a disk forgot it, there may be another."""
        if self.lost_at:
            return
        workers, end = list(self.workers.values()), self.standing().version
        # A run that began anew has another end, and other weights; who was lost before that may stand at the old one.
        # The end of an epoch is the beginning of the next: one that was killed there stands at either.
        last = [w for w in workers if (w.state.epoch * ROWS + w.state.row, w.state.step) == (self.epochs * ROWS, end)]
        if described.rows_limit:  # then those who have finished have what is kept; one that was killed may have less
            kept = State.from_bytes(self.disk.states[end]).weights.tobytes()
            finished = [worker for worker in workers if worker.has_finished]
            if not finished:
                # All who were there were killed, or cut off, after the end was on its way to the disk, and before they
                # heard that it is kept; or left then. What is kept is what one of them had.
                finished = [worker for worker in last if worker.weights == kept]
                assert not any(w.done and not w.error and not w.member.left for w in finished), finished
            last = finished
            assert {worker.weights for worker in last} == {kept}, workers
        assert last and len({worker.weights for worker in last}) == 1, [w.state for w in workers]

    def is_undisturbed(self, worker: Worker) -> bool:
        """Under Sync it has the weights of one machine."""
        return self.are_alike(worker.state.weights, np.frombuffer(undisturbed(worker.state.step), np.float32))

    def are_alike(self, one: Floats, other: Floats) -> bool:
        """To the last bit; with plain peers, whose sums are in no tree, nearly: it depends on who computed what."""
        if not self.plain:
            return one.tobytes() == other.tobytes()
        return np.allclose(one, other, rtol=1e-3, atol=1e-4)

    @property
    def is_anybody_alive(self) -> bool:
        return any(worker.is_alive for worker in self.workers.values())

    @property
    def is_near_the_end(self) -> bool:
        return self.host.finish is not None or self.standing().rows_seen >= self.epochs * ROWS - BATCH

    @property
    def is_done(self) -> bool:
        """All is trained, and kept."""
        return self.core.is_complete and self.core.saving.is_last_kept

    def standing(self) -> Position:
        return self.core.standing

    def describe(self) -> str:
        members = [
            f"{m.name}: {m.phase.name}, {m.doing(self.core.standing)}, {m.nodes}"
            for m in self.core.membership.members.values()
        ]
        workers = [
            f"{w.name}: step {w.state.step}, waits for {w.waits}, inbox {list(w.inbox)[:2]}, error {w.error}"
            for w in self.workers.values()
            if w.is_alive
        ]
        held = [line.peer for line in self.host.lines.values() if line.connection and line.connection.held]
        under = self.core.now
        step = f"{under.step} with {len(under.reports)} reports of {under.slices} slices" if under else "none"
        return (
            f"step {self.core.standing.version}, under way {step}; members {members}; workers {workers}; held {held};"
            f" refused {dict(self.core.refused)}; fired {self.faults.fired}, pending {self.faults.pending}"
        )
