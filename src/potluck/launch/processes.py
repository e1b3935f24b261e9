"""Workers on this machine: starts them, watches over them, and tells what became of them.

Imports no torch. A worker that fails ends the others within seconds, and its last words are said once. When we
ourselves are killed, however, the workers see our pipe close and end too.
"""

import codecs
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from potluck.environment import LAST_WORDS, ONLY, PARENT_PIPE, RENDEZVOUS, machine_bytes, usable_cores
from potluck.errors import ConfigError, Interrupted, WorkerLost
from potluck.files import write_whole
from potluck.fleet.invite import INVITE
from potluck.link.ranks import NODE, RANKS, Request
from potluck.show.output import COLOURS
from potluck.show.small_terminal import SmallTerminal
from potluck.signals import Interrupts, held_back
from potluck.system import KILL, heard_by, listen, signal_apart, start_apart
from potluck.train.arguments import WorkersConfig
from potluck.waiting import POLL_S, wait_until
from potluck.words import plural, say, size

GRACE_S = 3.0
"""How long the others have to end by themselves, once one has failed, before they are ended: within a collective they
would wait for it as long as for a slow one."""
SETTLE_S = 0.1
"""How long a row that a program might yet go up to is no line."""
WORKER_BYTES = 100_000_000
"""Memory that a worker has for itself when it has loaded torch, at the least."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Lines that a worker printed, and what it draws."""

    worker: str
    lines: list[str]
    drawn: list[str]
    """Rows that may still change, such as a progress bar's."""
    is_error: bool
    """It came by standard error."""


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    last_words: Path
    forwarders: list[threading.Thread]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int:
        return self.process.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the worker and whatever it has started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
            signal_apart(self.process, number)

    def words(self) -> str:
        try:
            return self.last_words.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # it was killed, or had nothing to say
            return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpan:
    """The ranks of a group that are on this machine, where others are elsewhere."""

    first: int
    world: int
    address: str
    """Address of rank 0's machine, where all of them meet."""
    port: int
    place: int = 0
    """Index of the first among all ranks on this machine, where several commands start some."""
    places: int = 1
    """How many ranks this machine has in all."""

    def environment(self) -> dict[str, str]:
        return {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.places),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def launch(command: list[str], config: WorkersConfig, only: int | None = None, span: RankSpan | None = None) -> int:
    """Runs `command` (for potluck.launch.worker) on every worker until all have ended. Returns the exit code.

    `only`: this one of them, whom the others, elsewhere, meet in a store. `span`: as part of a larger group.
    """
    check_room(config.count if only is None else 1)
    if only is not None and not 0 <= only < config.count:
        raise ConfigError(f"--only takes one of the workers 0 to {config.count - 1}, not {only}.")
    workers = StartedWorkers(command, worker_environment(config))
    with contextlib.ExitStack() as stack:
        stack.callback(workers.close, KILL)
        group = span.environment() if span else group_environment(config.count, workers.folder / "rendezvous")
        if only is not None:
            group |= {ONLY: "1", "LOCAL_WORLD_SIZE": "1"}
        begin, first = (span.first, span.place - span.first) if span else (0, 0)
        for rank in range(begin, begin + config.count) if only is None else [only]:
            workers.start_rank(rank, group, first=first)
        return _watch(workers.ranks)


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
        "MASTER_PORT": str(free_port()),
    }


