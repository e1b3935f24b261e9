"""Keeps what workers reported of their weights after each step, and which report is right. Pure.

It only keeps account; weights.py decides what follows.
"""

from collections.abc import Iterable
from typing import NamedTuple

from potluck.fleet.coordinator_state import CoordinatorState, stalled
from potluck.fleet.effects import Agreed, Effect, Emit
from potluck.fleet.membership import WorkerRecord, unique_names
from potluck.wire.messages import Ready


class ReportedDigest(NamedTuple):
    """A worker's report of its weights after a step."""

    kind: str
    digest: str
    computed: bool
    """It took the step itself, and was not given the weights."""


class Digests:
    def __init__(self, run: CoordinatorState, agreed: dict[int, dict[str, str]]) -> None:
        self._run = run
        self.told: dict[int, dict[int, ReportedDigest]] = {}
        """step -> worker id -> what it told first"""
        self.agreed = agreed
        """step -> kind -> the digest that is right: a worker that tells another has wrong weights."""
        self.changed: dict[int, str] = {}
        """worker id -> another digest of the last step than it told first, before it told anything of the next."""
        self.drifted = False
        """Whether somebody's weights have drifted in this epoch."""
        self.alike: set[str] = set()
        """Kinds that have computed the same bits as another kind."""
        self.apart: set[str] = set()
        """Kinds that have not, and are compared only among themselves."""

    def clear(self) -> None:
        self.told.clear()
        self.agreed.clear()

    def forget(self, step: int) -> None:
        self.told.pop(step, None)
        self.agreed.pop(step, None)

    def forget_old(self) -> None:
        """Forget steps so old that nobody is compared by them; a worker that replays them tells them one by one."""
        for old in [step for step in self.told if step < self._run.standing.version - 2]:
            self.forget(old)

    def forget_worker(self, member: WorkerRecord) -> None:
        """Forgets a worker's reports: its weights are wrong."""
        for told in self.told.values():
            told.pop(member.worker_id, None)
        self.changed.pop(member.worker_id, None)

    @property
    def trusted(self) -> list[WorkerRecord]:
        """Holders whose weights have not changed since they told their digest; if there is none, all holders."""
        holders = self._run.membership.holders
        return [m for m in holders if m.worker_id not in self.changed] or holders

    def compared_as(self, kind: str) -> str:
        """Workers of which this is the same come to the same bits from the same average: theirs are compared."""
        if self._run.described.subtracts_only:
            return ""
        return kind if kind in self.apart else kind.rpartition("; ")[2]

    def is_believed(self, ready: Ready) -> bool:
        """Whether the weights that it comes with are those that were agreed on, as far as anybody knows."""
        return bool(ready.digest) and (not self.agreed.get(ready.step) or self.is_agreed(ready))

    def is_agreed(self, ready: Ready) -> bool:
        return ready.digest in self.agreed.get(ready.step, {}).values()

    def is_of_unknown_kind(self, member: WorkerRecord, ready: Ready) -> bool:
        """Whether nothing was agreed on of the weights that a worker of its kind should have after that step."""
        return bool(ready.digest) and self.compared_as(member.kind) not in self.agreed.get(ready.step, {})

    def agree(self, step: int, kind: str, digest: str) -> list[Effect]:
        agreed = self.agreed.setdefault(step, {})
        if agreed.get(kind) == digest:
            return []
        agreed[kind] = digest
        return [Agreed(step, kind, digest)]

    def admit(self, member: WorkerRecord, ready: Ready) -> list[Effect]:
        """It continues with the weights that it came with."""
        self.told.setdefault(ready.step, {})[member.worker_id] = ReportedDigest(
            member.kind, ready.digest, computed=False
        )
        kind = self.compared_as(member.kind)
        return self.agree(ready.step, kind, ready.digest) if kind not in self.agreed.get(ready.step, {}) else []

    def set_apart(self, voices: Iterable[ReportedDigest]) -> bool:
        """Whether there are kinds that have never come to the bits of the others: no fault, but how they compute."""
        kinds: dict[str, set[str]] = {}
        for told in voices:
            kinds.setdefault(told.digest, set()).add(told.kind)
        sets = list(kinds.values())
        if sum(map(len, sets)) > len(set().union(*sets)):  # one kind came to two results
            return False
        unlike = set().union(*sets) - self.alike
        self.apart |= unlike
        return bool(unlike)

    def tell_compared(self) -> tuple[list[str], tuple[str, ...]]:
        """Whose weights were compared, as parts of a sentence; and the names of those whose were not."""
        ready = self._run.membership.ready
        names = dict(zip((m.worker_id for m in ready), unique_names(ready), strict=True))
        kinds: dict[str, list[WorkerRecord]] = {}
        for member in self._run.membership.holders:
            kinds.setdefault(self.compared_as(member.kind), []).append(member)
        plain = [names[m.worker_id] for m in ready if m.plain]
        groups = [[names[m.worker_id] for m in group] for group in kinds.values() if len(group) > 1]
        single = [group[0] for group in kinds.values() if len(group) == 1]
        sentences = [f"the {len(group)} workers of one kind ({_list(group)}) hold the same weights" for group in groups]
        if len(groups) == 1 and not single and not plain:
            sentences = ["all workers hold the same weights"]
        if self.drifted:
            sentences = ["WORKERS' WEIGHTS HAD DRIFTED APART"]
        if len(ready) == 1:
            return sentences, ()
        sentences += [f"{names[m.worker_id]} is alone of its kind ({m.kind}) and was not compared" for m in single]
        sentences += [f"{name} is a plain peer and was not compared" for name in plain]
        return sentences, tuple(sorted([*plain, *(names[m.worker_id] for m in single)]))


def _list(names: list[str]) -> str:
    """All of a few, the first of many."""
    return ", ".join(names if len(names) <= 8 else [*names[:7], f"{len(names) - 7} more"])


def drift_event(member: WorkerRecord, step: int, what: str) -> Emit:
    return stalled(member, f"its weights after step {step:,} {what}")
