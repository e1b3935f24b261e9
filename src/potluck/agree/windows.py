"""Plans what each replica does until the next agreement, from what all of them reported of the last window. Pure.

Everybody who hears the same reports decides the same, so that ranks of a process group need nobody to lead them.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.agree.costs import WindowCosts
from potluck.agree.elche import LEAST_TARGET, MOST_TARGET
from potluck.agree.policy import Windowed, make_elche
from potluck.agree.reasons import each_part, why_shared
from potluck.agree.records import Report
from potluck.agree.shares import Balance, give_each_one, share_out
from potluck.errors import ConfigError
from potluck.words import check_at_least, percent, plural

RISING = 3
"""Windows in a row in which it rose."""


class Divergence:
    """Takes each window's largest |own - mean| / |mean| over the replicas."""

    def __init__(self, threshold: float) -> None:
        check_at_least(0, threshold=threshold)
        self.threshold = threshold
        self._last: deque[float] = deque(maxlen=RISING + 1)

    def report(self, value: float) -> bool:
        """Whether it has risen three windows running, and is above the threshold now; then it starts anew."""
        if not math.isfinite(value):
            value = math.inf
        self._last.append(value)
        found = list(self._last)
        is_rising = len(found) == RISING + 1 and all(a < b for a, b in itertools.pairwise(found))
        if is_rising and value > self.threshold:
            self._last.clear()
            self._last.append(value)
            return True
        return False


SPARE = 0.25
"""The share of its part by which a replica may exceed it, if it turns out to be faster."""
BRISK = 1.5
"""A replica at least this many times faster than the slowest continues beyond its part while others do theirs."""
NUDGE = 0.5
PROBE = 2
"""Batches of each replica in the first window, which only tells how fast they are: the fast ones wait in it."""
GROWTH = 2
"""How many times as many batches as in the window before a replica may do: a wrong speed costs one short window."""
JUMP = 1.3
"""A replica that is this many times faster or slower than before is measured anew: its old speed says nothing."""

MOST_BATCHES = 1 << 20
"""The most batches of a window, where nothing else bounds it."""
LEAST_S, MOST_S = 1e-6, 1e6
"""Bounds for the time of a batch. A clock beyond them is wrong, or lies: no number of rows would follow from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """A window to come."""

    rows: tuple[int, ...]
    """Each replica's part."""
    spare: tuple[int, ...]
    """How many rows more each may do: until the clock ends the window, or until all parts are done."""
    until_s: float | None
    """When it ends, from its start, whatever is done by then; none: when all parts are done."""
    anchor: int
    """Batches of the slowest replica; 0: all step together."""
    reason: str
    """Why it is so, as a sentence."""

    @property
    def together(self) -> bool:
        """It is one step, of the mean gradient over all rows."""
        return self.anchor == 0


def stretch_of(parts: Sequence[int], batch_rows: int, batch: int) -> float:
    """By how much replicas' steps of `batch_rows` have to be longer for the mean to move as far as Sync does, where a
    step's length is divided by its noise, and noise is most of a gradient. `parts`: each replica's rows of a window."""
    whole = sum(parts)
    steps = sum(rows * rows / batch_rows for rows in parts) / whole if whole else 0.0
    return max(1.0, whole / batch * math.sqrt(batch / batch_rows) / steps) if steps else 1.0