class StartedWorkers:
    """Processes that end with this one, however it ends, and all of them with close()."""

    def __init__(
        self, command: list[str], environment: dict[str, str], on_output: Callable[[Printed], None] | None = None
    ) -> None:
        """`command`: for potluck.launch.worker. `environment`: what all of them have. `on_output`: hears, on threads,
        what all of them print; without it the first has the terminal."""
        self.ranks: list[Worker] = []
        self._on_output = on_output
        self._command = command
        self._temporary = tempfile.TemporaryDirectory(prefix="potluck-")
        self.folder = Path(self._temporary.name)
        self._read_end, self._write_end = os.pipe()
        self._environment = environment | {PARENT_PIPE: heard_by(self._read_end)}

    def start_rank(self, rank: int, more: dict[str, str], *, first: int = 0, of: str = "") -> Worker:
        """`first`: the place on this machine of its group's rank 0; `of`: whose further rank it is, if it is one."""
        last_words, environment = self.folder / f"last-words-{of}{rank}", self._environment | more
        is_alone = ONLY in environment
        place = 0 if is_alone else first + rank
        own = {"RANK": str(rank), "LOCAL_RANK": str(place), LAST_WORDS: str(last_words)}
        speaks_freely = rank == 0 or is_alone  # it has the terminal; the others' lines are marked with their rank
        pipes: tuple[int | None, int | None] = (subprocess.PIPE, subprocess.STDOUT)
        if self._on_output is not None:  # all of them: whoever asked for the lines shows them among other things
            pipes = subprocess.PIPE, subprocess.PIPE
            own["PYTHONUNBUFFERED"] = "1"  # else Python keeps lines back where no terminal reads them
        elif speaks_freely:
            pipes = None, None
        with held_back():
            process = subprocess.Popen(
                [sys.executable, "-m", "potluck.launch.worker", *self._command],
                env=environment | own,
                stdout=pipes[0],
                stderr=pipes[1],
                **start_apart(self._read_end),  # Ctrl-C reaches us alone, and we pass it on exactly once
            )
        name = environment.get("POTLUCK_NAME", "") + (f".{rank}" if of else "")
        forwarders = [
            # A thread each: a pipe that nobody reads fills up, and then the worker stands still.
            threading.Thread(target=_forward, args=(stream, self._teller(name, f"{of}{rank}", is_error)), daemon=True)
            for stream, is_error in ((process.stdout, False), (process.stderr, True))
            if stream is not None
        ]
        for forwarder in forwarders:
            forwarder.start()
        self.ranks.append(Worker(rank, process, last_words, forwarders))
        return self.ranks[-1]

    def _teller(self, name: str, number: str, is_error: bool) -> Callable[[list[str], list[str]], None]:
        if (tell := self._on_output) is not None:
            return lambda lines, drawn: tell(Printed(name, lines, drawn, is_error))
        return lambda lines, drawn: _print_marked(number, lines)

    def drain(self, timeout_s: float) -> None:
        """Wait until all that ended workers have printed is told."""
        until = time.monotonic() + timeout_s
        for forwarder in (each for rank in self.ranks for each in rank.forwarders):
            forwarder.join(timeout=max(0.0, until - time.monotonic()))

    @property
    def is_alive(self) -> bool:
        return any(rank.is_alive for rank in self.ranks)

    def close(self, first: signal.Signals = signal.SIGTERM) -> None:
        end_workers(self.ranks, first)
        os.close(self._read_end)
        os.close(self._write_end)
        self._temporary.cleanup()


def _forward(stream: IO[bytes], tell: Callable[[list[str], list[str]], None]) -> None:
    """`tell` gets whole lines, and what is still drawn over. An empty line, such as one that a bar leaves where it has
    cleared itself away, would show the worker's name alone."""
    terminal, decoder = SmallTerminal(), codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        if terminal.holds and not _has_more(stream):
            tell(_with_letters(terminal.settle()), terminal.drawn)
        if not (data := os.read(stream.fileno(), 1 << 16)):
            break
        tell(_with_letters(terminal.feed(decoder.decode(data))), terminal.drawn)
    tell(_with_letters(terminal.close()), [])


def _with_letters(lines: list[str]) -> list[str]:
    return [line for line in lines if COLOURS.sub("", line).strip()]


def _has_more(stream: IO[bytes]) -> bool:
    """Whether more is printed within a moment. Where pipes cannot be asked, nothing is waited for."""
    if sys.platform == "win32":
        return False
    return bool(select.select([stream], [], [], SETTLE_S)[0])


def _print_marked(who: str, lines: list[str]) -> None:
    for line in lines:
        print(f"[worker {who}] {line}", file=sys.stderr, flush=True)


def _watch(team: list[Worker]) -> int:
    """Watch until all have ended, or one has failed and the rest have been ended. Returns the exit code."""

    def ask_to_stop(number: int) -> None:
        say("Finishing this step. Ctrl-C again stops at once.")
        pass_on(signal.SIGINT, team)  # also for SIGTERM: they may have got that themselves, and twice is at once

    interrupts = Interrupts(ask_to_stop)
    ended: list[Worker] = []  # in the order in which they did
    with interrupts.handled():
        while len(ended) < len(team) and not _failed(ended, interrupts):
            if interrupts.count > 1:
                say("Stopped at once. What was saved before is whole; what was trained since then is lost.")
                return Interrupted.exit_code
            time.sleep(POLL_S)
            _note_ends(team, ended)
        if all(worker.code == 0 for worker in ended):
            return 0
        # They notice by themselves that a peer is gone, and are ended if they do not.
        wait_until(lambda: _note_ends(team, ended), GRACE_S)
        end_workers(team, signal.SIGTERM)
        failed = _failed(ended, interrupts)
        return _report(_explained(failed) if failed else _speaker(ended))


