"""HostHolder: a worker as its host knows it: its weights, their digest, its state on the way to others, its connection.

What a Member asks for, and what those who compute say to the host. Knows nothing of plans or of how rows are
computed: a work (table.py) has the weights.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from potluck.agree.records import Position
from potluck.engine.checkpointing import check_position, restore_position, take_position
from potluck.engine.run_parts import RunParts
from potluck.engine.state_transfer import StateTransfer
from potluck.engine.table import Awaited, Waits
from potluck.fleet.description import Description
from potluck.fleet.holder import ConnectionLost, Looked
from potluck.fleet.listener import Listener, Means
from potluck.fleet.member import Member
from potluck.fleet.member_asks import MemberEvaluation
from potluck.fleet.phases import enter_phase
from potluck.replica.evaluate import LookSums
from potluck.save.saves import Saves
from potluck.wire.messages import Applied, Message, Welcome


class HostHolder:
    description: Description
    """Once there is a loader."""

    def __init__(self, run: RunParts, listener: Listener) -> None:
        self.run = run
        self.client = listener.client
        self.member = Member(self)
        self.was_moved = False
        """Whether the run was moved to another epoch than the loop was in."""
        self._listener = listener
        self._states = StateTransfer(self.client, run.link)
        self._saves = Saves(run.link, run.events, is_gone=lambda: self.member.is_over)
        self._sum_of: Callable[[int, int], LookSums] | None = None
        """Evaluates rows, while all evaluate some."""
        self._glance: torch.Tensor | None = None
        """The quick digest of the weights when the host was last told their digest."""

    def close(self) -> None:
        """Closes the connection, and removes what was on its way."""
        self._states.close()
        self.client.close()
        self._states.remove()

    @property
    def version(self) -> int:
        """Agreements so far, which is what the host calls a step."""
        return self.member.version

    @property
    def rows_seen(self) -> int:
        return self.run.progress.rows_seen

    def now(self) -> float:
        return time.monotonic()

    def send(self, message: Message) -> None:
        self.client.send(message)

    def say(self, sentence: str) -> None:
        self.client.say(sentence)

    def hear(self, timeout_s: float) -> Waits[Message | ConnectionLost | None]:
        receive = partial(self._listener.receive, timeout_s)
        heard: Message | ConnectionLost | None = yield Awaited("The next message of the host", receive)
        return heard

    def connect(self) -> Waits[Welcome]:
        name = "The host, where the connection to it was lost"
        welcome: Welcome = yield Awaited(name, self._listener.connect)
        return welcome

    def average(self, step: int, without: frozenset[int]) -> Waits[Means | None]:
        take = partial(self._listener.take_means, step, without)
        means: Means | None = yield Awaited("The means of a step, but for some parts", take)
        return means

    def pass_over_until(self, step: int) -> None:
        self._listener.pass_over_until(step)

    def reach(self, phase: str, step: int) -> Waits[None]:
        yield from ()
        enter_phase(phase, step, worker=self)

    def announce(self, phase: str, step: int = 0, **what: Any) -> None:
        """A phase of the step under way begins, or of the named one."""
        enter_phase(phase, step or self.version + 1, worker=self, **what)

    def welcome(self) -> Welcome:
        assert self.client.welcome is not None
        return self.client.welcome

    def describe(self) -> Description:
        caller = self.run.loop
        limit = caller.rows_limit or 0
        described = replace(self.description, training=caller.training, rows_limit=limit, told=caller.about)
        self.client.description = described
        return described

    def digest(self) -> str:
        digest, self._glance = self.run.prepared().hash_weights(*self.run.works.now.agreed())
        return digest

    def is_changed(self) -> bool:
        if self._glance is None:
            return True
        return not torch.equal(self.run.prepared().quick_digest(*self.run.works.now.agreed()), self._glance)

    def applied_message(self, version: int, digest: str, norm: float, fault: str) -> Applied:
        return Applied(version, digest, self.run.rates.now, norm, fault, self.run.works.now.drift)

    def stand_at(self, position: Position) -> None:
        self.run.progress.seek(position)

    def forget(self) -> None:
        self.run.works.now.forget()
        self.run.prepared().remember_buffers()  # the loop may yet run a forward of what it was given

    def stop(self) -> None:
        self.run.progress.stop()

    def nonfinite_hint(self) -> str:
        return self.run.prepared().nonfinite_hint()

    def evaluate(self, rows: int, size: int, sum_of: Callable[[int, int], LookSums]) -> Waits[MemberEvaluation]:
        self._sum_of = sum_of
        evaluation = yield from self.member.evaluate(rows, size)
        self._sum_of = None
        return evaluation

    def look_at(self, start: int, end: int) -> Waits[Looked]:
        yield from ()
        assert self._sum_of is not None
        looked = self._sum_of(start, end)
        return Looked(looked.names, looked.figures, looked.samples)

    def receive_state(self, step: int, header: str) -> None:
        self._states.receive(step, header)

    def take_chunk(self, data: bytes | memoryview) -> Waits[None]:
        yield from ()
        self._states.take_chunk(data)

    def drop_state(self) -> None:
        self._states.drop()

    def load_state(self) -> tuple[int, int]:
        """From a folder that all ranks see."""
        run, folder = self.run, self._states.arrived()
        standing = self._saves.load(folder, run.prepared(), partial(check_position, run))
        assert standing is not None and run.loader is not None
        run.link.gather_rows([0.0])  # until all ranks have read it
        run.works.start_anew()
        run.prepared().remember_buffers()
        self.was_moved |= standing["epoch"] != run.loader.position.epoch
        restore_position(run, standing)
        self._states.drop()
        return run.progress.at.version, run.progress.at.step

    def serve_state(self, transfer: int, version: int) -> Waits[None]:
        yield from ()
        self._states.serve(transfer, version, self._snapshot, is_best=self.run.best_loss() is not None)

    def _snapshot(self, folder: Path) -> Callable[[], Path | None]:
        """A copy in host memory now. What is returned writes it below the folder, and says where, if that is ours."""
        run = self.run
        with run.looking.aside(), run.works.now.as_agreed():
            standing, kept = take_position(run)
            write = self._saves.take(folder, run.prepared(), standing, kept, with_randoms=False)
            self.member.check_weights()
        assert write is not None
        return write
