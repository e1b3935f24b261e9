"""`potluck join`: workers on this machine for a run that is led elsewhere. Imports no torch."""

import json
import os
import platform
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from potluck.environment import QUIET
from potluck.errors import ConfigError, Interrupted
from potluck.fleet.invite import INVITE, read_invite
from potluck.launch.processes import WorkerPool
from potluck.signals import Interrupts
from potluck.system import HAS_GROUPS
from potluck.train.arguments import FILES_ASKED, WorkersConfig, data_setting
from potluck.waiting import POLL_S
from potluck.words import say


def join(invite: str, script: list[str], config: WorkersConfig, settings: tuple[str, ...]) -> int:
    found = read_invite(None if invite == HIDDEN else invite)
    if script and script[0].startswith("-"):
        raise ConfigError(f"Options come before the invite: potluck join {script[0]} ... INVITE.")
    if script and not Path(script[0]).is_file():
        raise ConfigError(f"There is no script {script[0]}.")
    found.check_has_pin()
    if HAS_GROUPS and invite != HIDDEN and invite != "-" and not Path(invite).is_file():
        _hide(found.line(), invite)  # where programs cannot be replaced, arguments are the user's own to read
    while True:
        command = script or ["--join", json.dumps(list(settings))]
        code, asked = _take_part(command, config, found.line())
        if not asked or not _says_yes(asked):
            return code
        settings = (*settings, *data_setting(asked))


def _take_part(command: list[str], config: WorkersConfig, line: str) -> tuple[int, list[str]]:
    """The exit code; and if workers ended since the host's recipe names files on this machine, those files."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        question = Path(folder) / "files"
        environment = {INVITE: line, FILES_ASKED: str(question)}
        if config.count > 1:
            environment[QUIET] = "1"
        code = _watch(WorkerPool(command, config, environment), config.count)
        return code, json.loads(question.read_text(encoding="utf-8")) if question.exists() else []


def _watch(pool: WorkerPool, count: int) -> int:
    """Until all its workers have ended. Ctrl-C lets them leave politely."""

    def leave(number: int) -> None:
        say("Leaving after this step. Ctrl-C again leaves at once.")
        pool.interrupt()

    interrupts = Interrupts(leave)
    with interrupts.handled(), closing(pool):
        base = f"{platform.node()}-{os.getpid()}"
        pool.start([f"{base}-{number}" if count > 1 else base for number in range(count)])
        codes: list[int] = []
        while len(codes) < count and interrupts.count < 2:
            for worker, sentence in pool.news():
                codes.append(worker.code if worker.code >= 0 else 128 - worker.code)
                if sentence:
                    say(sentence)
            time.sleep(POLL_S)
        return max(codes, default=Interrupted.exit_code)


def _says_yes(paths: list[str]) -> bool:
    """The default is no; without a terminal nobody is asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    for path in paths:
        # What a path is on this machine; and a name with escape sequences in it shows as what it is.
        print(f"  {os.path.realpath(path)!r}", file=sys.stderr)
    print("Read these files, and let the host learn from what is in them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


HIDDEN = "@"
"""In place of an invite that has moved to the environment."""


def _hide(line: str, argument: str) -> None:
    """Starts this command again without the secret among its arguments, which every user of the machine can read."""
    os.environ[INVITE] = line
    arguments = [HIDDEN if word == argument else word for word in sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "potluck.cli", *arguments])