def _failed(ended: list[Worker], interrupts: Interrupts) -> list[Worker]:
    """Select the workers that failed by themselves. One that only lost a peer, or was asked to stop, did not."""
    excused = {0, WorkerLost.exit_code} | ({Interrupted.exit_code} if interrupts.count else set())
    return [worker for worker in ended if worker.code not in excused]


def _explained(failed: list[Worker]) -> Worker:
    """The first that failed; but one that says why goes before one that was ended without a word."""
    return next((worker for worker in failed if worker.words().startswith("potluck: ")), failed[0])


def _speaker(ended: list[Worker]) -> Worker:
    """Nobody failed by itself. Of those who were asked to stop, the lowest rank knows where the run was saved."""
    return min((worker for worker in ended if worker.code), key=lambda w: (w.code != Interrupted.exit_code, w.rank))


def _note_ends(team: list[Worker], ended: list[Worker]) -> bool:
    """Whether all have ended."""
    ended += [worker for worker in team if worker not in ended and not worker.is_alive]
    return len(ended) == len(team)


def _report(worker: Worker) -> int:
    code, words = worker.code, worker.words()
    if code < 0:
        name = signal.Signals(-code).name
        hint = " This is often the system running out of memory." if -code == KILL else ""
        if -code == signal.SIGABRT:
            hint = " If some workers alone called what all must call, such as fleet.save(), call it on every worker."
        say(f"Worker {worker.rank} was ended by {name}, so the others stopped too.{hint} {words}".rstrip())
        return 128 - code
    if words.startswith("potluck: "):
        print(words, file=sys.stderr, flush=True)
    elif words:
        say(f"Worker {worker.rank} failed, so the others stopped too. Its last words: {words}")
    elif code != Interrupted.exit_code:
        say(f"Worker {worker.rank} stopped with exit code {code}, so the others stopped too.")
    return code


def pass_on(number: int, workers: Iterable[Worker]) -> None:
    """Pass a signal on to each process that still runs, and not to what it has started."""
    for worker in workers:
        if worker.is_alive:
            worker.process.send_signal(number)


def end_workers(team: list[Worker], first: signal.Signals) -> None:
    """Ends what still runs: with the given signal, and after a second with SIGKILL, which a worker that is stopped, or
    whose script ignores signals, cannot outlive."""
    for worker in team:
        worker.signal(first)
    wait_until(lambda: not any(worker.is_alive for worker in team), 1.0)
    for worker in team:
        worker.signal(KILL)
        worker.process.wait()
        for forwarder in worker.forwarders:
            forwarder.join(timeout=1.0)  # a process that the script left behind may hold its pipe open


def check_room(workers: int) -> None:
    """Processes that a machine has no room for are refused before it grinds to a halt, or the system ends one."""
    has = machine_bytes()
    most = has // WORKER_BYTES
    if workers > most:
        raise ConfigError(
            f"{plural(workers, 'worker')} on one machine take at least {size(workers * WORKER_BYTES)} of memory before"
            f" they hold a model, and this one has {size(has)}. Start {most:,} at most; one for each GPU, or for each"
            f" of its {plural(usable_cores(), 'core')}, is usual."
        )


def free_port() -> int:
    with listen("", 0) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Team:
    """The ranks of one worker, of which most have but one."""

    ranks: list[Worker]
    environment: dict[str, str]
    request: Request
    """The file in which the first rank asks for the others."""
    failed_at: float | None = None
    is_told: bool = False

    @property
    def is_alive(self) -> bool:
        return any(rank.is_alive for rank in self.ranks)

    def end_with_its_first(self, now: float) -> None:
        """End the other ranks once one has failed, if they do not end by themselves.

        One that was asked to leave has not failed: the first may still be handing over what this worker holds.
        """
        if all(rank.is_alive or rank.code in (0, Interrupted.exit_code) for rank in self.ranks):
            return
        self.failed_at = self.failed_at or now
        if now - self.failed_at > GRACE_S:
            end_workers(self.ranks, signal.SIGTERM)

    @property
    def blamed(self) -> Worker:
        """The rank that failed by itself. One that only lost another, or was asked to stop, did not."""
        excused = (0, WorkerLost.exit_code, Interrupted.exit_code)
        failed = [rank for rank in self.ranks if rank.code not in excused]
        return next(iter(failed or [rank for rank in self.ranks if rank.code]), self.ranks[0])


