"""One step after another: handed out in slices, reported, summed, committed. Pure.

A step whose gradients are lost, late or bad is mended within itself: somebody else computes the same slices. Whether
the weights that it leads to are right is not decided here.
"""

import json
import math
from dataclasses import replace
from typing import Any

from potluck.agree.loss_scale import most_falls
from potluck.agree.records import Report
from potluck.agree.terms import UNCOMPARED
from potluck.events import EpochDone, Noticed
from potluck.fleet.bounds import figures_of
from potluck.fleet.coordinator_state import CoordinatorState, exact_sum, stalled
from potluck.fleet.description import BAD_BUFFERS
from potluck.fleet.digests import Digests
from potluck.fleet.effects import (
    AbandonStep,
    BeginStep,
    Discard,
    Effect,
    Emit,
    Expect,
    Finish,
    Narrow,
    Record,
    Send,
    SetScale,
    StepApplied,
    StepRecord,
    Widen,
)
from potluck.fleet.ledger import prove
from potluck.fleet.membership import WorkerRecord, slices_of
from potluck.fleet.planning import StepPlanner, StepUnderWay
from potluck.fleet.tree import Node, cover, decide_quotas, tell_slices
from potluck.wire.messages import DIVERGED, Applied, Committed, Refusal, ShardAssignment, Shutdown, SliceReport
from potluck.words import plural

LEAST_SAMPLES, MOST_SAMPLES, MOST_LOSS = 1e-6, 1e15, 1e300
"""Bounds of what a slice may report: beyond these, sums of them would overflow or vanish."""

MOST_NAMED = 8
"""Workers that are named for one thing."""


