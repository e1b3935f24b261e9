"""With which weights a worker takes part: its own, another's, or those of a checkpoint, while nobody has any. Pure.

After each step, whose are right, and how those get them who have others.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from potluck.errors import TheirProtocolError
from potluck.events import Stalled
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.description import MAX_TOTAL, Description
from potluck.fleet.digests import Digests, ReportedDigest, drift_event
from potluck.fleet.effects import Describe, Effect, Emit, Restore, Send, Subscribe
from potluck.fleet.evaluation import Evaluations
from potluck.fleet.membership import WorkerPhase, WorkerRecord
from potluck.fleet.plain_peers import PlainPeers
from potluck.fleet.saving import Saving
from potluck.fleet.step_dispatcher import StepDispatcher
from potluck.fleet.transfers import Transfers
from potluck.wire.messages import STEPPED, Admitted, Applied, Ready


@dataclass
class Weights:
    run: CoordinatorState
    digests: Digests
    rounds: StepDispatcher
    transfers: Transfers
    saving: Saving
    evaluations: Evaluations
    plain_peers: PlainPeers
    most_floats: int = field(default=MAX_TOTAL, init=False)
    """The most floats that there is memory for."""
    waiting: list[tuple[int, Ready]] = field(default_factory=list, init=False)
    """Newcomers for whom nobody has the weights yet."""
    is_restoring: bool = field(default=False, init=False)
    alone_since: float | None = field(default=None, init=False)
    """Since when nobody holds the weights."""

    def on_ready(self, member: WorkerRecord, ready: Ready) -> list[Effect]:
        run = self.run
        if run.finished:
            return run.shut(member)
        try:
            described = Description.from_json(ready.description)
        except TheirProtocolError as error:
            return run.refuse(member.peer, "wrong model", str(error))
        if described.floats > self.most_floats:
            return run.refuse(
                member.peer,
                "too large",
                f"Your model has {described.floats:,} trained numbers, and this host has memory for the mean of"
                f" {self.most_floats:,}. Start the host on a machine with more memory.",
            )
        effects: list[Effect] = []
        if run.description is None:
            run.description = described
            effects += [Describe(described), *self.plain_peers.on_described()]
        elif (difference := run.description.difference(described)) is not None:
            return run.refuse(member.peer, "wrong model", difference)
        elif (completed := run.description.completed(described)) != run.description:
            run.description = completed
            effects.append(Describe(completed, is_new=False))
        if run.membership.holders and (difference := self._differing_length(described)) is not None:
            return run.refuse(member.peer, "other length", difference)
        # One that says it twice is placed once: else, as the first who is in, it would be sent its own weights.
        self.forget(member.peer)
        if not run.membership.holders:  # a run that is resumed may be longer than it was; a newcomer changes nothing
            run.rows_limit = described.rows_limit
        return effects + self._place(member, replace(ready, description=""))  # it may wait, and be long

    def _differing_length(self, described: Description) -> str | None:
        """A worker that ended sooner would end the run for all; one that ended later would wait for work forever."""
        mine, theirs, rows = self.run.rows_limit, described.rows_limit, described.rows
        if not mine or not theirs or abs(mine - theirs) < rows:
            return None
        return f"This run ends after {mine / rows:g} epochs, and yours would after {theirs / rows:g}. Ask for as many."

    def forget(self, peer: int) -> None:
        self.waiting = [(other, ready) for other, ready in self.waiting if other != peer]

    # With which weights

    def _place(self, member: WorkerRecord, ready: Ready) -> list[Effect]:
        """Whether a worker that has built its model may continue with its own weights, or where it gets the run's."""
        run, step = self.run, self.run.standing.version
        holds = bool(ready.holds) and self.digests.is_believed(ready)
        if not run.membership.holders:
            return self._place_first(member, ready, holds)
        if holds and run.ahead is not None and ready.step == run.ahead.version and self._is_repeatable:
            return self._admit(member, ready, since=ready.step + 1)
        known = self.digests.told.get(ready.step, {})
        same = any(ready.digest == told.digest for told in known.values()) or self.digests.is_agreed(ready)
        if ready.holds == STEPPED and self.rounds.is_together:
            return self.transfers.catch_up(member)  # its optimizer would make other weights of the step's average
        if ready.step == step and (same or (holds and not known and self._is_repeatable)):
            return self._admit(member, ready, since=step + 1)
        return self.transfers.catch_up(member)

    def _place_first(self, member: WorkerRecord, ready: Ready, holds: bool) -> list[Effect]:
        """Where nobody else holds the weights."""
        run, skipped = self.run, list[Effect]()
        if holds and run.previous is not None and ready.step == run.previous.version and not self._may_have_the_last():
            # The step after it is on record, but nobody came back who had applied it: it is computed again.
            if not self._is_repeatable:
                self.digests.forget(run.standing.version)
                skipped = self.transfers.part_with_receivers()
            run.ahead, run.standing, run.previous, run.skipped = run.standing, run.previous, None, 0
            skipped += self.plain_peers.skip(run.ahead.version)
        step = run.standing.version
        is_origin = not ready.holds and step == 0
        if is_origin or (holds and ready.step == step and self._is_as_kept(ready)):
            return [*skipped, *self._admit(member, ready, since=step + 1)]
        if ready.holds and not step:
            return run.refuse(
                member.peer,
                "forgotten weights",
                "Nobody has this run's weights any more, so that it begins anew, and yours are of step"
                f" {ready.step}. Start this worker again.",
            )
        self.waiting.append((member.peer, ready))
        if self.alone_since is None:
            self.alone_since = run.clock
        effects: list[Effect] = []
        if ready.holds and not holds:
            effects.append(drift_event(member, self.run.step_at(ready.step), "are not those that were agreed on"))
        return effects + (self.on_tick() if not self.run.expected else [self._tell_nobody_holds(member)])

    def _may_have_the_last(self) -> bool:
        """Whether the last step may come from a checkpoint, or from somebody who has yet to come back: where it would
        have other bits, workers that have ended with it would have other weights than the rest."""
        if self._is_repeatable:
            return False
        if self.saving.is_last_kept or self.saving.is_last_coming:
            return True
        came = 1 + sum(bool(theirs.holds) for _, theirs in self.waiting)
        return self._is_anybody_expected(besides=came)

    def _is_as_kept(self, ready: Ready) -> bool:
        """Whether weights of the last step may be taken for those of its checkpoint, if there is one: a run that has
        begun anew comes to the same number with other bits, and what was agreed on is forgotten where it goes back."""
        is_any = self.saving.is_last_kept or self.saving.is_last_coming
        return self._is_repeatable or not is_any or self.digests.is_agreed(ready)

    @property
    def _is_repeatable(self) -> bool:
        """Whether a step that is computed again comes to the same bits. A window depends on who computes what in it,
        and so does a step with plain peers, whose sums are in no tree."""
        return self.run.described.windowed is None and not self.plain_peers.are_welcome

    def _is_anybody_expected(self, besides: int = 0) -> bool:
        """Whether somebody may yet hold the last step: of those who were in, or a newcomer that has all of a state."""
        may_come = self.run.expected > besides or self.transfers.is_any_whole
        return may_come and self._waited_s < self.run.patience_s

    @property
    def _waited_s(self) -> float:
        return self.run.clock - self.alone_since if self.alone_since is not None else 0.0

    def _tell_nobody_holds(self, member: WorkerRecord) -> Emit:
        """Else a newcomer would see a host that stands still and says nothing."""
        doing = (
            f"{member.name} has joined and needs them; if nobody comes back within {self.run.patience_s:.0f} s, the"
            " run continues from its newest checkpoint"
        )
        name = f"a worker that has the weights of step {self.run.steps_done}"
        return Emit(Stalled(worker=member.worker_id, name=name, doing=doing, seconds=0.0))

    def _admit(self, member: WorkerRecord, ready: Ready, since: int) -> list[Effect]:
        member.applied, member.since, member.held = ready.step, since, ready.step
        if ready.holds == STEPPED:
            self.rounds.part()
        return [
            *self.digests.admit(member, ready),
            Send(member.peer, Admitted(ready.step, 0, self.run.standing.to_wire(self.run.count_others(member)))),
            Subscribe(member.peer, since),
            *self.take_in(member),
        ]

    def take_in(self, member: WorkerRecord) -> list[Effect]:
        """It holds the run's weights, and takes part."""
        self.run.membership.admit(member)
        self.alone_since = None
        effects: list[Effect] = [self.run.came(member)]
        effects += self.rounds.start() + self.saving.ask()
        for other, theirs in self._take_waiting():
            effects += self._place(other, theirs)
        for other in self.transfers.stranded:
            effects += self.transfers.catch_up(other)
        return effects

    def _take_waiting(self) -> Iterator[tuple[WorkerRecord, Ready]]:
        waiting, self.waiting = self.waiting, []
        for peer, ready in waiting:
            if (member := self.run.membership.members.get(peer)) is not None:
                yield member, ready

    # While nobody has them

    def on_nobody_holds(self, *, may_come_back: bool) -> list[Effect]:
        self.alone_since = self.run.clock
        effects = self.rounds.abandon()
        self.run.skip_ahead()  # those who come back may have applied what was being computed again
        self.run.expected = int(may_come_back)
        return effects

    def has_waited_in_vain(self) -> bool:
        """Whether those who were in when this host, or their connection, was lost have not come back."""
        if not self.run.expected:
            return False
        if self.alone_since is None:
            self.alone_since = self.run.clock
        return self._waited_s > self.run.patience_s

    def on_tick(self) -> list[Effect]:
        run = self.run
        is_anybody_waiting = bool(self.waiting or self.transfers.stranded) and not run.finished
        if not is_anybody_waiting or run.membership.holders or self.is_restoring:
            return []
        if self._is_anybody_expected() and not self.saving.is_last_kept:
            return []
        if self.saving.is_writing:  # the disk says soon what is there to go back to
            return []
        return self._continue_without_them()

    def _continue_without_them(self) -> list[Effect]:
        """Nobody came who is known to have the last step: from a checkpoint, from the step before if somebody has that,
        or from one whose kind nobody knows, and so whose weights nobody can check."""
        run = self.run
        self.run.expected = 0
        waiting = [(run.membership.members[peer], ready) for peer, ready in self.waiting if ready.holds]
        if self.saving.is_last_kept:
            return self.restore()
        for member, ready in waiting:
            if run.previous is not None and ready.step == run.previous.version and self.digests.is_believed(ready):
                self.forget(member.peer)
                return self._place(member, ready)
        for member, ready in waiting:
            if ready.step == run.standing.version and self.digests.is_of_unknown_kind(member, ready):
                self.forget(member.peer)
                return self._admit(member, ready, since=ready.step + 1)
        return self.restore()

    def restore(self) -> list[Effect]:
        self.is_restoring = True
        return [Restore()]

    def on_restored(self, *, had: bool) -> list[Effect]:
        """`had`: there was a checkpoint; else the run begins anew."""
        effects: list[Effect] = []
        for member in self.transfers.stranded:
            if had:
                effects += self.transfers.send_checkpoint(member)
            else:  # it comes again, with the weights that it made itself
                effects += self.run.close(member.peer, "the run begins anew")
        for newcomer, ready in self._take_waiting():
            if had and not self.run.membership.holders:
                effects += self.transfers.send_checkpoint(newcomer)
            else:
                effects += self._place(newcomer, ready)
        return effects

    # After each step

    def on_applied(self, member: WorkerRecord, applied: Applied) -> list[Effect]:
        effects = self._on_applied(member, applied)
        self.digests.forget_old()
        return effects

    def _on_applied(self, member: WorkerRecord, applied: Applied) -> list[Effect]:
        run, digests = self.run, self.digests
        if applied.step > run.latest:
            run.refused["applied too early"] += 1
            return []
        if self.transfers.awaits_weights(member):
            return []  # said before it read that it will be given other weights
        reports = digests.told.setdefault(applied.step, {})
        first = reports.get(member.worker_id)
        if first is not None and first.digest != applied.digest:
            return self._on_change(member, applied)
        member.applied = max(member.applied, applied.step)
        effects = self.rounds.on_applied(member, applied, is_first=first is None)
        reports[member.worker_id] = ReportedDigest(member.kind, applied.digest, applied.step >= member.since)
        if applied.step > run.standing.version:  # as it was agreed on before: it computes nothing of the step under way
            member.since = applied.step + 1
            effects += self.rounds.take_away(member)
        effects += self._judge(applied.step, digests.compared_as(member.kind))
        if member.phase is not WorkerPhase.CATCHING_UP or applied.step < run.standing.version:
            return effects + self.rounds.start()  # where all who are left had been relieved
        if self.is_restoring or member.worker_id not in digests.told.get(applied.step, {}):
            return effects  # it has been found wrong
        self.transfers.end_of(member)
        member.since = min(member.since, applied.step + 1)
        return effects + self.take_in(member)

    # Who is right

    def _judge(self, step: int, kind: str, *, at_once: bool = False) -> list[Effect]:
        """Judge a step: what most of those who came to the same bits so far tell of it is right. Where it is a draw,
        those who have yet to tell decide it; if they are not to be waited for, or none are left, nobody can."""
        digests = self.digests
        found = {who: told for who, told in digests.told[step].items() if digests.compared_as(told.kind) == kind}
        voices = {who: told for who, told in found.items() if told.computed} or found
        counts = Counter(told.digest for told in voices.values()).most_common()
        if len(counts) > 1:
            # Where all only subtract, they do so alike, and there is nothing to set apart.
            if not self.run.described.subtracts_only and digests.set_apart(voices.values()):
                kinds = {digests.compared_as(told.kind) for told in found.values()}
                return [effect for each in sorted(kinds) for effect in self._judge(step, each, at_once=at_once)]
            if counts[0][1] == counts[1][1]:
                missing = [m for m in self.run.membership.holders if m.applied < step and m.since <= step]
                if not at_once and any(digests.compared_as(m.kind) == kind for m in missing):
                    return []
                return self._on_draw(step, kind, found)
        elif step and len({told.kind for told in voices.values() if told.computed}) > 1:
            digests.alike |= {told.kind for told in voices.values()}
        return digests.agree(step, kind, counts[0][0]) + self._mark_wrong(step, found, counts[0][0])

    def _mark_wrong(
        self, step: int, found: dict[int, ReportedDigest], right: str, what: str = "are not the others'"
    ) -> list[Effect]:
        effects: list[Effect] = []
        wrong = {who for who, told in found.items() if told.digest != right}
        for other in [m for m in self.run.membership.members.values() if m.worker_id in wrong]:
            if other.applied <= step and not self.transfers.awaits_weights(other):
                effects += self._on_drift(other, step, what)
        return effects

    def _on_draw(self, step: int, kind: str, found: dict[int, ReportedDigest]) -> list[Effect]:
        """Both had the same weights before, so only computing the steps since the checkpoint again can tell."""
        right = found[min(found)].digest  # of the worker that has been in longest, where nothing better is known
        if not self._can_go_back:
            what = "are not the others' (no checkpoint can tell whose are right)"
            return self.digests.agree(step, kind, right) + self._mark_wrong(step, found, right, what)
        what = "are not the others', and nobody can tell whose are right: all go back to the last checkpoint"
        holders = self.run.membership.holders
        wrong = [m for m in holders if m.worker_id in found and found[m.worker_id].digest != right]
        self.digests.drifted = True
        return [*(drift_event(member, self.run.step_at(step), what) for member in wrong), *self._go_back()]

    def _on_change(self, member: WorkerRecord, applied: Applied) -> list[Effect]:
        """A worker's weights are no longer what it reported after the same step."""
        if applied.step != self.run.standing.version or member.reported:
            return self._on_drift(member, applied.step, "changed in its memory")
        # Between two steps its own loop may have changed them: then every worker's does. See judge_changes().
        self.digests.changed[member.worker_id] = applied.digest
        is_alone = len(self.run.membership.holders) == len(self.digests.changed)
        return [] if is_alone else self._pass_over(member)

    def judge_changes(self) -> list[Effect]:
        """Before a step is committed: it must not be computed from weights that are known to be wrong."""
        digests, step = self.digests, self.run.standing.version
        effects: list[Effect] = []
        for kind in sorted({digests.compared_as(told.kind) for told in digests.told.get(step, {}).values()}):
            effects += self._judge(step, kind, at_once=True)
        changed, digests.changed = digests.changed, {}
        holders = [m for m in self.run.membership.holders if m.applied >= step]
        for kind in sorted({digests.compared_as(m.kind) for m in holders if m.worker_id in changed}):
            alike = [m for m in holders if digests.compared_as(m.kind) == kind]
            counts = Counter(changed.get(m.worker_id) for m in alike)
            right = None if None in counts else counts.most_common(1)[0][0]
            if right is not None:  # by the loop itself, on every worker
                effects += digests.agree(step, kind, right)
            for member in alike:
                if changed.get(member.worker_id) != right:
                    effects += self._on_drift(member, step, "changed in its memory")
                elif right is not None:
                    digests.told[step][member.worker_id] = ReportedDigest(member.kind, right, computed=False)
        return effects

    # How the others get the right ones

    def _on_drift(self, member: WorkerRecord, step: int, what: str) -> list[Effect]:
        """Its weights are wrong: it gets those of the others, or all get those of the checkpoint."""
        run = self.run
        run.refused["drifted"] += 1
        self.digests.drifted = True
        self.digests.forget_worker(member)
        others, told = (
            [m for m in run.membership.holders if m is not member and m.applied >= step - 1],
            run.step_at(step),
        )
        if not others and not self._can_go_back:
            return [drift_event(member, told, f"{what}; there is neither a worker nor a checkpoint to mend it")]
        if not others:
            return [drift_event(member, told, f"{what}; the run goes back to its checkpoint"), *self._go_back()]
        effects: list[Effect] = [drift_event(member, told, f"{what}, and are sent to it anew")]
        run.membership.set_back(member)
        if self.rounds.has_sent(member):
            member.nodes = []
            effects += self.rounds.begin_anew()
        else:
            effects += self.rounds.take_away(member)
        return effects + self._pass_over(member) + self.transfers.catch_up(member)

    def _pass_over(self, member: WorkerRecord) -> list[Effect]:
        """Takes from others what this worker was to compute or send with its weights."""
        return [
            *self.evaluations.give_back(member),
            *self.transfers.pass_over(member.peer),
            *self.saving.pass_over(member.peer),
        ]

    @property
    def _can_go_back(self) -> bool:
        return bool(self.saving.saved.folder) and not any(m.plain for m in self.run.membership.members.values())

    def _go_back(self) -> list[Effect]:
        """Nobody is known to have the right weights: all get those of the newest checkpoint."""
        effects = self.transfers.end_all() + self.saving.abort()
        for member in self.run.membership.holders:
            member.nodes = []
            self.run.membership.set_back(member)
        self.digests.changed.clear()
        effects += self.on_nobody_holds(may_come_back=False)
        return effects + self.restore()
