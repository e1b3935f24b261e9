"""Workers on this machine: starts them, watches over them, and tells what became of them.

Imports no torch. A worker that fails ends the others within seconds, and its last words are said once. When we
ourselves are killed, however, the workers see our pipe close and end too.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from potluck.errors import Interrupted, WorkerLost
from potluck.train.order import WorkersConfig

LAST_WORDS = "POTLUCK_LAST_WORDS"
PARENT_PIPE = "POTLUCK_PARENT_PIPE"
GRACE_S = 3.0
"""How long the others have to end by themselves, once one has failed, before they are ended."""
POLL_S = 0.02


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    last_words: Path

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    def words(self) -> str:
        try:
            return self.last_words.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def launch(command: list[str], config: WorkersConfig) -> int:
    """Runs `command` (for potluck.train.worker) on every worker until all have ended. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        read_end, write_end = os.pipe()
        team: list[Worker] = []
        try:
            environment = _shared_environment(config, Path(folder))
            environment[PARENT_PIPE] = str(read_end)
            for rank in range(config.count):
                team.append(_start(rank, command, environment, Path(folder), read_end))
            return _watch(team)
        finally:
            _end([worker.process for worker in team], signal.SIGKILL)
            os.close(read_end)
            os.close(write_end)


def _shared_environment(config: WorkersConfig, folder: Path) -> dict[str, str]:
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.count)
    chosen = {
        "WORLD_SIZE": str(config.count),
        "LOCAL_WORLD_SIZE": str(config.count),
        "POTLUCK_RENDEZVOUS": str(folder / "rendezvous"),
        # Only for scripts that make a process group themselves; ours meets through the file above.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    unless_set = {
        "OMP_NUM_THREADS": str(threads),
        # Gloo would otherwise listen on whatever interface this machine's name resolves to.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    if config.threads is not None:
        chosen["OMP_NUM_THREADS"] = str(threads)
    return unless_set | dict(os.environ) | chosen


def _start(rank: int, command: list[str], shared: dict[str, str], folder: Path, read_end: int) -> Worker:
    last_words = folder / f"last-words-{rank}"
    environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), LAST_WORDS: str(last_words)}
    speaks_freely = rank == 0  # it has the terminal; the others' lines are marked with their rank
    process = subprocess.Popen(
        [sys.executable, "-m", "potluck.train.worker", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if speaks_freely else subprocess.PIPE,
        stderr=None if speaks_freely else subprocess.STDOUT,
        pass_fds=(read_end,),
        start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on exactly once
    )
    if process.stdout is not None:
        threading.Thread(target=_forward, args=(process.stdout, rank), daemon=True).start()
    return Worker(rank, process, last_words)


def _forward(stream: IO[bytes], rank: int) -> None:
    for line in stream:
        text = line.decode("utf-8", errors="replace").rstrip("\n")
        print(f"[worker {rank}] {text}", file=sys.stderr, flush=True)


def _watch(team: list[Worker]) -> int:
    """Until all have ended, or one has failed and the rest have been ended."""
    processes = [worker.process for worker in team]
    interrupts = _Interrupts(processes)
    with interrupts:
        while all(worker.process.poll() is None for worker in team):
            time.sleep(POLL_S)
            if interrupts.count > 1:
                _say("Stopped at once. The last checkpoint is whole.")
                return Interrupted.exit_code
        while any(process.poll() is None for process in processes) and not any(w.failed for w in team):
            time.sleep(POLL_S)
        if not any(worker.failed for worker in team):
            return 0
        cause = _find_cause(team)
        _end(processes, signal.SIGTERM)
        return _report(cause)


def _find_cause(team: list[Worker]) -> Worker:
    """The worker that failed by itself. Those that only lost a peer say so by their exit code."""
    first = next(worker for worker in team if worker.failed)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        own = [w for w in team if w.failed and w.process.returncode != WorkerLost.exit_code]
        if own and all(worker.process.poll() is not None for worker in team):
            return own[0]
        if all(worker.process.poll() is not None for worker in team):
            break
        time.sleep(POLL_S)
    own = [w for w in team if w.failed and w.process.returncode != WorkerLost.exit_code]
    return own[0] if own else first


def _report(worker: Worker) -> int:
    code, words = worker.process.returncode, worker.words()
    if code < 0:
        name = signal.Signals(-code).name
        hint = " This is often the system running out of memory." if -code == signal.SIGKILL else ""
        _say(f"Worker {worker.rank} was ended by {name}, so the others stopped too.{hint} {words}".rstrip())
        return 128 - code
    if words.startswith("potluck: "):
        print(words, file=sys.stderr, flush=True)
    elif words:
        _say(f"Worker {worker.rank} failed, so the others stopped too. Its last words: {words}")
    elif code != Interrupted.exit_code:
        _say(f"Worker {worker.rank} stopped with exit code {code}, so the others stopped too.")
    return code


class _Interrupts:
    """Ctrl-C or SIGTERM: the first is passed on to the workers, who finish their step; the second ends everything."""

    def __init__(self, processes: "list[subprocess.Popen[bytes]]") -> None:
        self.count = 0
        self._processes = processes

    def __enter__(self) -> None:
        self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            _say("Finishing this step. Ctrl-C again stops at once.")
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)


def _end(processes: "list[subprocess.Popen[bytes]]", first: signal.Signals) -> None:
    """Ends what still runs: with the given signal, and after a second with SIGKILL."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(first)
    deadline = time.monotonic() + 1.0
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(sentence: str) -> None:
    print(f"potluck: {sentence}", file=sys.stderr, flush=True)
