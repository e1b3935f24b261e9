"""MemberDriver: a Member at work, over a client, for a run that computes. One pump receives, and does what follows.

All that a worker says to its host and hears from it passes through here. What it means is decided by fleet/member.py;
what a state is, the lifecycle knows (host_lifecycle.py). The ranks of a node each have a MemberDriver of their own,
over a client that lets all of them hear the same.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from potluck.engine.look_sums import Figures, LookSums, means_of
from potluck.engine.node_client import NodeClient
from potluck.errors import ConfigError, Diverged
from potluck.fleet import member_effects as effects
from potluck.fleet.client import Client, ConnectionLost, Means
from potluck.fleet.file_stream import FileStreamReceiver, most_bytes, stream_chunks, stream_header
from potluck.fleet.member import Member, is_together
from potluck.fleet.member_effects import MemberEffect
from potluck.fleet.phases import enter_phase
from potluck.link.link import Link
from potluck.wire.messages import Applied, Committed, StateBegin

if TYPE_CHECKING:
    from potluck.engine.host_lifecycle import HostLifecycle

Look = Callable[[int, int], LookSums]
"""Rows, from the first up to and without the last, to what they come to."""


class MemberDriver:
    def __init__(self, client: Client | NodeClient, link: Link, lifecycle: "HostLifecycle") -> None:
        self.client = client
        self.member = Member()
        self.has_joined = False
        self._link = link
        self._lifecycle = lifecycle
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
        enter_phase(phase, step or self.member.version + 1, worker=self._lifecycle, **what)

    # The pump

    def pump(self) -> bool:
        """Handles one message, or its absence. Returns whether the run may stand elsewhere than before."""
        turn = self.member.turn
        self._hear()
        self._settle()
        return self.member.turn != turn

    def _settle(self) -> None:
        """Waits until this worker is in the run, or out of it."""
        while not self.member.is_settled:
            self._hear()
        self._lifecycle.run.stopping |= self.member.is_over

    def _hear(self) -> None:
        heard = self.client.receive(timeout_s=self.member.wait_s(time.monotonic()))
        now = time.monotonic()
        if heard is None:
            self._do(self.member.nothing(now))
        elif isinstance(heard, ConnectionLost):
            enter_phase("lost", self.member.version, worker=self._lifecycle)
            self._do(self.member.lost(heard.why))
        else:
            self._do(self.member.hear(now, heard))

    def _do(self, found: list[MemberEffect]) -> None:
        for effect in found:
            match effect:
                case effects.SendToHost():
                    self.client.send(effect.message)
                case effects.Say():
                    self.client.say(effect.sentence)
                case effects.Fail():
                    raise effect.kind(
                        effect.sentence
                        + (self._lifecycle.run.prepared().nonfinite_hint() if effect.kind is Diverged else "")
                    )
                case effects.Rejoin():
                    self._lifecycle.work.forget()
                    self.client.connect(again=True)
                    self._present()
                case effects.StandAt():
                    self._lifecycle.run.seek(effect.position)
                case effects.SkipAverages():
                    self.client.pass_over_until(effect.step)
                case effects.ServeState():
                    self._serve(effect.transfer)
                case effects.TellApplied():
                    self.tell_applied(effect.norm, effect.fault)
                case effects.LookAt():
                    assert self._look is not None
                    looked = self._look(effect.start, effect.end)
                    self._do(self.member.looked(effect, looked.names, looked.figures, looked.samples))
                case _:
                    self._receive_state(effect)

    # Joining

    def join(self) -> None:
        if not self.has_joined:
            self.has_joined = True
            self._present()
            self._settle()

    def _present(self) -> None:
        self.reach("joined")
        described = self.client.description = self._lifecycle.describe()
        self._moments = described.moments
        before = self._told
        digest, self._told = self._lifecycle.work.hash_weights()
        is_same = before is not None and torch.equal(before, self._told)
        assert self.client.welcome is not None
        seen = self._lifecycle.run.rows_seen
        self._do(self.member.present(self.client.welcome, described.to_json(), digest, rows_seen=seen, is_same=is_same))

    def _receive_state(self, effect: MemberEffect) -> None:
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
                version, step = self._lifecycle.load_state(self._arriving)
                self._drop_state()
                self._do(self.member.loaded(version, step))
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

    def await_step(self) -> tuple[Committed, Means] | None:
        """Waits until a step is committed. None: there are slices to compute, or the run may stand elsewhere."""
        while True:
            for effect in self.member.take():
                match effect:
                    case effects.Compute():
                        return None
                    case effects.Apply():
                        is_less = bool(self._moments) and is_together(effect.committed)
                        without = self._moments if is_less else frozenset[int]()
                        means = self.client.take_means(effect.committed.step, without)
                        return (effect.committed, means) if means is not None else None
                    case _:
                        self._do([effect])
            if self.pump():
                return None

    def check_weights(self, *, in_step: bool = False) -> None:
        """Tells the host if they are no longer what it was told. `in_step`: no code of the loop has run since."""
        if self._told is None or not torch.equal(self._lifecycle.work.quick_digest(), self._told):
            self._do(self.member.changed(in_step=in_step))

    def tell_applied(self, norm: float, fault: str) -> None:
        version = self.member.version
        enter_phase("applied", version, worker=self._lifecycle)
        digest, self._told = self._lifecycle.work.hash_weights()
        self.client.send(Applied(version, digest, self._lifecycle.run.lr, norm, fault, self._lifecycle.work.divergence))
        enter_phase("told", version, worker=self._lifecycle)

    # Looking, saving

    def evaluate(self, rows: int, size: int, look: Look) -> Figures | None:
        """The means over some rows, in ranges that the host hands out; they do not depend on who computes which. None:
        this worker had no part in it."""
        self._look = look
        self._do(self.member.evaluate(rows, size))
        found = self.member.evaluation
        assert found is not None
        while found.is_under_way:
            self.pump()
        self._look = None
        return means_of(found.names, found.figures, found.samples) if found.samples else None

    def gather(self, data: bytes) -> list[bytes]:
        """This worker's bytes, and those of all who are at this step, in the same order on each of them."""
        self._do(self.member.gather(data))
        found = self.member.gathering
        assert found is not None
        self.reach("gathering", self.member.version)
        while found.found is None:
            self.pump()
        if found.fault:
            raise ConfigError(found.fault)
        return found.found

    def save(self, keep_last: int) -> None:
        if self.member.leads:
            self.await_saves(until_kept=False)  # one at a time
        self._do(self.member.save(time.monotonic(), keep_last))

    def await_saves(self, *, until_kept: bool, speaks: bool = False) -> None:
        told = ""
        while self.member.is_saving(until_kept=until_kept):
            before = self.member.unsaved
            self.pump()
            error = self.member.unsaved.error if self.member.unsaved is not before else ""
            if error not in ("", told) and until_kept and speaks:
                told = error
                self.client.say(f"{told.removesuffix('.')}. It is tried again. Ctrl-C leaves all the same.")

    def _serve(self, transfer: int) -> None:
        """A copy in host memory now; written aside and sent while training continues."""
        folder, version = self._new_folder(), self.member.version
        write = self._lifecycle.start_snapshot(folder)
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

    def leave_if_asked(self) -> bool:
        """Before anything is begun: what this worker was given since is for the others."""
        is_asked = bool(self.member.wants_stop) and not self.member.is_over
        if is_asked:
            self.leave()
        return is_asked

    def leave(self) -> None:
        self._do(self.member.leave(time.monotonic()))
        self._settle()

    def close(self, *, finished: bool) -> None:
        """`finished`: the host is told; else the connection breaks, as if this worker had been killed."""
        if self.has_joined and not self.member.is_over and finished:
            self._do(self.member.finish(time.monotonic()))
            while not self.member.is_over:
                self._hear()
        self.member.end()
        for sender in self._senders:
            sender.join(timeout=1.0)
        self.client.close()
        self._drop_state()
        for folder in self._leaving:
            shutil.rmtree(folder, ignore_errors=True)
