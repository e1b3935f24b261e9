"""`potluck join`: workers of this machine in a run that is led elsewhere; they go when somebody wants the machine.

While their owner wants it, this process waits without them, and starts them again afterwards. When the machine is taken
back, or on Ctrl-C, it ends. Each worker hands over its own work when it goes. Imports no torch.
"""

import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from potluck.environment import IGNORED, LEAVING, QUIET, RETURNING, usable_cores
from potluck.errors import ConfigError, Interrupted
from potluck.fleet.base_folder import fetch_base
from potluck.fleet.invite import INVITE, Invite, read_invite
from potluck.fleet.script import ask_for_script
from potluck.launch.absence import Absence, Hours, YieldWatch, decide_absence, family, find_use
from potluck.launch.control import Joiner, controlled
from potluck.launch.notices import Notice, NoticeWatch
from potluck.launch.options import HostOptions
from potluck.launch.processes import WorkerPool
from potluck.signals import Interrupts, handling, held_back
from potluck.system import HAS_GROUPS
from potluck.train.arguments import FILES_ASKED, WorkersConfig, as_settings, joining_command
from potluck.waiting import POLL_S
from potluck.wire.words import clean
from potluck.words import say

GRACE_S = 25.0
"""Seconds left after SIGTERM where nobody says how many: less than the 30 s of Kubernetes and of SLURM."""
MARGIN_S = 2.0
"""Seconds that are left before the end of a notice: a host that loses a machine without a word waits for it in vain."""
LOOK_S = 0.25
"""How often it is looked whether it may come back."""
NOTICE_SIGNAL = getattr(signal, "SIGUSR1", None)
"""Signal that `sbatch --signal=USR1@120` sends to all processes of a job; heard with --watch."""


@dataclass(frozen=True)
class JoinTerms:
    """The terms on which this machine takes part."""

    watch: str = "off"
    hours: Hours | None = None
    yields: bool = False


def join(
    invite: str,
    script: list[str],
    config: WorkersConfig,
    settings: tuple[str, ...],
    terms: JoinTerms = JoinTerms(),
    *,
    fetches_base: bool = False,
) -> int:
    """`fetches_base`: the model that is fine-tuned comes from the host, if it is not here yet."""
    if script and script[0].startswith("-"):
        raise ConfigError(f"Options come before the invite: potluck join {script[0]} ... INVITE.")
    if script and not Path(script[0]).is_file():
        raise ConfigError(f"There is no script {script[0]}.")
    host_invite = take_invite(invite)
    if len(script) == 1:
        script = _with_arguments_of_host(script, host_invite)
    elif script[1:] == ["--"]:
        script = script[:1]
    if fetches_base:
        settings = (*settings, *as_settings({"model.hf": str(_fetched(host_invite))}))
    name = f"{platform.node()}-{os.getpid()}"
    names = [f"{name}-{number}" if config.count > 1 else name for number in range(config.count)]
    with controlled(name, f"{host_invite.host} port {host_invite.port}") as control:
        session = JoinSession(config, terms, control, names)
        while True:
            command = joining_command(script, settings)
            code, asked = _take_part(session, command, host_invite.line(), is_quiet=config.count > 1)
            if not asked or not _says_yes(asked):
                return code
            settings = (*settings, *as_settings({"data.paths": asked}))


def _with_arguments_of_host(script: list[str], invite: Invite) -> list[str]:
    """A joiner that gives its script no arguments runs it as the host does, which is said."""
    hosted = ask_for_script(invite, f"{platform.node()}-{os.getpid()}-asks", say)
    if hosted is None or not hosted.arguments:
        return script
    command = [*script, *hosted.arguments]
    say(f"Running {clean(shlex.join(command))}, with the host's arguments. Write -- after the script for none.")
    return command


