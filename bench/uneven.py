"""Ranks on unequal machines: a bench.testbed with one waiting process per machine, which forks a rank for each order.

    with Uneven([Machine(cpu=0.9), Machine(cpu=0.3)]) as fleet:
        answers = fleet.run("bench.mixed:compete", cores=[0.9, 0.3], contender="cadence")

Quotas are lifted while torch is loaded, and hold before a rank begins; so a new group of ranks costs a fraction of a
second. Where a testbed cannot be had, or is not wanted, ranks pause in proportion to what they computed (see
bench/testbed), and `how` says so. Knows nothing of what the ranks compute; `uneven_rank.py` is their side.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from bench.ranks import CPU_ONLY, ROOT
from bench.testbed import Machine, Testbed, TestbedError
from bench.turns import say

POLL_S = 0.02
START_S = 120.0


def cores_of(workers: int, gap: float) -> list[float]:
    """Quotas that fit two cores: half of the workers are `gap` times slower than the other half."""
    fast = 1.8 / workers
    return [fast] * (workers // 2) + [fast / gap] * (workers - workers // 2)


class Uneven:
    def __init__(self, machines: Sequence[Machine], *, pausing: bool = False) -> None:
        self.machines = list(machines)
        self.how = "pausing" if pausing else "CPU quotas"
        self._bed: Testbed | None = None
        self._ranks: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        with self._stack:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            if self.how != "pausing":
                self._open_bed()
            for index in range(len(self.machines)):
                self._ranks.append(self._start(index))
                self._stack.callback(self._end, self._ranks[-1])
            for rank in self._ranks:
                self._hear(rank, time.monotonic() + START_S)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open_bed(self) -> None:
        try:
            self._bed = self._stack.enter_context(Testbed(self.machines))
        except TestbedError as error:
            if any(machine.gpu for machine in self.machines):
                raise
            self.how = "pausing"
            say(f"There is no testbed here, so workers pause in proportion to what they computed. {error}")
            return
        for index, machine in enumerate(self.machines):  # torch is loaded at full speed
            if machine.cpu is not None:
                self._bed.set_cpu(index, None)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "GLOO_SOCKET_IFNAME": self._bed.interface if self._bed is not None else "lo",
            "LOCAL_RANK": "0",
        }
        if not self.machines[index].gpu:
            environment |= CPU_ONLY
        command = [sys.executable, "-m", "bench.uneven_rank", *(["fresh"] if self.machines[index].gpu else [])]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT, "bufsize": 0}
        if self._bed is not None:
            return self._bed.start(index, command, env=environment, **pipes)
        return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)

    def _end(self, rank: subprocess.Popen[bytes]) -> None:
        if self._bed is None:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # what it has forked, too
            rank.wait()

    def set_cores(self, index: int, cores: float | None) -> None:
        """Holds at once, also for a rank that is running."""
        if self._bed is not None:
            if self.machines[index].cpu is not None:
                self._bed.set_cpu(index, cores)
        else:
            aside = self._folder / ".pace"
            aside.write_text(str(1.0 if cores is None else cores))
            aside.rename(self._pace(index))

    def _pace(self, index: int) -> Path:
        return self._folder / f"pace-{index}"

    def run(
        self,
        function: str,
        *,
        cores: Sequence[float | None] = (),
        on: Mapping[str, Callable[[], None]] | None = None,
        limit_s: float = 300.0,
        **arguments: Any,
    ) -> list[Any]:
        """Calls MODULE:FUNCTION(seat, **arguments) on every rank; what each answered.

        `on` says what is done here once a rank tells a word.
        """
        for index, quota in enumerate(cores):
            self.set_cores(index, quota)
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            for index, rank in enumerate(self._ranks):
                order = {
                    "function": function,
                    "arguments": arguments,
                    "folder": name,
                    "rank": index,
                    "world": len(self._ranks),
                    "pace": str(self._pace(index)) if self._bed is None else None,
                }
                _stream(rank.stdin).write(json.dumps(order).encode() + b"\n")
            self._await(Path(name), dict(on or {}), time.monotonic() + limit_s)
            return [json.loads((Path(name) / f"answer-{index}").read_text()) for index in range(len(self._ranks))]

    def _await(self, folder: Path, on: dict[str, Callable[[], None]], deadline: float) -> None:
        waiting = list(self._ranks)
        while waiting:
            ready, _, _ = select.select([_stream(rank.stdout) for rank in waiting], [], [], POLL_S)
            for word in [word for word in on if (folder / word).exists()]:
                on.pop(word)()
                (folder / f"{word}-done").touch()
            for rank in [rank for rank in waiting if rank.stdout in ready]:
                self._hear(rank, deadline)
                waiting.remove(rank)
            if time.monotonic() > deadline:
                raise SystemExit("Ranks took too long; nothing more is known.")

    def _hear(self, rank: subprocess.Popen[bytes], deadline: float) -> None:
        """A rank says 0 when it is ready for the first order, and after each that was carried out."""
        stream = _stream(rank.stdout)
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        if not ready or stream.read(2) != b"0\n":
            raise SystemExit("A rank failed; its words are above." if ready else "A rank took too long.")


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
