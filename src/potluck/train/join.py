"""`potluck join`: workers on this machine for a run that is led elsewhere. Imports no torch."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from potluck.errors import ConfigError, Interrupted
from potluck.fleet.invite import INVITE, read_invite
from potluck.train.crew import Crew, say
from potluck.train.launch import QUIET
from potluck.train.order import WorkersConfig


def join(invite: str, script: list[str], config: WorkersConfig, settings: tuple[str, ...]) -> int:
    found = read_invite(None if invite == HIDDEN else invite)
    if script and not Path(script[0]).is_file():
        raise ConfigError(f"There is no script {script[0]}.")
    found.insist_on_pin()
    if invite != HIDDEN and invite != "-" and not Path(invite).is_file():
        _hide(found.line(), invite)
    command = script or ["--join", json.dumps(list(settings))]
    environment = {INVITE: found.line()}
    if config.count > 1:
        environment[QUIET] = "1"
    crew = Crew(command, config, environment)
    interrupts = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts == 1:
            say("Leaving after this step. Ctrl-C again leaves at once.")
            crew.interrupt()

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        base = f"{os.uname().nodename}-{os.getpid()}"
        crew.start([f"{base}-{number}" if config.count > 1 else base for number in range(config.count)])
        codes: list[int] = []
        while len(codes) < config.count and interrupts < 2:
            for worker, sentence in crew.news():
                codes.append(worker.code if worker.code >= 0 else 128 - worker.code)
                if sentence:
                    say(sentence)
            time.sleep(0.02)
        return max(codes, default=Interrupted.exit_code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        crew.close()


HIDDEN = "@"
"""In place of an invite that has moved to the environment."""


def _hide(line: str, argument: str) -> None:
    """Starts this command again without the secret among its arguments, which every user of the machine can read."""
    os.environ[INVITE] = line
    arguments = [HIDDEN if word == argument else word for word in sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "potluck.cli", *arguments])
