"""Clears away a testbed when its process closes it or is gone, however that came about.

A process of its own, in a session of its own: neither a signal to the testbed's process group nor kill -9 reaches it.
It is started before anything is made, and knows all names from the testbed's name and its number of machines.
Imports nothing that is not in the standard library.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.testbed.network import Network
from bench.testbed.partition import Partition
from bench.testbed.programs import MARK, TestbedError, marked
from bench.testbed.quota import Quotas

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
"""For processes to end and the kernel to let go of what they held."""


class Reaper:
    """The testbed's side."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        # The end of a process shows on its pidfd even while children that it has forked hold the pipe open.
        try:
            ours = os.pidfd_open(os.getpid())
        except OSError as error:
            raise TestbedError(f"A testbed needs a kernel with pidfd_open, Linux 5.3 ({error.strerror}).") from None
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    "-c",
                    f"import {__name__} as reaper; reaper.main()",
                    name,
                    str(count),
                    str(ours),
                ],
                cwd="/",
                env={key: value for key, value in os.environ.items() if key != MARK} | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(ours,),
                start_new_session=True,
            )
        finally:
            os.close(ours)

    def clear(self) -> list[str]:
        """Returns when all is gone; or what is left after all."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(b".")
        return clear(self._name, self._count) if self._process.wait() else []  # somebody may have killed it


def main() -> None:
    name, count, testbed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ready, _, _ = select.select([sys.stdin, testbed], [], [])
    if sys.stdin not in ready or not os.read(sys.stdin.fileno(), 1):
        time.sleep(0.1)  # a child that was between fork and exec when its parent was killed has its mark by then
    if left := clear(name, count):
        print(f"testbed: still there: {', '.join(left)}", file=sys.stderr)
        sys.exit(1)


def clear(name: str, count: int) -> list[str]:
    """Ends every process of this testbed and removes what it had made; what it had not is no error."""
    quotas, network, partition = Quotas(name, count), Network(name, count), Partition(name)
    _attempt(quotas.lift)
    _kill(lambda: [*quotas.members(), *marked(name)])
    _attempt(partition.quit)
    _kill(lambda: marked(partition.mark))
    deadline = time.monotonic() + PATIENCE_S
    while left := [*quotas.remains(), *network.remains(), *partition.remains()]:
        for remove in (network.remove, quotas.remove, partition.remove):
            _attempt(remove)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return left


def _kill(members: Callable[[], list[int]]) -> None:
    """Again and again, since those who are killed may just have started others."""
    deadline = time.monotonic() + PATIENCE_S
    while (pids := members()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _attempt(act: Callable[[], None]) -> None:
    """Whatever fails must not keep the rest from being cleared; what is left is told in the end."""
    with contextlib.suppress(OSError, TestbedError):
        act()
