"""Wraps what not every operating system has: locks on files, process groups, scattered sends. Imports no torch."""

import errno
import os
import random
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

fcntl: ModuleType | None
resource: ModuleType | None
msvcrt: ModuleType | None

try:
    import fcntl
except ImportError:
    fcntl = None
try:
    import resource
except ImportError:
    resource = None
try:
    import msvcrt
except ImportError:
    msvcrt = None

HAS_GROUPS = hasattr(os, "killpg")
"""Whether processes have groups that signals reach, and are started with open files."""
CAN_SHARE = fcntl is not None and hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")
"""Whether two processes can be shown each other's memory."""
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
FOR_US_ALONE = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""How files are opened that no process inherits."""


LEFT_ALONE = range(20_000, 32_000)
"""Ports that systems give to no connection by themselves: one that was left is free when it is wanted again."""


def listen(host: str, port: int) -> socket.socket:
    """Port 0: any that is free. A host that is started again, or a group that is told where to meet, finds it free."""
    for own in random.SystemRandom().sample(LEFT_ALONE, 20) if not port else ():
        try:
            return _listen(host, own)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    return _listen(host, port)


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # else a port that was just left could not be had again
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def lock(file: IO[Any], *, wait: bool = False) -> None:
    """Lock a file until it is closed, or its process ends. OSError: another process has locked it."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)


def seal_memory(descriptor: int) -> None:
    """Fix the size of a memory file, so that it can become neither shorter nor longer."""
    assert fcntl is not None
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def can_shrink(descriptor: int) -> bool:
    assert fcntl is not None
    return not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def own_memory_limit() -> int | None:
    """The most bytes of data that this process may have; none if there is no limit."""
    if resource is None:
        return None
    limit: int = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def sync(path: Path) -> None:
    """Make what is in this file or folder outlive a power cut. A folder that cannot be opened is the system's
    affair."""
    if not HAS_GROUPS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if HAS_GROUPS else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def send_some(connection: socket.socket, parts: Sequence[memoryview]) -> int:
    """Send as much as the system takes at once, by the plain socket's own method. Returns how many bytes."""
    if (send := getattr(socket.socket, "sendmsg", None)) is not None:
        return int(send(connection, parts))
    return socket.socket.send(connection, parts[0])


def is_ready(connection: socket.socket, *, to_write: bool, timeout_s: float) -> bool:
    if not hasattr(select, "poll"):
        watched: list[socket.socket] = [connection]
        return any(select.select([] if to_write else watched, watched if to_write else [], [], timeout_s))
    poller = select.poll()
    poller.register(connection, select.POLLOUT if to_write else select.POLLIN)
    return bool(poller.poll(1000 * timeout_s))


def start_apart(inherited: int) -> dict[str, Any]:
    """How a process is started that Ctrl-C does not reach, and that hears when we end: of the open file that it
    inherits; where none is inherited, of its standard input."""
    if HAS_GROUPS:
        return {"stdin": subprocess.DEVNULL, "pass_fds": (inherited,), "start_new_session": True}
    return {"stdin": subprocess.PIPE, "creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}


def heard_by(inherited: int) -> str:
    """Return the number of the open file by which such a process hears that we have ended."""
    return str(inherited if HAS_GROUPS else 0)


def signal_apart(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process that was started so, and to all that it has started, where they are a group."""
    if HAS_GROUPS:
        os.killpg(process.pid, number)
    elif number == signal.SIGINT:
        process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", number))
    else:
        process.terminate()


def started_at(pid: int) -> str:
    """Say when a process of ours was started, in a way that no other of its number shares; empty: it is not there any
    more, or is somebody else's."""
    entry = Path("/proc") / str(pid)
    try:
        if Path("/proc/self/stat").exists():  # in ticks: psutil's seconds change with the clock
            words = _stat(pid)
            return words[19] if words[0] != "Z" and entry.stat().st_uid == os.getuid() else ""
        import psutil

        with suppress(psutil.Error):
            process = psutil.Process(pid)
            return str(process.create_time()) if process.uids().real == os.getuid() else ""
    except (OSError, IndexError):
        pass
    return ""


def state_of(pid: int) -> str:
    """Return T if it is stopped, D if it waits for a disk or a device; empty: the system does not tell."""
    try:
        return _stat(pid)[0]
    except (OSError, IndexError):
        return ""


def _stat(pid: int) -> list[str]:
    return (Path("/proc") / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def catches(pid: int, number: int) -> bool:
    """Whether the process answers this signal itself; where the system does not tell, it is believed to."""
    try:
        status = (Path("/proc") / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return not Path("/proc/self/stat").exists()
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