class WindowPlanner:
    """For each window: decide, then report. Replicas are numbered from 0."""

    def __init__(self, policy: Windowed, names: Sequence[str]) -> None:
        if not names:
            raise ConfigError("There is no replica to plan a window for.")
        self.policy = policy
        self.names = list(names)
        self.elche = make_elche(policy, len(names))
        self.costs = WindowCosts()
        self._calm = self.elche.max_anchor
        """The most batches of a window since replicas drifted apart; one more with each window in which they do not."""
        self._divergence = Divergence(policy.drift_limit or 0.0)
        self._most = PROBE
        """The most batches of a replica in the next window, where its length is weighed."""
        self._parts: list[float] = [1.0] * len(names)
        """How the rows of a step that all take together are shared; by what windows say of speeds, or `_balance`."""
        self._balance: Balance | None = None
        self._planned_rows = self._batch_rows = 1
        """Rows of a batch in the window that was planned last, and in the one that speeds were measured in."""
        self._why_not_together = ""
        """Why replicas step by themselves though it was not weighed, where the policy chooses."""
        self.news = ""
        """What has changed since the last plan, as a sentence without its end."""
        if policy.overhead_target is not None and policy.overhead_target != self.elche.overhead_target:
            self.news = (
                f"An overhead target of {policy.overhead_target:g} is outside {LEAST_TARGET:g} to {MOST_TARGET:g}, and"
                f" {self.elche.overhead_target:g} is taken"
            )

    def decide(self, rows_left: int, batch_rows: int, *, least: int = 0) -> WindowPlan:
        """`rows_left` in the epoch, or in the run; `batch_rows` go into one step of a replica.

        Fewer than `least` rows are not left for another window.
        """
        counts, whole = self._counts(), 1.0
        self._planned_rows = batch_rows
        if self.policy.weighs_learning and len(counts) > 1 and max(counts) > self._most:
            whole = self._most / max(counts)
            counts = [max(1, round(count * whole)) for count in counts]
        rows = [count * batch_rows for count in counts]
        if len(self.names) == 1:
            rows = [rows[0] if rows[0] + least <= rows_left else rows_left]
            reason = f"Only {self.names[0]} is there, so nothing is averaged: {plural(rows[0], 'row')}."
            return self._decision(rows, [0], None, reason)
        until_s = None
        if sum(rows) >= rows_left or sum(rows) + least > rows_left:
            # The rest is shared by speed and not by whole batches, so that all end together.
            weights = self.elche.speeds if self.elche.is_measured else [float(count) for count in counts]
            rows = share_out(rows_left, weights)
            shared = f"{_the_last(rows_left)}, shared by speed: {each_part(rows)}"
            reason = self._sentences(self._why_shared(rows), shared, self._why_apart())
            return self._decision(rows, [0] * len(rows), None, reason)
        spare = [0] * len(rows)
        if self.elche.is_measured:
            spare = [batch_rows * max(1, int(SPARE * count)) for count in counts]
            if self.policy.ends_by_clock:
                until_s = self.elche.anchor_wall_ms / 1000 * whole
            else:
                spare = [rows if self._is_brisk(rank) else 0 for rank, rows in enumerate(spare)]
            over = sum(rows) + sum(spare) - rows_left
            if over > 0:
                spare = share_out(max(0, sum(spare) - over), [float(part) for part in spare])
        each = f"Until the next average {'they do' if len(rows) < 3 else 'each does'} {each_part(counts)} batches"
        return self._decision(rows, spare, until_s, self._sentences(self._why_shared(rows), each, self._why_apart()))

    def _why_shared(self, rows: Sequence[int], speeds: Sequence[float] | None = None) -> str:
        """`speeds`: rows a second, by which the rows were shared; None: those that windows are planned by."""
        if speeds is None:
            speeds = [1000 * self._batch_rows / ms if ms > 0 else 0.0 for ms in self.elche.ms_per_batch]
        return why_shared(self.names, rows, speeds)

    def _why_apart(self) -> str:
        """Why a window is as long as it is, where that was weighed."""
        anchor, costs = self.elche.anchor, self.costs
        if not self.policy.weighs_learning or not costs.is_measured:
            return self._why_not_together
        if self.policy.chooses:
            return self._why_not_together or costs.why_apart(anchor)
        return (
            f"Averaging every {plural(anchor, 'batch')} takes {percent(costs.more_time(anchor))} more time, and about"
            f" {percent(costs.more_rows(anchor))} more rows until the loss is as low"
        )

    def _sentences(self, *sentences: str) -> str:
        return "".join(f"{sentence}. " for sentence in (self.news, *sentences) if sentence).rstrip()

    def decide_together(
        self, rows: int, *, parts: list[int] | None = None, speeds: Sequence[float] | None = None, is_first: bool = True
    ) -> WindowPlan:
        """One step of all replicas, over `rows` rows: in these parts, which follow from these speeds, or shared by
        speed. `is_first`: for the run's start."""
        if parts is None:
            parts = share_out(rows, self._parts)
            give_each_one(parts)
            if self._balance is None or self._balance.batch < rows:
                self._balance = Balance(rows, len(parts))
        self._most = PROBE
        shared = f"{self._why_shared(parts, speeds)}: {each_part(parts)} rows"
        reason = self._sentences(shared, self._why_together(is_first=is_first))
        return replace(self._decision(parts, [0] * len(parts), None, reason), anchor=0)

    def _why_together(self, *, is_first: bool) -> str:
        if self.policy.chooses:
            return self.costs.why_together(self._most_weighed)
        if is_first:
            return f"In the first {percent(self.policy.together)} of the run all agree in every step"
        return "All take this step together, since it ends a batch that was trained in part"

    @property
    def _most_weighed(self) -> int:
        return self.policy.max_anchor or self.costs.longest

    def is_best_together(self, *, is_early: bool, may: bool = True) -> bool:
        """Whether all step together next, where they `may`. Else a window's length is decided, if that is weighed.

        `is_early`: the run is in its first share, in which most is learned.
        """
        policy, costs = self.policy, self.costs
        if is_early and may and not policy.chooses:
            return True
        if not policy.weighs_learning:
            return False
        costs.is_early = is_early
        costs.set_speeds(self.elche.speeds)
        most = self._most_weighed
        self._why_not_together = ""
        if policy.chooses and may:
            costs.decide(most)
        else:
            if policy.chooses:
                self._why_not_together = "What their optimizers hold may differ, and an average makes it alike"
            costs.anchor = costs.best(most) if costs.is_measured else min(self.elche.anchor, most)
        self._set_anchor(min(costs.anchor, self._calm))
        return costs.anchor == 0

    def _set_anchor(self, anchor: int) -> None:
        if anchor and anchor != self.elche.anchor:
            self.elche.anchor = anchor
            self.elche._count()

    def observe(self, rows: Sequence[int], busy_s: Sequence[float], batch_rows: int, more_s: float) -> None:
        """Learn speeds from a step that all took together. `more_s`: what the one before cost beyond that."""
        self.costs.report_step(max(busy_s), more_s)
        self._batch_rows, self.news = batch_rows, ""
        seconds = [own_s * batch_rows / own if own else 0.0 for own, own_s in zip(rows, busy_s, strict=True)]
        reports = [_sane(Report(busy_s=each, batches=1)) for each in seconds]
        self.elche.report_timing([1000 * each.busy_s for each in reports], [int(each.batches) for each in reports], 0.0)
        # Parts do not follow each of these: where a step takes as long with fewer rows, noise would move them further
        # with each step.
        if self._balance is not None and (changed := self._balance.report(rows, busy_s)):
            self._parts = [float(part) for part in changed[0]]

    def _is_brisk(self, rank: int) -> bool:
        """Whether one more batch of it is soon done, should all others have ended meanwhile."""
        return self.elche.ms_per_batch[rank] * BRISK <= max(self.elche.ms_per_batch)

    def _counts(self) -> list[int]:
        """ElChe's, without its inertia: a count that is a tenth off would cost a tenth of a fast replica's time."""
        elche = self.elche
        if len(self.names) == 1:
            return [elche.anchor]
        if not elche.is_measured:
            return [min(count, PROBE) for count in elche.batch_counts]
        if self.policy.max_batch_diff is not None:
            return elche.batch_counts
        slowest = max(elche.ms_per_batch)
        return [max(1, round(elche.anchor * slowest / own)) if own > 0 else elche.anchor for own in elche.ms_per_batch]

    def report(self, reports: Sequence[Report], sync_s: float) -> None:
        """After each window; `sync_s` is what agreeing cost beyond waiting for the last."""
        elche, before = self.elche, self.elche.anchor
        reports = [_sane(report) for report in reports]
        for rank, report in enumerate(reports):
            ratio = 1000 * report.busy_s / max(1, report.batches) / (elche.ms_per_batch[rank] or 1.0)
            if report.batches and not 1 / JUMP < ratio < JUMP:
                elche.ms_per_batch[rank] = 0.0  # another speed altogether: the old one says nothing about it
        if self.policy.weighs_learning:
            each = [report.busy_s / report.batches for report in reports if report.batches]
            self.costs.report_window(max(each, default=0.0), sync_s)
            sync_s = 0.0
        if not elche.is_measured:
            sync_s = 0.0  # against so short a window it would seem far too much
        walls = [1000 * report.busy_s for report in reports]
        elche.report_timing(walls, [int(report.batches) for report in reports], 1000 * sync_s)
        self._most = min(MOST_BATCHES, GROWTH * self._most)
        self._share_by_speed()
        self._batch_rows, self.news = self._planned_rows, ""
        share = 1000 * sync_s / max(walls) if max(walls) > 0 else 0.0
        if elche.anchor != before:
            wanted = f"{percent(elche.overhead_target)} are wanted"
            self.news = (
                f"Agreeing took {percent(share)} of a window and {wanted}, so the slowest does"
                f" {plural(elche.anchor, 'batch')} instead of {before}"
            )
        drift = max((report.figures.get("divergence", 0.0) for report in reports), default=0.0)
        limit, self._calm = self.policy.drift_limit, min(elche.max_anchor, self._calm + 1)
        if limit is not None and self._divergence.report(drift) and elche.anchor > 1:
            before = elche.anchor
            elche.nudge_anchor_down(NUDGE)
            self._calm = elche.anchor
            self.news = (
                f"Replicas drifted apart three windows running, to {drift:.3g} of the mean, above"
                f" {limit:g}, so the slowest does {plural(elche.anchor, 'batch')}"
                f" instead of {before}"
            )

    def change(self, names: Sequence[str]) -> None:
        """Others are there now. One that stays keeps its measured speed; a newcomer counts as a typical one."""
        old, known = self.elche, dict(zip(self.names, self.elche.ms_per_batch, strict=True))
        if list(names) == self.names:
            return
        came = [name for name in names if name not in known]
        went = [name for name in self.names if name not in names]
        self.names = list(names)
        self.elche = make_elche(self.policy, len(names))
        self.elche.anchor = old.anchor
        self.elche.batch_counts = [old.anchor] * len(names)
        if old.is_measured:
            measured = sorted(ms for name, ms in known.items() if ms > 0 and name in names) or [max(old.ms_per_batch)]
            typical = measured[len(measured) // 2]
            self.elche.ms_per_batch = [known.get(name, 0.0) or typical for name in names]
            self.elche._count()
            self.elche.is_measured = True
        self._share_by_speed()
        told = [f"{' and '.join(came)} came"] * bool(came) + [f"{' and '.join(went)} went"] * bool(went)
        self.news = f"{' and '.join(told)}, and the work is shared anew" if told else self.news

    def _share_by_speed(self) -> None:
        speeds = self.elche.speeds
        self._parts, self._balance = [speed or max(speeds) for speed in speeds], None

    def _decision(self, rows: list[int], spare: list[int], until_s: float | None, reason: str) -> WindowPlan:
        return WindowPlan(
            rows=tuple(rows), spare=tuple(spare), until_s=until_s, anchor=self.elche.anchor, reason=reason
        )


PLANNERS: dict[type, type[WindowPlanner]] = {}
"""Of policies that decide otherwise; those below them in the tree of classes use theirs."""


def make_planner(policy: Windowed, names: Sequence[str]) -> WindowPlanner:
    """Return the planner that decides under this policy, in a group and at a host."""
    kind = next((PLANNERS[each] for each in type(policy).__mro__ if each in PLANNERS), WindowPlanner)
    return kind(policy, names)


class RowPool:
    """The rows of an epoch that nobody has done yet, as ranges of its order. The lowest are taken first."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = [(start, end) for start, end in sorted(ranges) if start < end]

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def take(self, rows: int, most: int = 0) -> list[tuple[int, int]]:
        """`most`: a few more may be taken, up to that, where a single row of a range would else be taken, or left."""
        taken: list[tuple[int, int]] = []
        while rows > 0 and self.ranges:
            start, end = self.ranges.pop(0)
            cut = min(end, start + rows)
            if cut - start == 1 and cut < min(end, start + most):
                cut += 1
            if end - cut == 1 and end <= start + most:
                cut = end
            taken.append((start, cut))
            rows, most = rows - (cut - start), most - (cut - start)
            if cut < end:
                self.ranges.insert(0, (cut, end))
        return taken

    def take_in_pairs(self, decision: WindowPlan, most: int) -> tuple[WindowPlan, list[list[tuple[int, int]]]]:
        """Take each replica's rows, at most `most` in all: no single row, of which BatchNorm can take no mean.

        A row that is left alone between two that are done would have to be a batch by itself.
        """
        taken, rows, spare = [], [], []
        for own, more in zip(decision.rows, decision.spare, strict=True):
            taken.append(self.take(min(own + more, most), most))
            found = sum(end - start for start, end in taken[-1])
            rows.append(min(found, max(own, found - more)))
            spare.append(found - rows[-1])
            most -= found
        return replace(decision, rows=tuple(rows), spare=tuple(spare)), taken

    def give_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self.ranges, *ranges]):
            if merged and merged[-1][1] == start:
                merged[-1] = merged[-1][0], end
            elif start < end:
                merged.append((start, end))
        self.ranges = merged


def rows_left_after(ranges: Sequence[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Return what is left of these ranges once `rows` rows of them are done, in order."""
    left = []
    for start, end in ranges:
        done = min(end - start, rows)
        rows -= done
        if start + done < end:
            left.append((start + done, end))
    return left


def _sane(report: Report) -> Report:
    """Computing for no time at all, or for a time that is no number, counts as having done nothing."""
    if not (report.batches > 0 and 0 < report.busy_s < math.inf):
        return report._replace(busy_s=0.0, batches=0)
    return report._replace(busy_s=report.batches * min(MOST_S, max(LEAST_S, report.busy_s / report.batches)))


def _the_last(rows: int) -> str:
    return "This is the last row" if rows == 1 else f"These are the last {rows:,} rows"
