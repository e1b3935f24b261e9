"""States on their way: to newcomers, from a worker or from the host's disk, and to that disk. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from potluck.errors import TheirProtocolError
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.digests import Digests
from potluck.fleet.effects import Effect, Send, SendCheckpoint, Subscribe
from potluck.fleet.file_stream import most_bytes, stream_files
from potluck.fleet.membership import WorkerRecord
from potluck.fleet.saving import SLOW_STATE, Saving
from potluck.fleet.step_dispatcher import StepDispatcher
from potluck.wire.messages import SAVE, Admitted, StateBegin, StateChunk, StateMore, StateRequest

CHUNKS_AHEAD = 4
"""How many chunks of a state may be on their way before the first has left the host."""


@dataclass
class Transfer:
    """The state of one worker, on its way to another."""

    number: int
    sponsor: int | None
    """The peer that sends the state; None: the host's own disk."""
    to: int
    step: int
    left: int | None = None
    """Bytes that have yet to come from the sponsor, once it has said how many there are."""
    moved_at: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all of the state has come from its sponsor."""
        return self.sponsor is None or self.left == 0


@dataclass
class Transfers:
    run: CoordinatorState
    digests: Digests
    rounds: StepDispatcher
    saving: Saving
    under_way: dict[int, Transfer] = field(default_factory=dict, init=False)
    next_number: int = field(default=1, init=False)
    unpaid: Counter[tuple[int, int]] = field(default_factory=Counter, init=False)
    """(peer, transfer) -> chunks that came from it and have not left here."""

    @property
    def stranded(self) -> list[WorkerRecord]:
        """List the members that were being given the weights by somebody who is gone. They may have had all of them."""
        given = {transfer.to for transfer in self.under_way.values()}
        return [m for m in self.run.membership.inside if not m.is_ready and m.peer not in given]

    @property
    def is_any_whole(self) -> bool:
        """Whether a newcomer has been sent all of a state, and so gets to the last step by the averages since."""
        return any(transfer.is_whole for transfer in self.under_way.values())

    def awaits_weights(self, member: WorkerRecord) -> bool:
        """It will be given others, whatever it says of those it has."""
        return any(t.to == member.peer and not t.is_whole for t in self.under_way.values())

    def catch_up(self, member: WorkerRecord, avoid: int | None = None) -> list[Effect]:
        """The weights of a worker that has them, as of the end of the step under way, and the averages since."""
        busy = Counter(transfer.sponsor for transfer in self.under_way.values())
        # Of its own kind if it can be: another's weights differ in their last bits, and would be taken for drift.
        sponsor = min(
            self.digests.trusted, key=lambda m: (m.peer == avoid, m.leaving, m.kind != member.kind, busy[m.peer])
        )
        now = self.rounds.now
        after = now.step if now is not None else self.run.standing.version
        effects, number = self._begin(sponsor.peer, member, after)
        return [*effects, Send(sponsor.peer, StateRequest(number, after))]

    def send_checkpoint(self, member: WorkerRecord) -> list[Effect]:
        effects, number = self._begin(None, member, self.run.standing.version)
        return [*effects, SendCheckpoint(member.peer, number)]

    def _begin(self, sponsor: int | None, member: WorkerRecord, step: int) -> tuple[list[Effect], int]:
        self.run.membership.set_back(member)
        member.since = step + 1
        number, self.next_number = self.next_number, self.next_number + 1
        self.under_way[number] = Transfer(number, sponsor, member.peer, step, moved_at=self.run.clock)
        admitted = Admitted(step, 1, self.run.standing.to_wire(self.run.count_others(member)))
        return [Send(member.peer, admitted), Subscribe(member.peer, step + 1)], number

    # On their way

    def _whose(self, transfer: int) -> "Saving | Transfers":
        return self.saving if transfer == SAVE else self

    def on_begin(self, member: WorkerRecord, begin: StateBegin) -> list[Effect]:
        run, whose = self.run, self._whose(begin.transfer)
        if not whose.may_begin(member, begin):
            asks = self.saving.on_turned_away(member, begin) if whose is self.saving else []
            return [Send(member.peer, StateMore(begin.transfer, 0)), *asks]
        try:
            total = sum(size for _, size in stream_files(begin.header))
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
        if whose is self and begin.step < self.under_way[begin.transfer].step:
            asked = self.under_way[begin.transfer].step
            sentence = (
                f"StateBegin is of step {begin.step}, and {asked} was asked for: answer once you have applied it."
            )
            return run.refuse(member.peer, "illegal", sentence)
        self.unpaid.pop((member.peer, begin.transfer), None)
        return [whose.begin(member, begin, total), Send(member.peer, StateMore(begin.transfer, CHUNKS_AHEAD))]

    def on_chunk(self, member: WorkerRecord, chunk: StateChunk) -> list[Effect]:
        taken = self._whose(chunk.transfer).take(member, chunk)
        if taken is None:
            return []
        self.unpaid[member.peer, chunk.transfer] += 1
        if self.unpaid[member.peer, chunk.transfer] > 2 * CHUNKS_AHEAD:  # what an ended one was allowed may be left
            return self.run.refuse(member.peer, "illegal", "StateChunk came before StateMore allowed it.")
        return [taken]

    def on_taken(self, peer: int, transfer: int) -> list[Effect]:
        """A chunk that came from this peer has been written, or has left."""
        if self.unpaid[peer, transfer] > 1:
            self.unpaid[peer, transfer] -= 1
        else:
            del self.unpaid[peer, transfer]
        return [Send(peer, StateMore(transfer, 1))] if peer in self.run.membership.members else []

    def may_begin(self, member: WorkerRecord, begin: StateBegin) -> bool:
        transfer = self.under_way.get(begin.transfer)
        return transfer is not None and transfer.sponsor == member.peer and transfer.left is None

    def begin(self, member: WorkerRecord, begin: StateBegin, total: int) -> Effect:
        transfer = self.under_way[begin.transfer]
        transfer.left, transfer.moved_at = total, self.run.clock
        newcomer = self.run.membership.members[transfer.to]
        newcomer.since = max(newcomer.since, begin.step + 1)
        return Send(transfer.to, begin)

    def take(self, member: WorkerRecord, chunk: StateChunk) -> Effect | None:
        transfer = self.under_way.get(chunk.transfer)
        if transfer is None or transfer.sponsor != member.peer or not transfer.left:
            return None
        transfer.left, transfer.moved_at = max(0, transfer.left - len(chunk.data)), self.run.clock
        return Send(transfer.to, chunk, credit=(member.peer, chunk.transfer))

    # What ends them

    def end_of(self, member: WorkerRecord) -> None:
        """Ends the transfer to a worker that has the weights."""
        for number in [t.number for t in self.under_way.values() if t.to == member.peer]:
            del self.under_way[number]

    def end_all(self) -> list[Effect]:
        transfers = list(self.under_way.values())
        self.under_way.clear()
        return [effect for transfer in transfers for effect in self._spare_sponsor(transfer)]

    def part_with_receivers(self) -> list[Effect]:
        """Part with those who have all of a state: they may have applied a step that the run goes back to before, and
        come again."""
        whole = [transfer.to for transfer in self.under_way.values() if transfer.is_whole]
        why = "it was given steps that are computed again"
        return [effect for peer in whole for effect in self.run.close(peer, why)]

    def part_with_those_behind(self) -> list[Effect]:
        """Part with those who have all of a state, and wait for the average of a step that nobody sends: they come
        again, with the weights that they have."""
        whole = [transfer.to for transfer in self.under_way.values() if transfer.is_whole]
        behind = [peer for peer in whole if self.run.membership.members[peer].since <= self.run.skipped]
        return [effect for peer in behind for effect in self.run.close(peer, "the step that it waits for is over")]

    def on_gone(self, peer: int) -> list[Effect]:
        """Nobody need send to it, and those whom it was to send to get theirs from another."""
        effects: list[Effect] = []
        for key in [key for key in self.unpaid if key[0] == peer]:
            del self.unpaid[key]
        for transfer in [t for t in self.under_way.values() if t.to == peer]:
            del self.under_way[transfer.number]
            effects += self._spare_sponsor(transfer)
        return effects + self.pass_over(peer)

    def pass_over(self, peer: int) -> list[Effect]:
        """It is gone or wrong: others send their weights to those whom it was to."""
        effects: list[Effect] = []
        for transfer in [t for t in self.under_way.values() if t.sponsor == peer and not t.is_whole]:
            effects += self._begin_anew(transfer)
        return effects

    def pass_over_leavers(self) -> list[Effect]:
        """One that leaves takes no other step: those who wait for a later one of it get theirs as it can be had now."""
        now, effects = self.rounds.now, list[Effect]()
        wanted = now.step if now is not None else self.run.standing.version
        leaving = {m.peer: m.applied for m in self.run.membership.holders if m.leaving}
        for transfer in [t for t in self.under_way.values() if not t.is_whole and t.sponsor in leaving]:
            is_hopeless = transfer.step > leaving[transfer.sponsor or 0]
            if is_hopeless and (transfer.step > wanted or len(leaving) < len(self.run.membership.holders)):
                effects += self._begin_anew(transfer)
        return effects

    def _begin_anew(self, transfer: Transfer, avoid: int | None = None) -> list[Effect]:
        del self.under_way[transfer.number]
        spared, newcomer = self._spare_sponsor(transfer), self.run.membership.members[transfer.to]
        return spared + (self.catch_up(newcomer, avoid) if self.run.membership.holders else [])

    def _spare_sponsor(self, transfer: Transfer) -> list[Effect]:
        if transfer.sponsor not in self.run.membership.members:
            return []
        return [Send(transfer.sponsor, StateMore(transfer.number, 0))]

    def expire_slow(self) -> list[Effect]:
        """A worker that was to send a state, and sends nothing of it, is passed over while there are others to ask."""
        run = self.run
        effects = self.part_with_those_behind()
        latest = run.clock - SLOW_STATE * run.patience_s
        for transfer in list(self.under_way.values()):
            sponsor = run.membership.members.get(transfer.sponsor) if transfer.sponsor is not None else None
            if sponsor is None or sponsor.applied < transfer.step:
                transfer.moved_at = run.clock
            elif not transfer.is_whole and transfer.moved_at < latest and len(run.membership.holders) > 1:
                effects += self._begin_anew(transfer, avoid=sponsor.peer)
        return effects