def _fetched(invite: Invite) -> Path:
    """The folder of the host's model on this machine."""
    console = Console(stderr=True, highlight=False)
    columns: list[Any] = [TextColumn("Fetching the model"), BarColumn(), DownloadColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def tell(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        folder = fetch_base(invite, BASES, on_progress=tell if console.is_terminal else None)
    if folder is None:
        raise ConfigError(
            "This host has no model to give. Name a folder that holds the one that it trains, with potluck join --base"
            " FOLDER INVITE; or get it with hf download ID, and join without."
        )
    say(f"The model is in {folder}.")
    return folder


def _take_part(session: "JoinSession", command: list[str], line: str, *, is_quiet: bool) -> tuple[int, list[str]]:
    """The exit code; and if workers ended since the host's recipe names files on this machine, those files."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        question = Path(folder) / "files"
        environment = {INVITE: line, FILES_ASKED: str(question)} | ({QUIET: "1"} if is_quiet else {})
        code = session.run(command, environment, Path(folder))
        return code, json.loads(question.read_text(encoding="utf-8")) if question.exists() else []


def _says_yes(paths: list[str]) -> bool:
    """The default is no; without a terminal nobody is asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    for path in paths:
        # What a path is on this machine; and a name with escape sequences in it shows as what it is.
        print(f"  {os.path.realpath(path)!r}", file=sys.stderr)
    print("Read these files, and let the host learn from what is in them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


BASES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potluck" / "bases"
"""Folder of models that came from hosts."""

HIDDEN = "@"
"""Stands for an invite that has moved to the environment."""


def take_invite(argument: str) -> Invite:
    """Read the invite that this command was given: the line itself, its file, or - for standard input.

    With the line among its arguments, which every user of the machine can read, the command is started again without.
    """
    invite = read_invite(None if argument == HIDDEN else argument)
    invite.check_has_pin()
    # Where programs cannot be replaced, arguments are the user's own to read.
    if HAS_GROUPS and "://" in argument and argument in sys.argv:
        os.environ[INVITE] = invite.line()
        arguments = [HIDDEN if word == argument else word for word in sys.argv[1:]]
        with held_back():  # a Ctrl-C between the two programs would end the new one before it can answer
            os.execv(sys.executable, [sys.executable, "-m", "potluck.cli", *arguments])
    return invite


class JoinSession:
    def __init__(self, config: WorkersConfig, terms: JoinTerms, control: Joiner, names: list[str]) -> None:
        self._config = config
        self._control = control
        self._names = names
        self._terms = terms
        self._yielding: YieldWatch | None = None
        if terms.yields:
            self._yielding = YieldWatch(find_use(config.count * (config.ranks or 1), os.cpu_count() or usable_cores()))
        self._interrupts = Interrupts(lambda number: None)
        self._notices: NoticeWatch | None = None
        self._notice: Notice | None = None
        self._is_going = False
        """For good: it was said."""
        self._was_away = False
        self._patience_place: Path | None = None
        """Where a worker writes what its host told it, once it is in."""

    def run(self, command: list[str], environment: dict[str, str], folder: Path) -> int:
        """Run workers until the run is over for this machine. `folder`: for what parent and workers tell each other."""
        why, self._patience_place = folder / "leaving", folder / "patience"
        kept = self._patience_place
        environment = environment | {LEAVING: str(why), RETURNING: str(kept)}
        with ExitStack() as stack:
            stack.enter_context(self._interrupts.handled())
            if self._terms.watch != "off" and NOTICE_SIGNAL is not None:
                stack.enter_context(handling((NOTICE_SIGNAL,), self._on_notice_signal))
                environment[IGNORED] = f"{os.environ.get(IGNORED, '')} {signal.Signals(NOTICE_SIGNAL).name}"
            self._notices = stack.enter_context(closing(NoticeWatch(self._terms.watch, say)))
            while True:
                if not self._await_turn():
                    return Interrupted.exit_code
                why.unlink(missing_ok=True)  # of the time before: Ctrl-C in a worker would be told as that
                if self._was_away and not kept.exists():  # none of ours was in yet, so no host has told its own
                    kept.write_text(str(HostOptions.patience_s), encoding="utf-8")
                code = self._work(WorkerPool(command, self._config, environment), why)
                if code is not None:
                    return code

    # Why it goes

    def _on_notice_signal(self, number: int) -> None:
        self._notice = self._notice or Notice(signal.Signals(number).name, None)

    def _end(self) -> tuple[str, str] | None:
        """Why this machine goes for good, if it does: for its owner, and for the host."""
        now = time.time()
        is_in = self._patience_place is not None and self._patience_place.exists()
        when = "after this step" if is_in else "before it has joined"
        if self._notice is None and self._notices is not None:
            self._notice = self._notices.notice
        if self._notice is None and signal.SIGTERM in self._interrupts.heard:
            self._notice = Notice("SIGTERM", now + GRACE_S)
        if self._notice is not None:
            sentence = f"{self._notice.sentence(now)}: leaving {when}."
            return sentence, f"its machine is taken back ({self._notice.source})"
        if self._interrupts.count:
            return f"Leaving {when}. Ctrl-C again leaves at once.", "asked to stop"
        return None

    @property
    def _is_late(self) -> bool:
        """There is no time to be polite in."""
        seconds = self._notice.seconds(time.time()) if self._notice is not None else None
        return self._interrupts.count > 1 or (seconds is not None and seconds < MARGIN_S and self._is_going)

    # Waiting, and working

    def _find_absence(self, ours: Callable[[], Collection[int]]) -> Absence | None:
        """`ours`: our processes that compute, asked for only where others' use is measured."""
        use = self._yielding.look(time.monotonic(), ours) if self._yielding is not None else None
        return decide_absence(self._control.wish(), self._terms.hours, use, time.time())

    def _await_turn(self) -> bool:
        """Wait until nothing speaks against working. Returns whether that came."""
        shown: Absence | None = None
        while (absence := self._find_absence(tuple)) is not None:
            if shown is None or absence.reason != shown.reason:  # others' use alone changes every few seconds
                say(absence.sentence)
            if absence != shown:
                self._control.tell("paused", absence.sentence)
                shown = absence
            if self._end() is not None:
                say("Ended while it was away.")
                return False
            time.sleep(LOOK_S)
        self._was_away = self._was_away or shown is not None
        if shown is not None:
            say("Back: joining again.")
        self._control.tell("working", "It works.")
        return True

    def _work(self, pool: WorkerPool, why: Path) -> int | None:
        """Work until all workers have ended. None: they are to be started again, once nothing speaks against it."""
        self._is_going, absence = False, None
        with closing(pool):
            pool.start(self._names)
            codes: list[int] = []
            while len(codes) < len(self._names):
                if self._is_late:
                    say("Stopped at once. The others compute what this machine held.")
                    pool.kill()
                    return Interrupted.exit_code
                if not self._is_going and (end := self._end()) is not None:
                    self._is_going = True
                    self._ask_to_leave(pool if absence is None else None, why, *end)
                elif absence is None and not self._is_going:
                    absence = self._find_absence(lambda: family(pool.pids))
                    if absence is not None:
                        self._ask_to_leave(pool, why, f"{absence.sentence} It finishes what it holds.", absence.reason)
                for worker, sentence in pool.news():
                    codes.append(worker.code if worker.code >= 0 else 128 - worker.code)
                    if sentence:
                        say(sentence)
                time.sleep(POLL_S)
        is_away = absence is not None and not self._is_going and set(codes) == {Interrupted.exit_code}
        return None if is_away else max(codes)

    def _ask_to_leave(self, pool: WorkerPool | None, why: Path, sentence: str, reason: str) -> None:
        """`pool`: none if it was asked already. Asked twice, a worker ends at once."""
        say(sentence)
        self._control.tell("leaving", sentence)
        why.write_text(reason, encoding="utf-8")  # before the signal, upon which workers read it
        if pool is not None:
            pool.interrupt()
