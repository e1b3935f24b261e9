"""A CPU quota per machine: control groups, version 1 (`cpu.cfs_quota_us`) or 2 (`cpu.max`).

All names follow from the testbed's, so that the reaper can remove what a killed testbed had made.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from bench.testbed.programs import TestbedError

MOUNTS = Path("/proc/self/mounts")
PERIOD_US = 20_000
"""Long for the scheduler, short for a step: a machine of 0.2 cores stands still for 16 ms at a time, not for 80."""
WEIGHT = 8
"""Against any other process of this machine: a quota that others use up is none. Groups have no more than it all the
same."""
LEAST_QUOTA_US = 1_000
"""The kernel takes no smaller one; the period of a very slow machine is longer instead."""


@dataclass(frozen=True)
class Hierarchy:
    """Where the kernel shows the CPU controller."""

    root: Path
    is_v2: bool


def find_hierarchy() -> Hierarchy | None:
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return None
    for _, where, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(Path(where), is_v2=False)
        if kind == "cgroup2" and "cpu" in _words(Path(where) / "cgroup.controllers"):
            return Hierarchy(Path(where), is_v2=True)
    return None


class Quotas:
    def __init__(self, name: str, count: int) -> None:
        self._hierarchy = find_hierarchy()
        self._groups = [self._hierarchy.root / f"{name}-{index}" for index in range(count)] if self._hierarchy else []
        self.are_made = False

    def make(self, cores: list[float | None]) -> None:
        if self._hierarchy is None:
            raise TestbedError(
                "CPU quotas need the CPU controller of control groups, which is not mounted here: as root, "
                "`mount -t cgroup -o cpu none /sys/fs/cgroup/cpu`; or leave out `cpu`."
            )
        root = self._hierarchy.root
        try:
            if self._hierarchy.is_v2 and "cpu" not in _words(root / "cgroup.subtree_control"):
                (root / "cgroup.subtree_control").write_text("+cpu")
            for index, group in enumerate(self._groups):
                group.mkdir()
                self.set(index, cores[index])
                weight = ("cpu.weight", 100) if self._hierarchy.is_v2 else ("cpu.shares", 1024)
                (group / weight[0]).write_text(str(WEIGHT * weight[1]))
        except OSError as error:
            raise TestbedError(
                f"CPU quotas need control groups, which cannot be made in {root} ({error.strerror}): run it as root, "
                "in a container with --privileged; or leave out `cpu`."
            ) from None
        self.are_made = True

    def set(self, index: int, cores: float | None) -> None:
        assert self._hierarchy is not None
        group = self._groups[index]
        period_us = PERIOD_US if cores is None else max(PERIOD_US, math.ceil(LEAST_QUOTA_US / cores))
        quota_us = None if cores is None else round(period_us * cores)
        if self._hierarchy.is_v2:
            (group / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {period_us}")
        else:
            (group / "cpu.cfs_quota_us").write_text("-1")  # the new period might not fit the old quota
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))

    def entrance(self, index: int) -> Path:
        """A process that writes its id there is in, with all children that it will have."""
        return self._groups[index] / "cgroup.procs"

    def throttled(self, index: int) -> int:
        """In how many periods the machine used up its quota and had to wait."""
        words = _words(self._groups[index] / "cpu.stat")
        return int(words[words.index("nr_throttled") + 1])

    def members(self) -> list[int]:
        return [int(pid) for group in self._groups for pid in _words(group / "cgroup.procs")]

    def lift(self) -> None:
        """A process needs time even to end, and would get little."""
        for index, group in enumerate(self._groups):
            if group.is_dir():
                self.set(index, None)

    def remove(self) -> None:
        for group in self._groups:
            if group.is_dir():
                group.rmdir()

    def remains(self) -> list[str]:
        return [str(group) for group in self._groups if group.is_dir()]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
