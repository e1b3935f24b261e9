"""Led: a Member at work, over a client, for a run that computes. One pump receives, and does what follows.

All that a worker says to its host and hears from it passes through here. What it means is decided by fleet/member.py;
what a state is, the run's keeper knows (host_keeper.py). The ranks of a node each have a Led of their own, over a
client that lets all of them hear the same.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from potluck.engine.node_client import NodeClient
from potluck.errors import Diverged
from potluck.fleet import member_effects as effects
from potluck.fleet.client import Client, Lost, Means
from potluck.fleet.member import Member
from potluck.fleet.member_effects import Effect
from potluck.fleet.parcel import Unpacker, chunks, most_bytes, pack
from potluck.fleet.phases import reach
from potluck.link.link import Link
from potluck.wire.messages import Applied, Committed, StateBegin

if TYPE_CHECKING:
    from potluck.engine.host_keeper import HostKeeper

Look = Callable[[int, int], list[float]]
"""Rows, from the first up to and without the last, to the sum of their losses and how many samples they are."""


class Led:
    def __init__(self, client: Client | NodeClient, link: Link, keeper: "HostKeeper") -> None:
        self.client = client
        self.member = Member()
        self.has_joined = False
        self._link = link
        self._keeper = keeper
        self._told = torch.zeros(0)
        """What a glance at the weights gave when the host was told their digest."""
        self._look: Look | None = None
        self._arriving: Path | None = None
        """Where a state is put that is on its way here."""
        self._unpacker: Unpacker | None = None
        self._senders: list[threading.Thread] = []
        self._leaving: list[Path] = []
        """Folders that are being sent."""

    def reach(self, phase: str, step: int = 0, **what: Any) -> None:
        """Of the step that is under way, if no other is named."""
        reach(phase, step or self.member.version + 1, worker=self._keeper, **what)

    # The pump

    def pump(self) -> bool:
        """One message, or none in time, and what it leads to. Whether the run may stand elsewhere than before."""
        turn = self.member.turn
        self._hear()
        self._settle()
        return self.member.turn != turn

    def _settle(self) -> None:
        """Until this worker is in the run, or out of it."""
        while not self.member.is_settled:
            self._hear()
        self._keeper.run.stopping |= self.member.is_over

    def _hear(self) -> None:
        heard = self.client.receive(timeout_s=self.member.wait_s(time.monotonic()))
        now = time.monotonic()
        if heard is None:
            self._do(self.member.nothing(now))
        elif isinstance(heard, Lost):
            reach("lost", self.member.version, worker=self._keeper)
            self._do(self.member.lost(heard.why))
        else:
            self._do(self.member.hear(now, heard))

    def _do(self, found: list[Effect]) -> None:
        for effect in found:
            match effect:
                case effects.Send():
                    self.client.send(effect.message)
                case effects.Say():
                    self.client.say(effect.sentence)
                case effects.Fail():
                    raise effect.kind(
                        effect.sentence + (self._keeper.run.prepared().suspicion() if effect.kind is Diverged else "")
                    )
                case effects.DropAhead():
                    self._keeper.work.forget()
                case effects.Rejoin():
                    self._keeper.work.forget()
                    self.client.connect(again=True)
                    self._present()
                case effects.StandAt():
                    self._keeper.stand_at(effect.epoch, effect.row)
                case effects.SkipAverages():
                    self.client.pass_over_until(effect.step)
                case effects.ServeState():
                    self._serve(effect.transfer)
                case effects.TellApplied():
                    self.tell_applied(effect.norm, effect.fault)
                case effects.LookAt():
                    assert self._look is not None
                    total, samples = self._look(effect.start, effect.end)
                    self._do(self.member.looked(effect, total, samples))
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
        described = self.client.description = self._keeper.describe()
        before = self._told
        digest, self._told = self._keeper.work.hash_weights()
        is_same = torch.equal(before, self._told)
        assert self.client.welcome is not None
        self._do(self.member.present(self.client.welcome, described.to_json(), digest, is_same=is_same))

    def _receive_state(self, effect: Effect) -> None:
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
                    self._unpacker = Unpacker(place, effect.header, limit)
            case effects.TakeChunk() if self._unpacker is not None:
                self._unpacker.feed(effect.data)
            case effects.Load():
                assert self._arriving is not None
                self._close_unpacker()
                version, step = self._keeper.load_state(self._arriving)
                self._drop_state()
                self._keeper.run.replaying = True
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
        """Of this worker, for a while. Of several ranks it is the first that makes it, and removes it."""
        folder = tempfile.mkdtemp(prefix="potluck-state-") if self._link.rank == 0 else ""
        return Path(self._link.gather_bytes(folder.encode())[0].decode())

    # Steps

    def await_step(self) -> tuple[Committed, Means] | None:
        """Until a step is committed; none if there are slices to compute, or the run may stand elsewhere."""
        while True:
            for effect in self.member.take():
                match effect:
                    case effects.Compute():
                        return None
                    case effects.Apply():
                        means = self.client.take_means(effect.committed.step)
                        return (effect.committed, means) if means is not None else None
                    case _:
                        self._do([effect])
            if self.pump():
                return None

    def check_weights(self, *, in_step: bool = False) -> None:
        """Tells the host if they are no longer what it was told. `in_step`: no code of the loop has run since."""
        if not torch.equal(self._keeper.work.glance(), self._told):
            self._do(self.member.changed(in_step=in_step))

    def tell_applied(self, norm: float, fault: str) -> None:
        version = self.member.version
        reach("applied", version, worker=self._keeper)
        digest, self._told = self._keeper.work.hash_weights()
        self.client.send(Applied(version, digest, self._keeper.run.lr, norm, fault, self._keeper.work.divergence))
        reach("told", version, worker=self._keeper)

    # Looking, saving

    def evaluate(self, rows: int, size: int, look: Look) -> float:
        """The mean loss over some rows, in ranges that the host hands out; the same whoever computes them."""
        self._look = look
        self._do(self.member.evaluate(rows, size))
        found = self.member.evaluation
        assert found is not None
        while found.loss is None:
            self.pump()
        self._look = None
        return found.loss

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
        write = self._keeper.start_snapshot(folder)
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
                header = pack(place)
                begin = StateBegin(transfer, version, header)
                self.client.send_parcel(session, begin, transfer, chunks(place, header), done=remove)
            except Exception as error:
                self.client.say(f"Could not send the state of step {version}: {error}")
                remove()

        thread = threading.Thread(target=send, name="state sender")
        thread.start()
        self._senders = [sender for sender in self._senders if sender.is_alive()] + [thread]

    # The end

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