class StepDispatcher:
    def __init__(self, run: CoordinatorState, digests: Digests) -> None:
        self._run = run
        self._digests = digests
        self._planner = StepPlanner(run)
        self.now: StepUnderWay | None = None
        self._records: dict[int, StepRecord] = {}
        """Steps that are committed, and not yet reported as applied."""
        self._has_begun = False
        """Whether a step was committed here. The run may go back to its start after that."""
        self._told_of = 0
        """How many workers were there when it was last told that the first step waits for more."""
        self._lossless: set[int] = set()
        """The ids of plain peers of whom it was told that they report no loss."""

    # Handing out

    def start(self) -> list[Effect]:
        run, standing = self._run, self._run.standing
        ready = run.membership.ready
        is_over = run.finished or run.is_complete
        if self.now is not None or is_over or run.paused or run.description is None or not ready:
            return []
        if run.stopping if standing.version else len(ready) < run.at_least:
            return self._tell_waiting()
        working = self._working(standing.version + 1)
        if not any(not m.plain for m in working):
            return self._start_ahead()
        self.now = under = self._planner.plan(working)
        for member in ready:
            member.nodes = []
            member.reported.clear()
        several = any(len(nodes) > 1 for nodes in under.nodes)
        # A plain peer sends its parts in another order than ours, so that all of them must be able to wait.
        count = 1 if any(m.plain for m in working) else sum(map(len, under.nodes))
        effects: list[Effect] = [BeginStep(under.step, under.slices, count, several, under.batch > 0)]
        if under.decision is not None:
            effects.append(Emit(self._planner.decider.decided(under.decision)))
        return effects + self._give_all(under, working)

    def _tell_waiting(self) -> list[Effect]:
        """A run that went back to its start waits for as many as at first: else it would stand still without a word."""
        run, ready = self._run, len(self._run.membership.ready)
        if not self._has_begun or self._told_of == ready or run.stopping:
            return []
        self._told_of, missing = ready, run.at_least - ready
        told = (
            f"The run is back at its start, and its first step waits for {plural(run.at_least, 'worker')}, as"
            f" --at-least says: {ready} {'is' if ready == 1 else 'are'} here, and {missing} more"
            f" {'has' if missing == 1 else 'have'} to join."
        )
        return [Emit(Noticed(sentence=told))]

    def _start_ahead(self) -> list[Effect]:
        """All who stay have applied the step that was to be computed again: they continue. Others would be left behind,
        for nobody sends its average."""
        run, staying = self._run, [m for m in self._run.membership.holders if not m.leaving]
        if run.ahead is None or not staying or any(m.since <= run.ahead.version for m in staying):
            return []
        run.skip_ahead()
        return self.start()

    @property
    def is_together(self) -> bool:
        """Whether all take the step under way together, where others are windows."""
        return self.now is not None and self.now.decision is not None and self.now.decision.together

    def part(self) -> None:
        """A worker takes part whose optimizer has stepped by itself: the next step is a window, if they matter."""
        self._planner.decider.know_alike(-1)

    def _working(self, step: int) -> list[WorkerRecord]:
        """List the workers that can be given something of that step."""
        able = [m for m in self._run.membership.ready if not m.leaving and m.since <= step and not m.is_relieved]
        return [m for m in able if not (m.plain and m.assigned >= step)]  # the step is begun anew

    def _give_all(self, under: StepUnderWay, working: list[WorkerRecord]) -> list[Effect]:
        effects: list[Effect] = []
        for member, nodes in zip(working, under.nodes, strict=True):
            effects += self._give(under, member, nodes)
            if member.plain and not nodes:
                effects += self.give_nothing(member)
        return effects

    def give_nothing(self, member: WorkerRecord) -> list[Effect]:
        """The published worker takes an average only after an assignment: where there are no rows for it, an empty
        one, whose answer nobody expects."""
        if self.now is None:
            return []
        member.assigned = self.now.step
        return [Send(member.peer, ShardAssignment(self.now.step, self.now.row, self.now.row))]

    def _give(self, under: StepUnderWay, member: WorkerRecord, nodes: list[Node]) -> list[Effect]:
        if not nodes:
            return []
        if under.batch and len(nodes) > 1:  # each is a replica of its own
            return [effect for node in nodes for effect in self._give(under, member, [node])]
        if member.relieved == under.step:  # there is nobody else: what it reports counts again
            member.relieved = 0
        member.nodes = member.nodes + nodes
        member.working_since = self._run.clock
        if member.plain:
            return self._give_plain(under, member, nodes)
        return [Expect(member.peer, under.step, tuple(nodes)), Send(member.peer, under.work(nodes))]

    def _give_plain(self, under: StepUnderWay, member: WorkerRecord, nodes: list[Node]) -> list[Effect]:
        """It will not say how many samples its rows have: that is taken for granted."""
        described = self._run.described
        effects: list[Effect] = []
        member.assigned = under.step
        for node in nodes:
            start, end = under.rows_of(node)
            weight = (end - start) * described.samples_per_row * described.unit
            for number in range(*node):
                rows = under.bounds[number][1] - under.bounds[number][0]
                samples = rows * described.samples_per_row
                under.reports[number] = Report(samples=samples, loss_sum=math.nan, worker=member.worker_id)
            effects.append(Expect(member.peer, under.step, (node,), weight))
            effects.append(Send(member.peer, ShardAssignment(under.step, start, end)))
        return effects + self._scale()

    def _able(self, under: StepUnderWay) -> list[WorkerRecord]:
        return [m for m in self._run.membership.holders if m.since <= under.step and not m.leaving]

    def hand_out(self, nodes: list[Node], avoid: int | None = None) -> list[Effect]:
        """Nodes that have lost their worker, to the others, within the same step."""
        under, holders = self.now, self._run.membership.holders
        assert under is not None
        able = self._able(under)
        able = [m for m in able if not m.is_relieved] or able
        able = [m for m in able if m.peer != avoid] or able
        if not able and self._run.ahead is not None and any(m.since > under.step for m in holders):
            self._run.skip_ahead()  # they have applied what was being computed again
            return self.begin_anew()
        if not able:  # all leave who could: a newcomer gets the weights as they are
            return self.abandon()
        slices = slices_of(nodes)
        quotas = decide_quotas(len(nodes) if under.batch else len(slices), [m.speed for m in able], None)
        effects: list[Effect] = [Widen(under.step)]
        given = 0
        for member, quota in zip(able, quotas, strict=True):
            mine = set(slices[given : given + quota])
            given += quota
            if under.batch:
                effects += self._give(under, member, nodes[given - quota : given])
                continue
            # Within each lost node: what was already added of it must not be added again as part of a larger one.
            parts = [
                piece
                for node in nodes
                if (inside := sorted(mine & set(range(*node))))
                for piece in cover(under.slices, inside[0], inside[-1] + 1)
            ]
            effects += self._give(under, member, parts)
        return effects

    # Taking it away

    def on_gone(self, member: WorkerRecord) -> list[Effect]:
        if self.now is None or not member.nodes:
            return self.abandon_if_deserted()
        if member.plain:  # what its rows weigh was only assumed: the worker that computes them now knows better
            self.now.granted.update(slices_of(member.nodes))
        return self.hand_out(member.nodes)

    def take_away(self, member: WorkerRecord, avoid: int | None = None) -> list[Effect]:
        """Hands to others what this worker was given and has not fully sent."""
        nodes, member.nodes = member.nodes, []
        if self.now is None or not nodes:
            return []
        return [*(Discard(member.peer, node) for node in nodes), *self.hand_out(nodes, avoid)]

    def has_sent(self, member: WorkerRecord) -> bool:
        """Something of it may be in the sums of the step under way."""
        return bool(member.reported) or (self.now is not None and member.worker_id in self.now.computed_by.values())

    def abandon(self) -> list[Effect]:
        for member in self._run.membership.members.values():
            member.nodes = []  # else the silence of a plain peer would count, also where no other step follows
        now, self.now = self.now, None
        return [AbandonStep()] if now is not None else []

    def abandon_if_deserted(self) -> list[Effect]:
        """Where all leave who could keep the step's weights: a newcomer gets them as they are. Plain peers cannot."""
        holders = self._run.membership.holders
        is_deserted = self.now is not None and holders and all(m.leaving for m in holders)
        return self.abandon() if is_deserted else []

    def begin_anew(self) -> list[Effect]:
        """Starts the step under way again: what is in its sums is wrong, and cannot be taken out."""
        return [*self.abandon(), *self.start()] if self.now is not None else []

    # What comes back

    def _given(self, peer: int, step: int, node: Node) -> tuple[StepUnderWay, WorkerRecord] | None:
        """The step under way and the worker, if it was given this node of it and has not wholly sent it."""
        member = self._run.membership.members.get(peer)
        if member is None or self.now is None or self.now.step != step or node not in member.nodes:
            return None
        return self.now, member

    def on_report(self, member: WorkerRecord, report: SliceReport) -> list[Effect]:
        run, under = self._run, self.now
        if report.step == member.relieved:  # of no use any more, but for what it tells of its speed
            member.measure(member.relieved_amount, report.busy_s)
            return []
        if under is None or report.step != under.step:
            run.refused["stale report"] += 1
            return []
        mine = {*slices_of(member.nodes)}
        told = [int(number) for number in report.slices]
        cut = under.find_cut(member.nodes, told, report.stopped) if report.stopped else None
        is_foreign = not mine.issuperset(told) or (report.stopped > 0 and mine and cut is None)
        if not (len(told) == len(report.samples) == len(report.loss_sums)) or is_foreign:
            run.refused["foreign report"] += 1
            return []
        if not mine:  # it was taken from it meanwhile
            return []
        if report.overflowed:
            member.overflowed.add(under.step)
            if len(member.overflowed) > most_falls(run.described.steps_of(run.standing)):
                return self._turn_out(member)
            under.overflowed += [member.name] if member.name not in under.overflowed else []
        effects = self._cut(under, member, cut, report.stopped) if cut is not None else []
        bad = self._note_slices(under, member, report)
        under.note_used(bytes(report.used))
        if 0 in mine and not under.buffers:
            under.buffers = bytes(report.buffers)
        if told:
            under.first_report = under.first_report if under.first_report is not None else run.clock
            under.last_report = run.clock
        own = under.report_of(member.worker_id)
        own = own._replace(busy_s=own.busy_s + report.busy_s)
        if not under.batch:
            member.measure(under.amount(mine & member.reported), report.busy_s)
        elif 0 < report.busy_s < math.inf:
            member.measure(under.amount(told), report.busy_s)
            batches, skipped = own.batches + report.batches, own.skipped + report.skipped
            own = own._replace(batches=batches, skipped=skipped, figures=figures_of(report))
        under.by_worker[member.worker_id] = own
        for node in bad:
            effects += self.on_bad(member.peer, under.step, node, "has a loss that is not finite")
        return effects + self._scale()

    def _turn_out(self, member: WorkerRecord) -> list[Effect]:
        """A worker that is sound says no more that it overflows once the loss scale can fall no further. What it has
        sent of the step is of no use."""
        member.nodes = []
        sentence = (
            f"{member.name} reported {len(member.overflowed)} times that its gradient overflows in fp16, which is more"
            " often than the loss scale can fall. It is broken, or does not tell what it computed."
        )
        return [*self._run.refuse(member.peer, "overflows", sentence), *self.begin_anew()]

    def _cut(self, under: StepUnderWay, member: WorkerRecord, node: Node, row: int) -> list[Effect]:
        """It leaves in the middle of a window. Another does the rest; the window ends if nobody can and none follow."""
        others = [m for m in self._able(under) if m is not member]
        if not under.reports.keys().isdisjoint(range(*node)):
            # A worker that was lost has reported the whole: some parts of its change may be in the sums, and the others
            # must be of as many rows.
            member.nodes.remove(node)
            return [Discard(member.peer, node), *self.hand_out([node], avoid=member.peer)]
        if not others and node[1] == under.slices:
            under.cut(node, row, ended_by=member.worker_id)
            member.reported.add(node[1] - 1)  # of which nothing is left
            return []
        done, rest = under.cut(node, row)
        member.nodes = [done if each == node else each for each in member.nodes]
        return [Narrow(member.peer, under.step, node, done), *self.hand_out([rest], avoid=member.peer)]

    def _note_slices(self, under: StepUnderWay, member: WorkerRecord, report: SliceReport) -> list[Node]:
        """Its nodes in which a slice has a loss or samples that nothing can be done with."""
        bad: list[Node] = []
        for number, samples, loss_sum in zip(map(int, report.slices), report.samples, report.loss_sums, strict=True):
            member.reported.add(number)
            is_told = abs(loss_sum) < MOST_LOSS or (under.batch > 0 and math.isnan(loss_sum))  # none of its steps had
            if not (is_told and (samples == 0 or LEAST_SAMPLES < samples < MOST_SAMPLES)):
                bad += [node for node in member.nodes if node[0] <= number < node[1] and node not in bad]
            elif number not in under.reports or number in under.granted:
                under.granted.discard(number)
                who = float(member.worker_id)
                under.reports[number] = Report(samples=float(samples), loss_sum=float(loss_sum), worker=who)
        return bad

    def on_plain_loss(self, peer: int, step: int, node: Node, loss: float) -> list[Effect]:
        """A plain peer's loss stands behind its gradients. It is told before the last of them reach the sums: these
        may complete the step."""
        if (given := self._given(peer, step, node)) is None:
            return []
        for number in range(*node):
            told = given[0].reports[number]
            given[0].reports[number] = told._replace(loss_sum=loss * told.samples)
        return self._scale()

    def on_payload(self, peer: int, step: int, node: Node) -> list[Effect]:
        """All parts of a node are in the sums."""
        if (given := self._given(peer, step, node)) is None:
            return []
        under, member = given
        member.heard_at = self._run.clock
        member.nodes.remove(node)
        for number in range(*node):
            under.computed_by.setdefault(number, member.worker_id)
        return []

    def on_bad(self, peer: int, step: int, node: Node, why: str) -> list[Effect]:
        """A payload that must not reach the others. Its slices are computed again, one by one, by somebody else."""
        if (given := self._given(peer, step, node)) is None:
            return []
        under, member = given
        self._run.refused["bad payload"] += 1
        member.nodes.remove(node)
        again = [number for number in range(*node) if number in under.bad]
        if again:
            return self._give_up(under, member, again[0], why)
        for number in range(*node):
            # What it told of the slice stays: parts that came before the bad one may be in the sums, and be scaled.
            under.bad[number] = member.name
        which = f"slices {tell_slices(node)} of step {self._run.step_at(step):,}"
        return [
            Discard(peer, node),
            stalled(member, f"its gradient of {which} {why}; they are computed again"),
            *self.hand_out([node] if under.batch else [(n, n + 1) for n in range(*node)], avoid=peer),
        ]

    def _give_up(self, under: StepUnderWay, member: WorkerRecord, number: int, why: str) -> list[Effect]:
        run = self._run
        start, end = under.bounds[number]
        first = under.bad[number]
        who = f"on {first} and again on {member.name}" if first != member.name else f"twice on {member.name}"
        advice = "Look at those samples, or try a lower learning rate or step.clip"
        if why == BAD_BUFFERS:
            advice = "Look at what the model's forward writes into its buffers, or register them with persistent=False"
        run.finished = (
            f"The gradient of slice {number} of step {run.step_at(under.step):,} {why}, {who}. It is positions {start}"
            f" to {end - 1} of epoch {run.standing.epoch + 1}'s order. {advice}; the weights are those of the step"
            " before"
        )
        refusal = Refusal(DIVERGED, run.finished + ".")
        members = run.membership.members.values()
        told = [Send(member.peer, Shutdown() if member.plain else refusal) for member in members]
        return [*told, *self.abandon(), Finish(run.finished + ".", failed=True)]

    def _scale(self) -> list[Effect]:
        under = self.now
        if under is None or not under.is_reported:
            return []
        slices = [under.reports[number] for number in range(under.slices)]
        under.samples = math.fsum(found.samples for found in slices)
        # A plain peer that sends blocks never tells its loss.
        told = [found for found in slices if not math.isnan(found.loss_sum)]
        weight = math.fsum(found.samples for found in told)
        under.loss = exact_sum(found.loss_sum for found in told) / weight if weight else math.nan
        weighed = under.samples * self._run.described.unit
        scale = 1 / weighed if weighed else 0.0
        return [SetScale(under.step, scale, under.loss)]

    # Committing

    def commit(self) -> list[Effect]:
        """Every part's average is formed, and on its way."""
        run, under, standing = self._run, self.now, self._run.standing
        assert under is not None
        record = self._make_record(under)
        if under.decision is not None:
            self._planner.measure(under)
        run.ahead = None
        ranges = standing.ranges + tuple((start, end) for start, end, _ in record.ranges)
        run.previous, run.standing = standing, replace(standing.after(record.rows, run.described.terms), ranges=ranges)
        self._records[under.step] = record
        self._digests.forget_old()
        epoch = self._end_epoch() if run.standing.row >= run.described.rows else None
        if under.decision is not None:
            run.steps[run.standing.version] = run.steps_done
        run.leaders[under.step] = run.name_speaker()
        run.leaders.pop(under.step - 3, None)
        effects: list[Effect] = [Record(record), *self._tell_committed(under, record, epoch)]
        effects += self._tell_lossless(under)
        if epoch is not None:
            effects.append(Emit(epoch))
        if run.stopping:
            effects += [Send(m.peer, Shutdown()) for m in run.membership.members.values() if m.plain]
        self.now = None
        return effects + self.start()

    def _make_record(self, under: StepUnderWay) -> StepRecord:
        run, standing = self._run, self._run.standing
        for member in run.membership.members.values():
            for number in slices_of(member.nodes):
                under.computed_by.setdefault(number, member.worker_id)
            member.nodes = []  # all is in the sums: it owes nothing, also where no other step follows
        by = {number: under.computed_by.get(number, int(under.reports[number].worker)) for number in under.reports}
        bounds = [(under.bounds[number], by[number]) for number in sorted(by)]
        ranges = tuple((*rows, who) for rows, who in bounds if rows[0] < rows[1])
        workers = tuple(
            {
                "rank": m.worker_id,
                "name": m.name,
                "rows": sum(end - start for start, end, who in ranges if who == m.worker_id),
                "samples": sum(under.reports[n].samples for n in by if by[n] == m.worker_id),
                "busy_s": round(under.report_of(m.worker_id).busy_s, 6),
                "wait_s": round(max(0.0, run.clock - under.started - under.report_of(m.worker_id).busy_s), 6),
            }
            for m in run.membership.ready
        )
        # Rows count with the last turn of their batch. In a window each worker takes all turns by itself.
        is_last = bool(under.batch) or standing.turn == run.described.turns - 1
        rows = under.rows if is_last else 0
        figures = under.samples, under.loss, workers, ranges if is_last else ()
        return StepRecord(under.step, standing.epoch, under.row, rows, standing.rows_seen + rows, *figures)

    def _tell_committed(self, under: StepUnderWay, record: StepRecord, epoch: EpochDone | None) -> list[Effect]:
        run = self._run
        seconds = run.clock - under.started
        told: dict[str, Any] = {"workers": record.workers, "epoch": epoch and dict(vars(epoch)), "seconds": seconds}
        if self.is_together:  # who was given nothing of it has not heard so
            told["together"] = True
        told |= {"overflowed": under.overflowed[:MOST_NAMED]} if under.overflowed else {}
        if skipped := sum(int(under.report_of(who).skipped) for who in {who for *_, who in record.ranges}):
            told["skipped"] = skipped  # by those whose changes are in the mean
        those = [m for m in run.membership.inside if not m.plain and m.since <= under.step]
        others = {m.worker_id for m in (*run.membership.ready, *those)} - {run.leaders[under.step]}
        told["ranks"] = [run.leaders[under.step], *sorted(others)]  # at the place of its rank, each worker's id
        committed = Committed(
            under.step,
            record.rows,
            under.samples,
            under.loss,
            bytes(under.used),
            run.leaders[under.step],
            int(run.stopping),
            json.dumps(told),
            under.buffers,
        )
        return [Send(member.peer, committed) for member in those]

    def _tell_lossless(self, under: StepUnderWay) -> list[Effect]:
        """A plain peer that sends parts reports no loss: of each, tell once what the losses shown are of."""
        self._has_begun, self._told_of = True, 0
        lossless = {int(found.worker) for found in under.reports.values() if math.isnan(found.loss_sum)}
        new = [m for m in self._run.membership.ready if m.plain and m.worker_id in lossless - self._lossless]
        self._lossless |= {member.worker_id for member in new}
        told = "sends its gradient in parts, which report no loss: the losses shown are of the other workers' rows."
        return [Emit(Noticed(sentence=f"{member.name} {told}")) for member in new]

    def _end_epoch(self) -> EpochDone:
        described, standing = self._run.described, self._run.standing
        proof = prove(standing.ranges, described.rows, described.places)
        unseen = "" if described.data else UNCOMPARED
        compared, left_out = self._digests.tell_compared()
        done = EpochDone(
            epoch=standing.epoch,
            used=proof.used if proof.holds else -1,
            total=proof.total,
            same_weights=not self._digests.drifted,
            not_compared=left_out,
            sentence="; ".join([f"Epoch {standing.epoch + 1}: {proof}{unseen}", *compared]) + ".",
        )
        self._run.standing = standing.next_epoch()
        self._digests.drifted = False
        return done

    def on_applied(self, member: WorkerRecord, applied: Applied, *, is_first: bool) -> list[Effect]:
        """`is_first`: it has not told of this step before."""
        if is_first:
            self._planner.on_applied(member, applied)
        record = self._records.pop(applied.step, None)
        return [StepApplied(record, applied.lr, applied.norm, applied.fault)] if record is not None else []

    def on_restored(self) -> None:
        self._records.clear()
