"""Checkpoints for the host's disk: when one is due, who sends it, and what is kept. Pure."""

from dataclasses import replace

from potluck.agree.records import Position
from potluck.events import CheckpointFailed, CheckpointSaved
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.digests import Digests
from potluck.fleet.effects import Effect, Emit, SaveAbort, SaveBegin, SaveChunk, Send
from potluck.fleet.membership import WorkerRecord
from potluck.wire.messages import SAVE, Saved, SaveDue, StateBegin, StateChunk, StateMore, StateRequest

MOST_KEPT = 1000
"""The most checkpoints that are kept, no matter what a worker asks for."""
SLOW_STATE = 4
"""Times `patience` without a byte of a state that is wanted: then another worker is asked for it."""
NOBODY = -1


class Saving:
    def __init__(self, run: CoordinatorState, digests: Digests) -> None:
        self._run = run
        self._digests = digests
        self.due: SaveDue | None = None
        self.sender: int | None = None
        """The peer whose state is on its way to the disk."""
        self._step = 0
        """The step that it is of."""
        self._left = 0
        """Bytes of it that have yet to come."""
        self.is_writing = False
        """All has come, also where its sender is gone, and the disk has yet to say what became of it."""
        self.saved = Saved(0, "", "")
        """The last that is on the disk."""
        self.fault = ""
        """Why the last one could not be written; empty once one could."""
        self._asked = NOBODY
        """The worker that is to send the checkpoint that is due."""
        self._passed_over: set[int] = set()
        """Worker ids that were to send it, and did not."""
        self._keep_last = 1
        """The largest number of checkpoints that a worker wanted kept."""
        self._moved_at = 0.0
        self._again_at: float | None = None
        """A checkpoint could not be written, and is asked for again then."""
        self._best = 0
        """The last step that a loop called the best so far."""
        self._knowing: set[int] = set()
        """Worker ids whose states say so."""
        self._is_best = False
        """Whether the state on its way, or the last that came, says so."""

    @property
    def is_last_kept(self) -> bool:
        return bool(self.saved.folder) and self.saved.step == self._run.standing.version

    @property
    def is_last_coming(self) -> bool:
        """Whether the disk writes the last step, all of which has come."""
        return self.is_writing and self._step == self._run.standing.version

    def _is_kept(self, state: SaveDue | StateBegin) -> bool:
        return bool(self.saved.folder) and (self.saved.step, self.saved.is_best) >= (state.step, state.is_best)

    @property
    def is_under_way(self) -> bool:
        return self.sender is not None or self.is_writing or self.due is not None

    def found(self, kept: Position, folder: str) -> None:
        """The newest checkpoint on the disk, from before this coordinator was there. It may be of a step that a journal
        has lost, and whose number another has by now."""
        standing = self._run.standing
        if kept.version < standing.version or (kept.version, kept.rows_seen) == (standing.version, standing.rows_seen):
            self.saved = Saved(kept.version, folder, "")

    def on_restored(self) -> None:
        """The run has gone back: saves that were due no longer are."""
        self.due = self._again_at = None
        self._best, self._knowing = 0, set()
        if self.saved.step > self._run.standing.version:  # it turned out to be damaged
            self.saved = Saved(0, "", "")

    # When, and by whom

    def on_due(self, member: WorkerRecord, due: SaveDue) -> list[Effect]:
        if self._is_kept(due):
            return [Send(member.peer, self.saved)]
        if due.step > self._run.latest:
            self._run.refused["due too early"] += 1
            return []
        self._keep_last = min(MOST_KEPT, max(self._keep_last, due.keep_last))
        if due.is_best and due.step >= self._best:
            self._knowing = {member.worker_id, *(self._knowing if due.step == self._best else ())}
            self._best = due.step
        if self.due is None or (due.step, due.is_best) > (self.due.step, self.due.is_best):
            self.due, self._again_at = due, None
            # It sends by itself who spoke for all then: another may do so by now.
            self._asked, self._moved_at = self._run.leaders.get(due.step, NOBODY), self._run.clock
        return self.ask()

    def ask(self) -> list[Effect]:
        """Asks another worker, if a checkpoint is due and the one that was to send it is gone."""
        is_coming = self.sender is not None or self.is_writing
        if self.due is None or is_coming or self._again_at is not None:
            return []
        if not (holders := self._holders_of(self.due)):
            there = {member.worker_id for member in self._run.membership.members.values()}
            if self.saved.step >= self.due.step and not there & self._knowing:
                self.due = None  # whoever calls it the best so far yet says so itself
            return []
        if any(member.worker_id == self._asked for member in holders):
            return []
        sender = min(holders, key=lambda m: (m.worker_id in self._passed_over, m.worker_id))
        self._asked, self._moved_at = sender.worker_id, self._run.clock
        # What it has now, if that is news: it may be waiting for a save itself, and apply nothing before it.
        news = self.saved.step + (0 if self.due.is_best else 1)
        return [Send(sender.peer, StateRequest(SAVE, max(news, sender.applied)))]

    def _holders_of(self, due: SaveDue) -> list[WorkerRecord]:
        """Who can send it. Others, whose states do not say yet that it is the best, do for the weights alone."""
        holders = self._digests.trusted
        knowing = [member for member in holders if member.worker_id in self._knowing]
        is_for_mark = bool(due.is_best) and (bool(knowing) or self.saved.step >= due.step)
        return knowing if is_for_mark else holders

    def save_now(self) -> list[Effect]:
        """Somebody wants one, though none is due."""
        now = self._run.standing.version
        self.due, self._again_at = SaveDue(now, self._keep_last, int(now == self._best)), None
        self._asked, self._moved_at = NOBODY, self._run.clock
        return self.ask()

    def let_go(self, member: WorkerRecord) -> list[Effect]:
        """The last who has the weights leaves them behind: those it has, for it will apply no other step."""
        others = [m for m in self._run.membership.holders if m is not member and not m.leaving]
        is_best = member.applied == self._best and member.worker_id in self._knowing
        due = SaveDue(member.applied, self._keep_last, int(is_best))
        if member.is_ready and not others and member.applied and not self._is_kept(due):
            self.due, self._moved_at = due, self._run.clock
            if self.sender is not None or self.is_writing:
                return []  # once that one is kept
            self._again_at = None
            self._asked = member.worker_id
            return [Send(member.peer, StateRequest(SAVE, member.applied))]
        return self._run.shut(member)

    # On its way: see transfers.py

    def may_begin(self, member: WorkerRecord, begin: StateBegin) -> bool:
        is_old = self._is_kept(begin)  # the leader has changed meanwhile
        if self.sender is not None and self._asked == member.worker_id and self.sender != member.peer:
            self._asked = NOBODY  # it is turned away now: should the one under way fail, somebody is asked anew
        # One that begins another in the middle has ended the first: it heard of the end of an earlier one too late.
        is_free = not self.is_writing and self.sender in (None, member.peer)
        return self.due is not None and is_free and member in self._digests.trusted and not is_old

    def on_turned_away(self, member: WorkerRecord, begin: StateBegin) -> list[Effect]:
        """Where its state was to say that it is the best so far and does not, it was copied before, or is another's,
        which this worker has been given since: it is asked again, and passed over in the end."""
        is_coming, is_asked = self.sender is not None or self.is_writing, self._asked == member.worker_id
        is_for_mark = self.due is not None and self.due.is_best and self.saved.step >= self.due.step
        if not is_for_mark or begin.is_best or is_coming or not is_asked:
            return []
        if member.worker_id not in self._passed_over:
            return [Send(member.peer, StateRequest(SAVE, member.applied))]
        self._knowing.discard(member.worker_id)
        self._asked, self.due = NOBODY, self.due if self._knowing else None
        return [Send(member.peer, replace(self.saved, is_best=1)), *self.ask()]  # it has no more to wait for

    def begin(self, member: WorkerRecord, begin: StateBegin, total: int) -> Effect:
        self.sender, self._asked, self._left, self._moved_at = member.peer, member.worker_id, total, self._run.clock
        self._step, self._is_best = begin.step, bool(begin.is_best)
        self.is_writing = total <= 0
        return SaveBegin(member.peer, begin.step, begin.header, self._keep_last)

    def take(self, member: WorkerRecord, chunk: StateChunk) -> Effect | None:
        if self.sender != member.peer or self._left <= 0:
            return None
        self._left, self._moved_at = self._left - len(chunk.data), self._run.clock
        self.is_writing = self._left <= 0
        return SaveChunk(member.peer, chunk.data)

    def abort(self) -> list[Effect]:
        """Give up a checkpoint that has not wholly come; its sender, if it is still there, sends no more of it. Where
        all has come, the disk is writing it, and says so: a later one that began meanwhile would be taken for it."""
        sender, self.sender = self.sender, None
        return [SaveAbort(), *self._spare(sender)] if sender is not None and not self.is_writing else []

    def _spare(self, sender: int | None) -> list[Effect]:
        """Else the rest of its state would be in the way of the next. Where there is no rest, it would take this for
        the next."""
        is_sending = sender in self._run.membership.members and self._left > 0
        return [Send(sender, StateMore(SAVE, 0))] if sender is not None and is_sending else []

    def pass_over(self, peer: int) -> list[Effect]:
        """Takes no checkpoint from this peer: it is gone, or its weights are wrong."""
        return (self.abort() if self.sender == peer else []) + self.ask()

    # What became of it

    def on_saved(self, step: int, folder: str, error: str, size: int) -> list[Effect]:
        sender, self.sender, self._asked, self.is_writing = self.sender, None, NOBODY, False
        self._passed_over.clear()
        if error:
            return self._on_failed(sender, Saved(step, "", error, int(self._is_best)))
        self.saved, self.fault, self._again_at = Saved(step, folder, "", int(self._is_best)), "", None
        if self.due is not None and self._is_kept(self.due):
            self.due = None
        run, members = self._run, list(self._run.membership.members.values())
        effects: list[Effect] = [Send(m.peer, self.saved) for m in members if not m.plain and not m.leaving]
        for member in [m for m in members if m.leaving and m.shut_at is None]:
            effects += self.let_go(member)
        saved = CheckpointSaved(step=run.step_at(step), folder=folder, stall_s=0.0, bytes=size)
        effects.append(Emit(saved))
        run.steps = {version: steps for version, steps in run.steps.items() if version >= step}
        return effects + self.ask()

    def _on_failed(self, sender: int | None, told: Saved) -> list[Effect]:
        """No worker ends for it, and none that has the only copy may go: it is asked for again after a while.

        A later one that is due takes its place.
        """
        run = self._run
        self.fault = told.error
        self.due = self.due or SaveDue(told.step, self._keep_last, told.is_best)
        self._again_at = run.clock + run.patience_s
        failed = CheckpointFailed(step=run.step_at(told.step), reason=told.error)
        effects: list[Effect] = [Emit(failed), *self._spare(sender)]
        return effects + [Send(m.peer, told) for m in run.membership.members.values() if not m.plain]

    # Time

    def expire_slow(self) -> list[Effect]:
        """A worker that was to send it, and sends nothing of it, is passed over while there are others to ask. One that
        has stopped in the middle is asked once more: a failure may have reached it when the next was on its way. So is
        one that nobody else can stand in for: it was to send it by itself, and may wait for an earlier one."""
        run = self._run
        if self.due is None or self._moved_at >= run.clock - SLOW_STATE * run.patience_s:
            return []
        self._moved_at = run.clock
        saving = run.membership.members.get(self.sender) if self.sender is not None else None
        slow = saving.worker_id if saving is not None else self._asked
        is_alone = all(holder.worker_id == slow for holder in run.membership.holders)
        if is_alone and saving is None and slow in self._passed_over:  # another request would be another state
            return []
        self._passed_over.add(slow)
        self._asked = NOBODY
        return self.abort() + self.ask()

    def ask_again(self) -> list[Effect]:
        if self._again_at is None or self._run.clock < self._again_at or self._run.finished:
            return []
        self._again_at = None
        return self.ask()
