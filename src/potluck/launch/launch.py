"""Workers on this machine: starts them, watches over them, and tells what became of them.

Imports no torch. A worker that fails ends the others within seconds, and its last words are said once; where they had
kept copies of each other's parts in memory, those who are left are then started anew and go on from there. When we
ourselves are killed, however, the workers see our pipe close and end too.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO

from potluck.environment import LAST_WORDS, ONLY, PARENT_PIPE, POLL_S, RENDEZVOUS, machine_bytes, usable_cores
from potluck.errors import ConfigError, Interrupted, WorkerLost
from potluck.save.memory import MEMORY, Recovery, Start, first_start
from potluck.train.order import WorkersConfig
from potluck.words import plural, size

GRACE_S = 3.0
"""How long the others have to end by themselves, once one has failed, before they are ended."""
WORKER_BYTES = 100_000_000
"""What a worker has for itself when it has loaded torch, at the least."""


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    last_words: Path
    forwarder: threading.Thread | None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int:
        return self.process.returncode

    def signal(self, number: int) -> None:
        """To the worker and whatever it has started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def words(self) -> str:
        try:
            return self.last_words.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def launch(command: list[str], config: WorkersConfig, only: int | None = None) -> int:
    """Runs `command` (for potluck.launch.worker) on every worker until all have ended. Returns the exit code.

    `only`: this one of them, whom the others, elsewhere, meet in a store.
    """
    insist_on_room(config.count if only is None else 1)
    if only is not None:
        if not 0 <= only < config.count:
            raise ConfigError(f"--only takes one of the workers 0 to {config.count - 1}, not {only}.")
        ended = _run_team(command, config, None, only)
        assert isinstance(ended, int)
        return ended
    with first_start(config.count) as start:
        while not isinstance(ended := _run_team(command, config, start), int):
            assert start is not None
            start = start.next(ended)
            config = replace(config, count=len(start.ranks))
        return ended


