"""MemberDriver: a Member at work, over a client, for a run that computes. One pump receives, and does what follows.

All that a worker says to its host and hears from it passes through here. What it means is decided by fleet/member.py;
what a state is, the table knows (host_table.py). Each function that may take long is a part of a story, which yields
what it waits for (table.py). The ranks of a node each have a MemberDriver of their own,
over a client that lets all of them hear the same.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from potluck.engine.look_sums import Figures, LookSums, means_of
from potluck.engine.node_client import NodeClient
from potluck.engine.table import Waits
from potluck.errors import ConfigError, Diverged
from potluck.fleet import member_effects as effects
from potluck.fleet.client import Client, ConnectionLost, Means
from potluck.fleet.file_stream import FileStreamReceiver, most_bytes, stream_chunks, stream_header
from potluck.fleet.member import Member, is_together
from potluck.fleet.member_effects import MemberEffect
from potluck.fleet.phases import enter_phase
from potluck.link.link import Link
from potluck.wire.messages import Applied, Committed, Message, StateBegin

if TYPE_CHECKING:
    from potluck.engine.host_table import HostTable


@dataclass(frozen=True, slots=True)
class Hearing:
    """The next message of the host."""

    client: Client | NodeClient
    timeout_s: float

    def wait(self) -> Message | ConnectionLost | None:
        return self.client.receive(timeout_s=self.timeout_s)


@dataclass(frozen=True, slots=True)
class Connecting:
    """The host, where the connection to it was lost."""

    client: Client | NodeClient

    def wait(self) -> None:
        self.client.connect(again=True)


@dataclass(frozen=True, slots=True)
class Averaging:
    """The means of a step, but for some parts."""

    client: Client | NodeClient
    step: int
    without: frozenset[int]

    def wait(self) -> Means | None:
        return self.client.take_means(self.step, self.without)


Look = Callable[[int, int], LookSums]
"""Rows, from the first up to and without the last, to what they come to."""


class MemberDriver:
    def __init__(self, client: Client | NodeClient, link: Link, table: "HostTable") -> None:
        self.client = client
        self.member = Member()
        self.has_joined = False
        self._link = link
        self._table = table
        self._told: torch.Tensor | None = None
        """The quick digest of the weights when the host was last told their digest."""
        self._look: Look | None = None
        self._moments: frozenset[int] = frozenset()
        """Parts that travel with windows alone."""
        self._arriving: Path | None = None
        """Where a state is put that is on its way here."""
        self._unpacker: FileStreamReceiver | None = None
        self._senders: list[threading.Thread] = []
        self._leaving: list[Path] = []
        """Folders that are being sent."""

    def reach(self, phase: str, step: int = 0, **what: Any) -> None:
        """Announces a phase of the step under way, or of the named one."""
        enter_phase(phase, step or self.member.version + 1, worker=self._table, **what)

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
            self._table.run.stop()

    def _hear(self) -> Waits[None]:
        heard = yield Hearing(self.client, self.member.wait_s(time.monotonic()))
        now = time.monotonic()
        if heard is None:
            yield from self._do(self.member.nothing(now))
        elif isinstance(heard, ConnectionLost):
            enter_phase("lost", self.member.version, worker=self._table)
            yield from self._do(self.member.lost(heard.why))
        else:
            yield from self._do(self.member.hear(now, heard))

    def _do(self, found: list[MemberEffect]) -> Waits[None]:
        for effect in found:
            match effect:
                case effects.SendToHost():
                    self.client.send(effect.message)
                case effects.Say():
                    self.client.say(effect.sentence)
                case effects.Fail():
                    raise effect.kind(
                        effect.sentence
                        + (self._table.run.prepared().nonfinite_hint() if effect.kind is Diverged else "")
                    )
                case effects.Rejoin():
                    self._table.works.now.forget()
                    yield Connecting(self.client)
                    yield from self._present()
                case effects.StandAt():
                    self._table.run.seek(effect.position)
                case effects.SkipAverages():
                    self.client.pass_over_until(effect.step)
                case effects.ServeState():
                    self._serve(effect.transfer)
                case effects.TellApplied():
                    self.tell_applied(effect.norm, effect.fault)
                case effects.LookAt():
                    assert self._look is not None
                    looked = self._look(effect.start, effect.end)
                    yield from self._do(self.member.looked(effect, looked.names, looked.figures, looked.samples))
                case _:
                    yield from self._receive_state(effect)

    # Joining

    def join(self) -> Waits[None]:
        if not self.has_joined:
            self.has_joined = True
            yield from self._present()
            yield from self._settle()

    def _present(self) -> Waits[None]:
        self.reach("joined")
        described = self.client.description = self._table.describe()
        self._moments = described.moments
        before = self._told
        digest, self._told = self._table.works.now.hash_weights()
        is_same = before is not None and torch.equal(before, self._told)
        assert self.client.welcome is not None
        seen = self._table.run.rows_seen
        said = self.member.present(self.client.welcome, described.to_json(), digest, rows_seen=seen, is_same=is_same)
        yield from self._do(said)

    def _receive_state(self, effect: MemberEffect) -> Waits[None]:
        """The run's weights; only the first rank of several writes them down."""
        match effect:
            case effects.ReceiveState():
                self._arriving = self._arriving or self._new_folder()
                if self._link.rank == 0:
                    assert self.client.description is not None
                    self._close_unpacker()
                    place = self._arriving / f"step-{effect.step:08d}"
                    shutil.rmtree(place, ignore_errors=True)
                    limit = most_bytes(self.client.description.state_bytes)
                    self._unpacker = FileStreamReceiver(place, effect.header, limit)
            case effects.TakeChunk() if self._unpacker is not None:
                self._unpacker.feed(effect.data)
            case effects.Load():
                assert self._arriving is not None
                self._close_unpacker()
                version, step = self._table.load_state(self._arriving)
                self._drop_state()
                yield from self._do(self.member.loaded(version, step))
            case effects.DropState():
                self._drop_state()

    def _drop_state(self) -> None:
        self._close_unpacker()
        if self._arriving is not None and self._link.rank == 0:
            shutil.rmtree(self._arriving, ignore_errors=True)
        self._arriving = None

    def _close_unpacker(self) -> None:
        if self._unpacker is not None:
            self._unpacker.close()
            self._unpacker = None

    def _new_folder(self) -> Path:
        """A temporary folder of this worker. Of several ranks, the first makes and removes it."""
        folder = tempfile.mkdtemp(prefix="potluck-state-") if self._link.rank == 0 else ""
        return Path(self._link.gather_bytes(folder.encode())[0].decode())

    # Steps

    def await_step(self) -> Waits[tuple[Committed, Means] | None]:
        """Waits until a step is committed. None: there is work to do, or the run may stand elsewhere."""
        while True:
            for effect in self.member.take():
                match effect:
                    case effects.Compute():
                        return None
                    case effects.Apply():
                        is_less = bool(self._moments) and is_together(effect.committed)
                        without = self._moments if is_less else frozenset[int]()
                        means = yield Averaging(self.client, effect.committed.step, without)
                        return (effect.committed, means) if means is not None else None
                    case _:
                        yield from self._do([effect])
            if (yield from self.pump()):
                return None

    def check_weights(self, *, in_step: bool = False) -> None:
        """Tells the host if they are no longer what it was told. `in_step`: no code of the loop has run since."""
        if self._told is None or not torch.equal(self._table.works.now.quick_digest(), self._told):
            for effect in self.member.changed(in_step=in_step):
                assert isinstance(effect, effects.TellApplied)  # from within a backward nothing may be waited for
                self.tell_applied(effect.norm, effect.fault)

    def tell_applied(self, norm: float, fault: str) -> None:
        version = self.member.version
        enter_phase("applied", version, worker=self._table)
        digest, self._told = self._table.works.now.hash_weights()
        self.client.send(Applied(version, digest, self._table.run.lr, norm, fault, self._table.divergence))
        enter_phase("told", version, worker=self._table)

    # Looking, saving

    def evaluate(self, rows: int, size: int, look: Look) -> Waits[Figures | None]:
        """The means over some rows, in ranges that the host hands out; they do not depend on who computes which. None:
        this worker had no part in it."""
        self._look = look
        yield from self._do(self.member.evaluate(rows, size))
        found = self.member.evaluation
        assert found is not None
        while found.is_under_way:
            yield from self.pump()
        self._look = None
        return means_of(found.names, found.figures, found.samples) if found.samples else None

    def gather(self, data: bytes) -> Waits[list[bytes]]:
        """This worker's bytes, and those of all who are at this step, in the same order on each of them."""
        yield from self._do(self.member.gather(data))
        found = self.member.gathering
        assert found is not None
        self.reach("gathering", self.member.version)
        while found.found is None:
            yield from self.pump()
        if found.fault:
            raise ConfigError(found.fault)
        return found.found

    def save(self, keep_last: int) -> Waits[None]:
        if self.member.leads:
            yield from self.await_saves(until_kept=False)  # one at a time
        yield from self._do(self.member.save(time.monotonic(), keep_last))

    def await_saves(self, *, until_kept: bool, speaks: bool = False) -> Waits[None]:
        told = ""
        while self.member.is_saving(until_kept=until_kept):
            before = self.member.unsaved
            yield from self.pump()
            error = self.member.unsaved.error if self.member.unsaved is not before else ""
            if error not in ("", told) and until_kept and speaks:
                told = error
                self.client.say(f"{told.removesuffix('.')}. It is tried again. Ctrl-C leaves all the same.")

    def _serve(self, transfer: int) -> None:
        """A copy in host memory now; written aside and sent while training continues."""
        folder, version = self._new_folder(), self.member.version
        write = self._table.start_snapshot(folder)
        if self._link.rank == 0:
            self._leaving = [place for place in self._leaving if place.exists()] + [folder]
        session = self.client.session

        def remove() -> None:
            shutil.rmtree(folder, ignore_errors=True)

        def send() -> None:
            try:
                place = write()
                if place is None:
                    return
                header = stream_header(place)
                begin = StateBegin(transfer, version, header)
                self.client.send_parcel(session, begin, transfer, stream_chunks(place, header), done=remove)
            except Exception as error:
                self.client.say(f"Could not send the state of step {version}: {error}")
                remove()

        # A thread, since this worker trains on while its state is written to disk and read from there.
        thread = threading.Thread(target=send, name="state sender")
        thread.start()
        self._senders = [sender for sender in self._senders if sender.is_alive()] + [thread]

    # The end

    def leave_if_asked(self) -> Waits[bool]:
        """Before anything is begun: what this worker was given since is for the others."""
        is_asked = bool(self.member.wants_stop) and not self.member.is_over
        if is_asked:
            yield from self.leave()
        return is_asked

    def leave(self) -> Waits[None]:
        yield from self._do(self.member.leave(time.monotonic()))
        yield from self._settle()

    def close(self, *, finished: bool) -> Waits[None]:
        """`finished`: the host is told; else the connection breaks, as if this worker had been killed."""
        if self.has_joined and not self.member.is_over and finished:
            yield from self._do(self.member.finish(time.monotonic()))
            while not self.member.is_over:
                yield from self._hear()
        self.member.end()
        for sender in self._senders:
            sender.join(timeout=1.0)
        self.client.close()
        self._drop_state()
        for folder in self._leaving:
            shutil.rmtree(folder, ignore_errors=True)
