"""Whose weights are right after a step, and how those get the right ones who have others. Pure."""

from collections import Counter
from dataclasses import dataclass

from potluck.fleet.admission import Admission
from potluck.fleet.digests import Digests, Told, tell_drift
from potluck.fleet.effects import Effect
from potluck.fleet.evaluation import Evaluations
from potluck.fleet.membership import Member, Phase
from potluck.fleet.rounds import Rounds
from potluck.fleet.run_state import RunState
from potluck.fleet.saving import Saving
from potluck.fleet.transfers import Transfers
from potluck.wire.messages import Applied


@dataclass
class Weights:
    run: RunState
    digests: Digests
    rounds: Rounds
    transfers: Transfers
    saving: Saving
    evaluations: Evaluations
    admission: Admission

    def on_applied(self, member: Member, applied: Applied) -> list[Effect]:
        effects = self._on_applied(member, applied)
        self.digests.forget_old()
        return effects

    def _on_applied(self, member: Member, applied: Applied) -> list[Effect]:
        run, digests = self.run, self.digests
        if applied.step > run.latest:
            run.refused["applied too early"] += 1
            return []
        if self.transfers.awaits_weights(member):
            return []  # said before it read that it will be given other weights
        told = digests.told.setdefault(applied.step, {})
        first = told.get(member.worker_id)
        if first is not None and first.digest != applied.digest:
            return self._on_change(member, applied)
        member.applied = max(member.applied, applied.step)
        effects = self.rounds.on_applied(member, applied, is_first=first is None)
        told[member.worker_id] = Told(member.kind, applied.digest, applied.step >= member.since)
        effects += self._judge(applied.step, digests.compared_as(member.kind))
        if member.phase is not Phase.CATCHING_UP or applied.step < run.standing.step:
            return effects + self.rounds.start()  # where all who are left had been relieved
        if self.admission.is_restoring or member.worker_id not in digests.told.get(applied.step, {}):
            return effects  # it has been found wrong
        self.transfers.end_of(member)
        member.since = min(member.since, applied.step + 1)
        return effects + self.admission.take_in(member)

    # Who is right

    def _judge(self, step: int, kind: str, *, at_once: bool = False) -> list[Effect]:
        """What most of those who came to the same bits so far tell of a step is right. Where it is a draw, those who
        have yet to tell decide it; if they are not to be waited for, or none are left, nobody can."""
        digests = self.digests
        found = {who: told for who, told in digests.told[step].items() if digests.compared_as(told.kind) == kind}
        voices = {who: told for who, told in found.items() if told.computed} or found
        counts = Counter(told.digest for told in voices.values()).most_common()
        if len(counts) > 1:
            # After a window there is nothing to set apart: all subtract alike.
            if self.run.described.windowed is None and digests.set_apart(voices.values()):
                kinds = {digests.compared_as(told.kind) for told in found.values()}
                return [effect for each in sorted(kinds) for effect in self._judge(step, each, at_once=at_once)]
            if counts[0][1] == counts[1][1]:
                missing = [m for m in self.run.membership.holders if m.applied < step and m.since <= step]
                if not at_once and any(digests.compared_as(m.kind) == kind for m in missing):
                    return []
                return self._on_draw(step, kind, found)
        elif step and len({told.kind for told in voices.values() if told.computed}) > 1:
            digests.alike |= {told.kind for told in voices.values()}
        return digests.agree(step, kind, counts[0][0]) + self._condemn(step, found, counts[0][0])

    def _condemn(
        self, step: int, found: dict[int, Told], right: str, what: str = "are not the others'"
    ) -> list[Effect]:
        effects: list[Effect] = []
        wrong = {who for who, told in found.items() if told.digest != right}
        for other in [m for m in self.run.membership.members.values() if m.worker_id in wrong]:
            if other.applied <= step and not self.transfers.awaits_weights(other):
                effects += self._on_drift(other, step, what)
        return effects

    def _on_draw(self, step: int, kind: str, found: dict[int, Told]) -> list[Effect]:
        """Both had the same weights before, so only computing the steps since the checkpoint again can tell."""
        right = found[min(found)].digest  # of whoever has been in for longest, where nothing better is known
        if not self._can_go_back:
            what = "are not the others' (no checkpoint can tell whose are right)"
            return self.digests.agree(step, kind, right) + self._condemn(step, found, right, what)
        what = "are not the others', and nobody can tell whose are right: all go back to the last checkpoint"
        holders = self.run.membership.holders
        wrong = [m for m in holders if m.worker_id in found and found[m.worker_id].digest != right]
        self.digests.drifted = True
        return [*(tell_drift(member, step, what) for member in wrong), *self._go_back()]

    def _on_change(self, member: Member, applied: Applied) -> list[Effect]:
        """Its weights are not what it told of them after the same step."""
        if applied.step != self.run.standing.step or member.reported:
            return self._on_drift(member, applied.step, "changed in its memory")
        # Between two steps its own loop may have changed them: then every worker's does. See judge_changes().
        self.digests.changed[member.worker_id] = applied.digest
        is_alone = len(self.run.membership.holders) == len(self.digests.changed)
        return [] if is_alone else self._pass_over(member)

    def judge_changes(self) -> list[Effect]:
        """Before a step is committed: it must not be computed from weights that are known to be wrong."""
        digests, step = self.digests, self.run.standing.step
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
                    digests.told[step][member.worker_id] = Told(member.kind, right, computed=False)
        return effects

    # How the others get the right ones

    def _on_drift(self, member: Member, step: int, what: str) -> list[Effect]:
        """Its weights are wrong: it gets those of the others, or all get those of the checkpoint."""
        run = self.run
        run.refused["drifted"] += 1
        self.digests.drifted = True
        self.digests.forget_worker(member)
        others = [m for m in run.membership.holders if m is not member and m.applied >= step - 1]
        if not others and not self._can_go_back:
            return [tell_drift(member, step, f"{what}; there is neither a worker nor a checkpoint to mend it")]
        if not others:
            return [tell_drift(member, step, f"{what}; the run goes back to its checkpoint"), *self._go_back()]
        effects: list[Effect] = [tell_drift(member, step, f"{what}, and are sent to it anew")]
        run.membership.set_back(member, Phase.CATCHING_UP)
        if self.rounds.has_sent(member):
            member.nodes = []
            effects += self.rounds.begin_anew()
        else:
            effects += self.rounds.take_away(member)
        return effects + self._pass_over(member) + self.transfers.catch_up(member)

    def _pass_over(self, member: Member) -> list[Effect]:
        """What it was to compute or to send with its weights comes from the others."""
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
            self.run.membership.set_back(member, Phase.CATCHING_UP)
        self.digests.changed.clear()
        effects += self.admission.on_nobody_holds(may_come_back=False)
        return effects + self.admission.restore()
