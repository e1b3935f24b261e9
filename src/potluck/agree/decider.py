"""Decider: whether all take the next step together or each steps alone, how many rows each has, and why. Pure.

A group and a host ask the same one. In a group each rank has its own, which hears what the others hear, and so decides
what they decide. It measures nothing: that is the planner of its policy (windows.py). Nor does it know which rows a
round has, and who computes which: that is engine/group_plans.py's and fleet/planning.py's.
"""

from collections.abc import Sequence

from potluck.agree.policy import Windowed
from potluck.agree.records import Position, Range, Report, RunTerms
from potluck.agree.windows import WindowPlan, WindowPlanner, make_planner
from potluck.events import Decided


class Decider:
    """For each round: begin(), then together() or alone(), and observe() once all have agreed."""

    def __init__(self, alike_at: int = 0) -> None:
        self._alike_at = alike_at
        """The agreement after which all optimizers are known to hold the same; -1: they are not known to."""
        self.rows_left = 0
        """Rows that are left of the epoch, or of the run."""
        self.own_rows = 0
        """Rows of a step that a replica takes by itself."""
        self._planner: WindowPlanner | None = None
        self._at = Position()
        self._is_early = self._is_together = False
        self._drift = 0.0
        """How far replicas were from the mean at the agreement before the last, as the farthest of them reported."""

    def know_alike(self, alike_at: int) -> None:
        """The run was put where all optimizers hold the same; with -1, a worker came whose may hold something else."""
        self._alike_at = alike_at

    def begin(
        self,
        policy: Windowed,
        names: Sequence[str],
        at: Position,
        terms: RunTerms,
        left: Sequence[Range],
        *,
        rows_limit: int | None,
        may_step_together: bool = True,
    ) -> int:
        """Return how many rows all take in one step next; 0: each replica steps by itself.

        `left`: the rows of the epoch that are not done. `rows_limit`: those of the whole run, where they are known.
        """
        self._planner = self._planner or make_planner(policy, names)
        self._planner.change(names)
        first, end = left[0]
        self.rows_left = min(sum(end - start for start, end in left), (rows_limit or 1 << 62) - at.rows_seen)
        self.own_rows = -(-terms.batch // len(names))
        self._at, self._is_early = at, at.rows_seen < policy.together * (rows_limit or 0)
        # Optimizers that hold different things would take different steps along one mean gradient. A policy that never
        # goes back from windows has all such steps before the first of them.
        may = may_step_together and (self._alike_at == at.version or not policy.chooses)
        # A batch in the middle of its turns can only be finished by such a step.
        is_between_turns = at.turn > 0 and terms.turns > 1
        if not is_between_turns and not self._planner.is_best_together(is_early=self._is_early, may=may):
            return 0
        return min(self.rows_left, end - first, terms.batch - at.row % terms.batch)

    def together(self, rows: int, parts: list[int] | None = None, speeds: Sequence[float] | None = None) -> WindowPlan:
        """All take one step over so many rows, which are shared by speed if not in these parts, which follow from these
        speeds."""
        assert self._planner is not None
        self._is_together = True
        return self._planner.decide_together(rows, parts=parts, speeds=speeds, is_first=self._is_early)

    def alone(self, *, least: int = 0) -> WindowPlan:
        """Each replica steps by itself. Fewer than `least` rows are not left for another window."""
        assert self._planner is not None
        self._is_together, self._alike_at = False, -1
        return self._planner.decide(self.rows_left, self.own_rows, least=least)

    def decided(self, plan: WindowPlan) -> Decided:
        """Make the event of this round, whose rows may have been moved a little between replicas."""
        return Decided(
            step=self._at.step,
            rows=plan.rows,
            reason=plan.reason,
            version=self._at.version,
            anchor=plan.anchor,
            divergence=self._drift,
        )

    def observe(self, reports: Sequence[Report], cost_s: float, *, averages_moments: bool) -> None:
        """All have agreed. `reports`: one of each replica. `cost_s`: what agreeing cost beyond computing.
        `averages_moments`: whether what optimizers keep is the same after a window, too."""
        assert self._planner is not None
        if self._is_together:
            rows, busy_s = [int(report.rows) for report in reports], [report.busy_s for report in reports]
            if max(busy_s) > 0:
                self._planner.observe(rows, busy_s, self.own_rows, cost_s)
        elif any(report.batches for report in reports):
            self._planner.report(reports, cost_s)
        if self._is_together or averages_moments:
            self._alike_at = self._at.version + 1
        self._drift = max(report.figures.get("divergence", 0.0) for report in reports)
