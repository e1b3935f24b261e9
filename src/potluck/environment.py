"""Environment variables by which a parent tells its processes something, and the memory and cores of this machine."""

import os
from contextlib import suppress
from pathlib import Path

from potluck.words import check_at_most

PATIENCE_S = 600.0

RENDEZVOUS = "POTLUCK_RENDEZVOUS"
"""Tells workers the file through which they find each other, so that no port is opened for it."""

LAST_WORDS = "POTLUCK_LAST_WORDS"

PARENT_PIPE = "POTLUCK_PARENT_PIPE"

ONLY = "POTLUCK_ONLY"
"""Set for a worker whose others are elsewhere."""

IGNORED = "POTLUCK_IGNORED"
"""Names signals that reach all processes of a machine. A worker that has nothing to hand over yet leaves the answer to
its parent."""

LEAVING = "POTLUCK_LEAVING"
"""Tells workers the file in which their parent says why they are to leave, before it asks them to."""

RETURNING = "POTLUCK_RETURNING"
"""Tells workers the file in which they keep the host's patience, in seconds. Where it is there before one connects, the
machine was away: paused, or outside of its hours."""

TAKEN_BACK = "its machine is taken back (SIGTERM)"

PAGE_POINTER = "POTLUCK_PAGE_POINTER"
"""Tells the process that keeps the run folder where to write which one it is: for the page that shows it."""
QUIET = "POTLUCK_QUIET"
"""Set for workers whose host shows the run."""


def why_leaving(otherwise: str) -> str:
    """Return the reason that a worker gives its host when it leaves, as its parent says. `otherwise`: where that says
    nothing."""
    with suppress(OSError, KeyError, UnicodeDecodeError):
        if said := Path(os.environ[LEAVING]).read_text(encoding="utf-8"):
            return said
    return otherwise


def machine_bytes() -> int:
    """The memory of this machine; where the system does not tell, more than anybody has: nothing is refused."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 60


def free_memory_bytes() -> int:
    """Return the memory that can be had now without anybody being ended for it; where the system does not say, all that
    it has."""
    found = read_bytes("/proc/meminfo", "MemAvailable")
    return machine_bytes() if found is None else found


def read_bytes(file: str, name: str) -> int | None:
    """Read the system's line such as `VmData: 1234 kB`, in bytes; None where there is no such line."""
    with suppress(OSError):
        for line in Path(file).read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return None


def usable_cores() -> int:
    """Count the cores that this process may run on, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_patience(name: str, seconds: float) -> None:
    """Time limits derive from it, and none of them can be endless."""
    if not seconds > 0:
        raise ValueError(f"{name} must be above 0, not {seconds}")
    check_at_most(name, seconds, 7 * 86_400, "that is a week, in seconds")
