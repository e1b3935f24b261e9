"""States that workers send, to newcomers or to the host's disk: what is taken of them, and how far ahead. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from potluck.errors import TheirProtocolError
from potluck.fleet.effects import Effect, Send
from potluck.fleet.membership import Member
from potluck.fleet.parcel import files_in, most_bytes
from potluck.fleet.run_state import RunState
from potluck.fleet.saving import SAVE, Saving
from potluck.fleet.transfers import Transfers
from potluck.wire.messages import StateBegin, StateChunk, StateMore

CHUNKS_AHEAD = 4
"""Of a state: may be on their way before the first has left here."""


@dataclass
class Uploads:
    run: RunState
    saving: Saving
    transfers: Transfers
    unpaid: Counter[tuple[int, int]] = field(default_factory=Counter, init=False)
    """(peer, transfer) -> chunks that came from it and have not left here."""

    def _whose(self, transfer: int) -> Saving | Transfers:
        return self.saving if transfer == SAVE else self.transfers

    def on_begin(self, member: Member, begin: StateBegin) -> list[Effect]:
        run, whose = self.run, self._whose(begin.transfer)
        dropped = self.saving.begun_again(member) if begin.transfer == SAVE else []
        if not whose.may_begin(member, begin):
            return [*dropped, Send(member.peer, StateMore(begin.transfer, 0))]
        try:
            total = sum(size for _, size in files_in(begin.header))
        except TheirProtocolError as error:
            return run.refuse(member.peer, "illegal", str(error))
        most = most_bytes(max(run.described.state_bytes, 4 * run.described.floats))
        if total > most or begin.step > run.latest:
            return run.refuse(
                member.peer,
                "illegal",
                f"StateBegin announces {total:,} bytes of step {begin.step}; the state of this run's model has at most"
                f" {most:,}, and its last step is {run.latest}.",
            )
        self.unpaid.pop((member.peer, begin.transfer), None)
        return [*dropped, whose.begin(member, begin, total), Send(member.peer, StateMore(begin.transfer, CHUNKS_AHEAD))]

    def on_chunk(self, member: Member, chunk: StateChunk) -> list[Effect]:
        whose = self._whose(chunk.transfer)
        if not whose.may_take(member, chunk):
            return []
        self.unpaid[member.peer, chunk.transfer] += 1
        if self.unpaid[member.peer, chunk.transfer] > 2 * CHUNKS_AHEAD:  # what an ended one was allowed may be left
            return self.run.refuse(member.peer, "illegal", "StateChunk came before StateMore allowed it.")
        return [whose.take(member, chunk)]

    def on_taken(self, peer: int, transfer: int) -> list[Effect]:
        """A chunk that came from this peer has been written, or has left."""
        if self.unpaid[peer, transfer] > 1:
            self.unpaid[peer, transfer] -= 1
        else:
            del self.unpaid[peer, transfer]
        return [Send(peer, StateMore(transfer, 1))] if peer in self.run.membership.members else []

    def on_gone(self, peer: int) -> None:
        for key in [key for key in self.unpaid if key[0] == peer]:
            del self.unpaid[key]