class WorkerPool(StartedWorkers):
    def __init__(
        self,
        command: list[str],
        config: WorkersConfig,
        environment: dict[str, str],
        on_output: Callable[[Printed], None] | None = None,
    ) -> None:
        check_room(config.count)
        super().__init__(command, worker_environment(config) | environment, on_output)
        self._environment |= {RANKS: str(config.ranks)} if config.ranks is not None else {}
        if INVITE in environment:  # in a file: what is in an environment is in whatever shows one
            write_whole(place := self.folder / "invite", environment[INVITE] + "\n", 0o600)
            self._environment[INVITE] = str(place)
        for name in (RENDEZVOUS, "WORLD_SIZE"):  # of a group that started us: our workers are in none
            self._environment.pop(name, None)
        self._teams: list[Team] = []

    def start(self, names: list[str]) -> None:
        for number, name in enumerate(names):
            request = Request(self.folder / f"ranks-{number}")
            environment = {"POTLUCK_NAME": name, "LOCAL_WORLD_SIZE": str(len(names))}
            first = self.start_rank(number, environment | {NODE: str(request.place)})
            self._teams.append(Team([first], environment, request))

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self.ranks if rank.is_alive]

    def news(self) -> list[tuple[Worker, str]]:
        """Workers that have ended since this was last asked, and what became of each, as a sentence.

        Of several ranks, the one that ended it. A worker that asks for more ranks gets them here.
        """
        endings = []
        for number, team in enumerate(self._teams):
            if (ranks := team.request.look()) is not None:
                self._complete(number, team, ranks)
            team.end_with_its_first(time.monotonic())
            if not team.is_alive and not team.is_told:
                team.is_told = True
                endings.append((team.blamed, tell_end(team)))
        return endings

    def _complete(self, number: int, team: Team, ranks: int) -> None:
        """Starts the other ranks of a worker, and tells the first by what they meet."""
        first = number * ranks
        group = group_environment(ranks, team.request.place.with_suffix(".rendezvous"))
        group["LOCAL_WORLD_SIZE"] = str(ranks * len(self._teams))
        # The first is told last: it would wait in the rendezvous for one that could not be started.
        for rank in range(1, ranks):
            team.ranks.append(self.start_rank(rank, team.environment | group, first=first, of=f"{number}."))
        team.request.answer(group | {"RANK": "0", "LOCAL_RANK": str(first)})

    def interrupt(self) -> None:
        pass_on(signal.SIGINT, self.ranks)

    def end_all_but(self, names: Collection[str]) -> None:
        """End the workers that have none of these names."""
        others = [team for team in self._teams if team.environment["POTLUCK_NAME"] not in names]
        end_workers([rank for team in others for rank in team.ranks], signal.SIGTERM)

    def kill(self) -> None:
        """Kill all workers at once, whatever they do: others are given their work."""
        end_workers(self.ranks, KILL)


def tell_all_ended(ended: Sequence[Worker], *, has_joined: bool) -> str:
    """Say that all workers of this machine have ended without a step, and how, as the beginning of a sentence.

    `has_joined`: whether any of them has ever reached the host.
    """
    every = "Both" if len(ended) == 2 else f"All {len(ended)}"
    who = "The worker on this machine has" if len(ended) == 1 else f"{every} workers on this machine have"
    codes = sorted({worker.code for worker in ended})
    if codes == [0] and not has_joined:
        return f"{who} ended without joining: the script came to its end and never called potluck.init()"
    hows = [f"exit code {code}" if code >= 0 else signal.Signals(-code).name for code in codes]
    where = "before the first step" if has_joined else "without joining"
    return f"{who} ended {where} ({', '.join(hows)})"


def tell_end(team: Team) -> str:
    """Say what became of a worker, as a sentence; empty if all is well."""
    worker = team.blamed
    words = worker.words().removeprefix("potluck: ")
    if worker.code in (0, Interrupted.exit_code):
        return words
    if worker.code < 0:
        count = len(team.ranks)
        others = f", which was rank {team.ranks.index(worker)} of {count}, so that all of it ended" if count > 1 else ""
        return f"A worker on this machine was ended by {signal.Signals(-worker.code).name}{others}. {words}".strip()
    return words or f"A worker on this machine stopped with exit code {worker.code}."