def _run_team(
    command: list[str], config: WorkersConfig, start: Start | None, only: int | None = None
) -> int | Recovery:
    """The exit code; or what those who are left can go on from."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        read_end, write_end = os.pipe()
        team: list[Worker] = []
        try:
            environment = worker_environment(config) | group_environment(config.count, Path(folder) / "rendezvous")
            environment |= {PARENT_PIPE: str(read_end), MEMORY: str(start.folder) if start is not None else ""}
            if only is not None:
                environment |= {ONLY: "1", "LOCAL_WORLD_SIZE": "1"}
            for rank in range(config.count) if only is None else [only]:
                team.append(start_worker(rank, command, environment, Path(folder), read_end))
            return _watch(team, start)
        finally:
            end_workers(team, signal.SIGKILL)
            os.close(read_end)
            os.close(write_end)


def worker_environment(config: WorkersConfig) -> dict[str, str]:
    """Ours, and what a worker computes with."""
    threads = config.threads or max(1, usable_cores() // config.count)
    unless_set = {"OMP_NUM_THREADS": str(threads)}
    chosen = {"OMP_NUM_THREADS": str(threads)} if config.threads is not None else {}
    return unless_set | dict(os.environ) | chosen


def group_environment(count: int, rendezvous: Path) -> dict[str, str]:
    """How workers of one group find each other, on this machine."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # They would otherwise listen on whatever interface this machine's name resolves to.
    unless_set = {name: loopback for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
    return unless_set | {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        RENDEZVOUS: str(rendezvous),
        # Only for scripts that make a process group themselves; ours meets through the file above.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }


def start_worker(
    rank: int, command: list[str], shared: dict[str, str], folder: Path, read_end: int, *, first: int = 0, of: str = ""
) -> Worker:
    """`first`: the place on this machine of its group's rank 0; `of`: whose further rank it is, if it is one."""
    last_words = folder / f"last-words-{of}{rank}"
    is_alone = ONLY in shared
    place = 0 if is_alone else first + rank
    environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(place), LAST_WORDS: str(last_words)}
    speaks_freely = rank == 0 or is_alone  # it has the terminal; the others' lines are marked with their rank
    process = subprocess.Popen(
        [sys.executable, "-m", "potluck.launch.worker", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if speaks_freely else subprocess.PIPE,
        stderr=None if speaks_freely else subprocess.STDOUT,
        pass_fds=(read_end,),
        start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on exactly once
    )
    forwarder = None
    if process.stdout is not None:
        forwarder = threading.Thread(target=_forward, args=(process.stdout, f"{of}{rank}"), daemon=True)
        forwarder.start()
    return Worker(rank, process, last_words, forwarder)


def _forward(stream: IO[bytes], who: str) -> None:
    for line in stream:
        text = line.decode("utf-8", errors="replace").rstrip("\n")
        print(f"[worker {who}] {text}", file=sys.stderr, flush=True)


def _watch(team: list[Worker], start: Start | None) -> int | Recovery:
    """Until all have ended, or one has failed and the rest have been ended; they may go on from what they had kept."""
    interrupts = _Interrupts(team)
    ended: list[Worker] = []  # in the order in which they did
    with interrupts:
        while len(ended) < len(team) and not _failed(ended, interrupts):
            if interrupts.count > 1:
                _say("Stopped at once. The last checkpoint is whole.")
                return Interrupted.exit_code
            time.sleep(POLL_S)
            ended += [worker for worker in team if worker not in ended and not worker.is_alive]
        if all(worker.code == 0 for worker in ended):
            return 0
        _let_the_others_end(team, ended)
        failed = _failed(ended, interrupts)
        recovery = "" if start is None or interrupts.count or _has_said_why(failed) else _recover(start, failed)
        if isinstance(recovery, Recovery):
            return recovery
        code = _report(failed[0] if failed else _speaker(ended))
        if recovery:
            _say(recovery)
        return code


def _failed(ended: list[Worker], interrupts: "_Interrupts") -> list[Worker]:
    """Those who failed by themselves. One that only lost a peer, or was asked to stop, did not."""
    excused = {0, WorkerLost.exit_code} | ({Interrupted.exit_code} if interrupts.count else set())
    return [worker for worker in ended if worker.code not in excused]


def _has_said_why(failed: list[Worker]) -> bool:
    """What we refuse on purpose, such as a setting, would be refused again."""
    return not failed or any(worker.words().startswith("potluck: ") for worker in failed)


def _recover(start: Start, lost: list[Worker]) -> Recovery | str:
    """What those who are left can go on from, said to the person; or why they cannot."""
    ranks = [worker.rank for worker in lost]
    start.lose(ranks)
    recovery = start.plan_recovery(ranks)
    if isinstance(recovery, Recovery):
        left = len(recovery.ranks)
        go, they = ("goes", "it") if left == 1 else ("go", "they")
        fates = " ".join(f"Worker {worker.rank} {_fate(worker)}." for worker in lost)
        _say(f"{fates} {plural(left, 'worker')} {go} on from step {recovery.step}, which {they} had kept in memory.")
    return recovery


def _fate(worker: Worker) -> str:
    if worker.code < 0:
        return f"was ended by {signal.Signals(-worker.code).name}"
    words = worker.words().rstrip(".")
    return f"failed: {words}" if words else f"stopped with exit code {worker.code}"


def _speaker(ended: list[Worker]) -> Worker:
    """Nobody failed by itself. Of those who were asked to stop, the lowest rank knows where the run was saved."""
    return min((worker for worker in ended if worker.code), key=lambda w: (w.code != Interrupted.exit_code, w.rank))


def _let_the_others_end(team: list[Worker], ended: list[Worker]) -> None:
    """They notice by themselves that a peer is gone, and are ended if they do not."""
    deadline = time.monotonic() + GRACE_S
    while any(worker.is_alive for worker in team) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        ended += [worker for worker in team if worker not in ended and not worker.is_alive]
    end_workers(team, signal.SIGTERM)


def _report(worker: Worker) -> int:
    code, words = worker.code, worker.words()
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

    def __init__(self, team: list[Worker]) -> None:
        self.count = 0
        self._team = team

    def __enter__(self) -> None:
        self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            _say("Finishing this step. Ctrl-C again stops at once.")
            for worker in self._team:
                if worker.is_alive:
                    worker.process.send_signal(number)


def end_workers(team: list[Worker], first: signal.Signals) -> None:
    """Ends what still runs: with the given signal, and after a second with SIGKILL."""
    for worker in team:
        worker.signal(first)
    deadline = time.monotonic() + 1.0
    while any(worker.is_alive for worker in team) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for worker in team:
        worker.signal(signal.SIGKILL)
        worker.process.wait()
        if worker.forwarder is not None:
            worker.forwarder.join(timeout=1.0)


def insist_on_room(workers: int) -> None:
    """Processes that a machine has no room for are refused before it grinds to a halt, or the system ends one."""
    has = machine_bytes()
    most = has // WORKER_BYTES
    if workers > most:
        raise ConfigError(
            f"{plural(workers, 'worker')} on one machine take at least {size(workers * WORKER_BYTES)} of memory before"
            f" they hold a model, and this one has {size(has)}. Start {most:,} at most; one for each GPU, or for each"
            f" of its {plural(usable_cores(), 'core')}, is usual."
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(sentence: str) -> None:
    print(f"potluck: {sentence}", file=sys.stderr, flush=True)
