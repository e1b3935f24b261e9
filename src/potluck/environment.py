"""Environment variables by which a parent tells its processes something, and the memory and cores of this machine."""

import os
import platform
from contextlib import suppress
from pathlib import Path

from potluck.words import check_at_most

PATIENCE_S = 600.0
"""How long workers of a group wait for one of them: without a limit, the others of one that hangs would never end."""

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


def runtime_folder(name: str) -> Path:
    """Return a folder of this user, on this machine: a home may be shared by many machines, and a run folder is not."""
    if (runtime := os.environ.get("XDG_RUNTIME_DIR")) and os.access(runtime, os.W_OK):
        return Path(runtime) / "potluck" / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potluck" / name
    return cache / os.uname().nodename if hasattr(os, "uname") else cache


def why_leaving(otherwise: str) -> str:
    """Return the reason that a worker gives its host when it leaves, as its parent says. `otherwise`: where that says
    nothing."""
    with suppress(OSError, KeyError, UnicodeDecodeError):
        if said := Path(os.environ[LEAVING]).read_text(encoding="utf-8"):
            return said
    return otherwise


def machine_bytes() -> int:
    """Return the memory of this machine."""
    import psutil  # only where it is asked for: every command imports this module

    return int(psutil.virtual_memory().total)


def free_memory_bytes() -> int:
    """Return the memory that can be had now without anybody being ended for it."""
    import psutil

    return int(psutil.virtual_memory().available)


def processor() -> str:
    """Name the processor; where the system does not tell, its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def usable_cores() -> int:
    """Count the cores that this process may run on, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_patience(name: str, seconds: float) -> None:
    """Time limits derive from it, and none of them can be endless."""
    if not seconds > 0:
        raise ValueError(f"{name} must be above 0, not {seconds}")
    check_at_most(name, seconds, 7 * 86_400, "that is a week, in seconds")
