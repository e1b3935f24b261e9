"""MemberDriver: a Member at work. One pump hears, and does what follows. Pure: what takes time is its holder's to do.

All that a worker says to its host and hears from it passes through here. What it means is decided by member.py; what a
state is, and how bytes travel, the holder knows: engine/host_table.py over a connection, tests/fleet/virtual on a
virtual clock. What may take long is a generator, which yields what it waits for. The ranks of a node each have a
MemberDriver of their own, whose holder lets all of them hear the same.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

from potluck.agree.records import Position
from potluck.errors import ConfigError, Diverged
from potluck.fleet import member_effects as effects
from potluck.fleet.description import Description
from potluck.fleet.member import ConnectionLost, Member, is_together
from potluck.fleet.member_asks import MemberEvaluation
from potluck.fleet.member_effects import MemberEffect
from potluck.wire.messages import Applied, Committed, Message, Welcome

T = TypeVar("T")
Waits = Generator[Any, Any, T]
"""A part of a story: it yields what it waits for, and is sent what that came to."""


class Looked(NamedTuple):
    """Sums over rows that were evaluated: one of each figure, the loss first."""

    names: str
    figures: list[float]
    samples: float


class Holder(Protocol):
    """This worker, as far as its host has to do with it: its weights, its connection, its clock."""

    @property
    def rows_seen(self) -> int:
        """How many rows of the run are in its weights."""

    def now(self) -> float: ...

    def send(self, message: Message) -> None: ...

    def say(self, sentence: str) -> None: ...

    def hear(self, timeout_s: float) -> Waits[Message | ConnectionLost | None]:
        """The next message; None if none came in time."""

    def connect(self) -> Waits[Welcome]:
        """Connects again."""

    def reach(self, phase: str, step: int) -> Waits[None]:
        """A phase of the work begins, in which tests end this worker, or stop it."""

    def welcome(self) -> Welcome: ...

    def describe(self) -> Description: ...

    def digest(self) -> str:
        """The digest of the weights, which is remembered by a glance at them."""

    def is_changed(self) -> bool:
        """Whether the weights are not those of the last digest any more, or there was none."""

    def applied_message(self, version: int, digest: str, norm: float, fault: str) -> Applied: ...

    def average(self, step: int, without: frozenset[int]) -> Waits[Any]:
        """The means of a step, but for some parts; None if the connection was lost before."""

    def pass_over_until(self, step: int) -> None:
        """Averages up to this step are in the weights."""

    def stand_at(self, position: Position) -> None: ...

    def forget(self) -> None:
        """Discards what was computed since the last agreement."""

    def stop(self) -> None:
        """This worker is out of the run."""

    def nonfinite_hint(self) -> str: ...

    def look_at(self, start: int, end: int) -> Waits[Looked]: ...

    def receive_state(self, step: int, header: str) -> None: ...

    def take_chunk(self, data: bytes | memoryview) -> Waits[None]: ...

    def load_state(self) -> tuple[int, int]:
        """The state that has come is in the model: the version and the step that it is of."""

    def drop_state(self) -> None: ...

    def serve_state(self, transfer: int, version: int) -> Waits[None]: ...


class MemberDriver:
    def __init__(self, holder: Holder) -> None:
        self.member = Member()
        self.has_joined = False
        self._holder = holder
        self._moments: frozenset[int] = frozenset()
        """Parts that travel with windows alone."""

    # The pump

    def pump(self) -> Waits[bool]:
        """Handles one message, or its absence. Returns whether the run may stand elsewhere than before."""
        turn = self.member.turn
        yield from self._hear()
        yield from self._settle()
        return self.member.turn != turn

    def _settle(self) -> Waits[None]:
        """Waits until this worker is in the run, or out of it."""
        while not self.member.is_settled:
            yield from self._hear()
        if self.member.is_over:
            self._holder.stop()

    def _hear(self) -> Waits[None]:
        holder, member = self._holder, self.member
        heard = yield from holder.hear(member.wait_s(holder.now()))
        if heard is None:
            yield from self._do(member.nothing(holder.now()))
        elif isinstance(heard, ConnectionLost):
            yield from holder.reach("lost", member.version)
            yield from self._do(member.lost(heard.why))
        else:
            yield from self._do(member.hear(holder.now(), heard))

    def _do(self, found: list[MemberEffect]) -> Waits[None]:
        holder = self._holder
        for effect in found:
            match effect:
                case effects.SendToHost():
                    holder.send(effect.message)
                case effects.Say():
                    holder.say(effect.sentence)
                case effects.Fail():
                    hint = holder.nonfinite_hint() if effect.kind is Diverged else ""
                    raise effect.kind(effect.sentence + hint)
                case effects.Rejoin():
                    holder.forget()
                    yield from holder.connect()
                    yield from self._present()
                case effects.StandAt():
                    holder.stand_at(effect.position)
                case effects.SkipAverages():
                    holder.pass_over_until(effect.step)
                case effects.ServeState():
                    yield from holder.serve_state(effect.transfer, self.member.version)
                case effects.TellApplied():
                    yield from self.tell_applied(effect.norm, effect.fault)
                case effects.LookAt():
                    looked = yield from holder.look_at(effect.start, effect.end)
                    yield from self._do(self.member.looked(effect, *looked))
                case effects.ReceiveState():
                    holder.receive_state(effect.step, effect.header)
                case effects.TakeChunk():
                    yield from holder.take_chunk(effect.data)
                case effects.Load():
                    version, step = holder.load_state()
                    yield from self._do(self.member.loaded(version, step))
                case effects.DropState():
                    holder.drop_state()

    # Joining

    def join(self) -> Waits[None]:
        if not self.has_joined:
            self.has_joined = True
            yield from self._present()
            yield from self._settle()

    def _present(self) -> Waits[None]:
        holder = self._holder
        yield from holder.reach("joined", self.member.version + 1)
        described = holder.describe()
        self._moments = described.moments
        is_same = not holder.is_changed()
        said = self.member.present(
            holder.welcome(), described.to_json(), holder.digest(), rows_seen=holder.rows_seen, is_same=is_same
        )
        yield from self._do(said)

    # Steps

    def await_step(self) -> Waits[tuple[Committed, Any] | None]:
        """Waits until a step is committed. None: there is work to do, or the run may stand elsewhere."""
        while True:
            for effect in self.member.take():
                match effect:
                    case effects.Compute():
                        return None
                    case effects.Apply():
                        is_less = bool(self._moments) and is_together(effect.committed)
                        without = self._moments if is_less else frozenset[int]()
                        means = yield from self._holder.average(effect.committed.step, without)
                        return (effect.committed, means) if means is not None else None
                    case _:
                        yield from self._do([effect])
            if (yield from self.pump()):
                return None

    def check_weights(self, *, in_step: bool = False) -> None:
        """Tells the host if they are no longer what it was told. `in_step`: no code of the loop has run since. It waits
        for nothing, since it is called from within a backward, too."""
        if self._holder.is_changed():
            for effect in self.member.changed(in_step=in_step):
                assert isinstance(effect, effects.TellApplied)
                self._tell_applied(effect.norm, effect.fault)

    def tell_applied(self, norm: float, fault: str) -> Waits[None]:
        yield from self._holder.reach("applied", self.member.version)
        self._tell_applied(norm, fault)
        yield from self._holder.reach("told", self.member.version)

    def _tell_applied(self, norm: float, fault: str) -> None:
        holder = self._holder
        holder.send(holder.applied_message(self.member.version, holder.digest(), norm, fault))

    # Evaluating, gathering, saving

    def evaluate(self, rows: int, size: int) -> Waits[MemberEvaluation]:
        """Evaluates some rows in ranges that the host hands out; the result does not depend on who computes which."""
        yield from self._do(self.member.evaluate(rows, size))
        evaluation = self.member.evaluation
        assert evaluation is not None
        while evaluation.is_under_way:
            yield from self.pump()
        return evaluation

    def gather(self, data: bytes) -> Waits[list[bytes]]:
        """This worker's bytes, and those of all who are at this step, in the same order on each of them."""
        yield from self._do(self.member.gather(data))
        gathering = self.member.gathering
        assert gathering is not None
        yield from self._holder.reach("gathering", self.member.version)
        while gathering.found is None:
            yield from self.pump()
        if gathering.fault:
            raise ConfigError(gathering.fault)
        return gathering.found

    def save(self, keep_last: int) -> Waits[None]:
        if self.member.leads:
            yield from self.await_saves(until_kept=False)  # one at a time
        asked, *served = self.member.save(self._holder.now(), keep_last)
        yield from self._do([asked])
        yield from self._holder.reach("save due", self.member.version)
        yield from self._do(served)

    def await_saves(self, *, until_kept: bool, on_error: Callable[[str], None] = lambda error: None) -> Waits[None]:
        """Waits until the host has answered. `until_kept`: until it has the last checkpoint on its disk, however often
        it has to try; `on_error` hears why that failed."""
        last = ""
        while self.member.is_saving(until_kept=until_kept):
            before = self.member.unsaved
            yield from self.pump()
            error = self.member.unsaved.error if self.member.unsaved is not before else ""
            if error not in ("", last) and until_kept:
                last = error
                on_error(error)

    # The end

    def leave_if_asked(self) -> Waits[bool]:
        """Before anything is begun: what this worker was given since is for the others."""
        is_asked = bool(self.member.wants_stop) and not self.member.is_over
        if is_asked:
            yield from self.leave()
        return is_asked

    def leave(self) -> Waits[None]:
        yield from self._do(self.member.leave(self._holder.now()))
        yield from self._settle()

    def finish(self) -> Waits[None]:
        """The loop is done, and the host is told."""
        if self.has_joined and not self.member.is_over:
            yield from self._do(self.member.finish(self._holder.now()))
            while not self.member.is_over:
                yield from self._hear()
