"""Makes one worker of this machine slower than the others, as in a fleet of mixed machines. Only the demo does so.

By CPU quotas of control groups (version 1 or 2) where they can be made, which slow whatever a worker computes; else it
pauses in proportion to its own compute. Imports no torch: the launcher makes the groups, and its workers enter them
while they train.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from potluck.errors import PotluckError
from potluck.events import Event, RunEnded, RunStarted
from potluck.signals import handling
from potluck.waiting import wait_until

P = ParamSpec("P")
R = TypeVar("R")

MOUNTS = Path("/proc/self/mounts")
OURS = Path("/proc/self/cgroup")
NAME = "potluck-demo"
PERIOD_US = 20_000
"""Short beside a batch: the kernel's own 100 ms would make a slow worker stand still for most of one at a time."""
FILLED = 0.6
"""The part of this machine that all quotas come to together. The rest is for whatever else runs here, so that nobody
waits for a core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    worker: int
    """Number of the worker that it slows."""
    factor: float = 3.0
    cores: tuple[float, ...] = ()
    """Each worker's quota; empty: the slow one pauses."""
    groups: tuple[str, ...] = ()
    """Each worker's control group."""
    home: str = ""
    """The control group that they come from, and go back to."""
    why_not: str = ""
    """Reason why we cannot use quotas, as part of a sentence."""

    @property
    def sentence(self) -> str:
        slow = f"Worker {self.worker} is slowed {self.factor:g}-fold"
        if self.groups:
            fast = max(self.cores)
            return f"{slow} by CPU quotas: it gets {self.cores[self.worker]:.2f} cores, each other one {fast:.2f}."
        return f"{slow} by pausing {self.factor - 1:g} times as long as it computes. ({self.why_not})"


def plan_quotas(workers: int, slow: int, factor: float, cores: int) -> tuple[float, ...]:
    """A core for each of the fast, or less where that is more than there is."""
    fast = min(1.0, FILLED * cores / (workers - 1 + 1 / factor))
    return tuple(fast / factor if rank == slow else fast for rank in range(workers))


@contextmanager
def slowing(workers: int, cores: int, factor: float = 3.0) -> Iterator[Slowdown]:
    """How the last of these workers is slowed, on these cores. Their control groups are there until this ends."""
    slowdown = Slowdown(worker=workers - 1, factor=factor)
    made: list[Path] = []
    try:
        try:
            home, parent, is_v2 = _find_groups()
            _sweep(parent)
            quotas = plan_quotas(workers, workers - 1, factor, cores)
            for rank, quota in enumerate(quotas):
                group = parent / f"{NAME}-{os.getpid()}-{rank}"
                group.mkdir()
                made.append(group)
                _set_quota(group, quota, is_v2=is_v2)
            _rehearse(home, made[-1])
            slowdown = replace(slowdown, cores=quotas, groups=tuple(map(str, made)), home=str(home))
        except _NoGroups as error:
            slowdown = replace(slowdown, why_not=str(error))
        except OSError as error:
            slowdown = replace(slowdown, why_not=f"CPU quotas were refused: {error.strerror}.")
        # A closed terminal, or a SIGTERM that nobody else takes, ends this process in order, so that no group is left.
        with handling((signal.SIGHUP, signal.SIGTERM), lambda number: sys.exit(128 + number)):
            yield slowdown
    finally:
        for group in made:
            _remove(group)


class Brake:
    """A worker's side: a listener that slows the worker it is on while its run lasts."""

    def __init__(self, slowdown: Slowdown, rank: int, *, has_gpu: bool) -> None:
        if has_gpu:
            slowdown = replace(slowdown, groups=(), why_not="A CPU quota does not slow a GPU.")
        self.slowdown = slowdown
        self.rank = rank
        self._pauses = Pauses(slowdown.factor) if rank == slowdown.worker and not slowdown.groups else None

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                if self.rank == 0:
                    print(self.slowdown.sentence, flush=True)
                self._enter(self.slowdown.groups[self.rank] if self.slowdown.groups else None)
                if self._pauses is not None:
                    self._pauses.start()
            case RunEnded():
                self._enter(self.slowdown.home if self.slowdown.groups else None)

    def slow(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that a worker that pauses does so after each call, for all that it computed since the
        last."""
        pauses = self._pauses
        if pauses is None:
            return function

        def slowed(*arguments: P.args, **options: P.kwargs) -> R:
            result = function(*arguments, **options)
            pauses.pause()
            return result

        return slowed

    def _enter(self, group: str | None) -> None:
        if group is None:
            return
        try:
            _move(os.getpid(), Path(group))
        except OSError as error:
            raise PotluckError(
                f"Worker {self.rank} cannot enter the control group {group}: {error.strerror}."
            ) from None


class Pauses:
    """Sleeps in proportion to the time that this process has really computed, whatever else had the cores."""

    def __init__(
        self,
        factor: float,
        computed_s: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._factor, self._computed_s, self._sleep = factor, computed_s, sleep
        self.start()

    def start(self) -> None:
        self._until_s = self._computed_s()

    def pause(self) -> None:
        now_s = self._computed_s()
        self._sleep((self._factor - 1) * (now_s - self._until_s))
        self._until_s = now_s


# Control groups


class _NoGroups(Exception):
    """Why there can be none, as a sentence."""


def _find_groups() -> tuple[Path, Path, bool]:
    """(our own control group, where others can be made beside or below it, whether it is of version 2)."""
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
        ours = [line.split(":", 2) for line in OURS.read_text().splitlines()]
    except OSError:
        raise _NoGroups("CPU quotas need control groups, which are Linux's.") from None
    own = {name: path.lstrip("/") for _, names, path in ours for name in names.split(",")}
    for _, root, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            home = Path(root) / own["cpu"]
            return home, home, False
        if kind == "cgroup2" and "" in own:
            home = Path(root) / own[""]
            parent = home if home == Path(root) else home.parent  # a group that has processes may have no groups
            if "cpu" in _words(parent / "cgroup.subtree_control"):
                return home, parent, True
    raise _NoGroups("CPU quotas need control groups with a CPU controller, and there are none here.")


def _set_quota(group: Path, cores: float, *, is_v2: bool) -> None:
    quota_us = max(1000, round(cores * PERIOD_US))  # the kernel takes no smaller one
    if is_v2:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


def _rehearse(home: Path, group: Path) -> None:
    """Enter and leave a group: to make one is one permission, and to enter it another."""
    _move(os.getpid(), home)  # where we are already, so that a refusal leaves us there
    _move(os.getpid(), group)
    _move(os.getpid(), home)


def _move(pid: int, group: Path) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def _sweep(parent: Path) -> None:
    """Removes what demos that were killed have left. A group with a process in it is not removed by the kernel."""
    for group in parent.glob(f"{NAME}-*-*"):
        if not Path("/proc", group.name.split("-")[2]).exists():
            with contextlib.suppress(OSError):  # a child of it may live on: the next demo tries again
                group.rmdir()


def _remove(group: Path) -> None:
    """The kernel lets go of a group a moment after its last process is gone."""

    def is_gone() -> bool:
        with contextlib.suppress(OSError):  # busy still, and tried again until the deadline
            group.rmdir()
        return not group.is_dir()

    wait_until(is_gone, 2.0)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
