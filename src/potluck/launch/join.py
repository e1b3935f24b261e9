"""`potluck join`: workers on this machine for a run that is led elsewhere. Imports no torch."""

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from potluck.environment import QUIET
from potluck.errors import ConfigError
from potluck.fleet.base_folder import fetch_base
from potluck.fleet.invite import INVITE, Invite, read_invite
from potluck.launch.control import controlled
from potluck.launch.join_session import JoinSession, JoinTerms
from potluck.signals import held_back
from potluck.system import HAS_GROUPS
from potluck.train.arguments import FILES_ASKED, WorkersConfig, base_setting, data_setting
from potluck.words import say


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
    host_invite = read_invite(None if invite == HIDDEN else invite)
    if script and script[0].startswith("-"):
        raise ConfigError(f"Options come before the invite: potluck join {script[0]} ... INVITE.")
    if script and not Path(script[0]).is_file():
        raise ConfigError(f"There is no script {script[0]}.")
    host_invite.check_has_pin()
    if HAS_GROUPS and invite != HIDDEN and invite != "-" and not Path(invite).is_file():
        # Where programs cannot be replaced, arguments are the user's own to read.
        hide_invite(host_invite.line(), invite)
    if fetches_base:
        settings = (*settings, *base_setting(str(_fetched(host_invite))))
    name = f"{platform.node()}-{os.getpid()}"
    names = [f"{name}-{number}" if config.count > 1 else name for number in range(config.count)]
    with controlled(name, f"{host_invite.host} port {host_invite.port}") as control:
        session = JoinSession(config, terms, control, names)
        while True:
            command = script or ["--join", json.dumps(list(settings))]
            code, asked = _take_part(session, command, host_invite.line(), is_quiet=config.count > 1)
            if not asked or not _says_yes(asked):
                return code
            settings = (*settings, *data_setting(asked))


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


def _take_part(session: JoinSession, command: list[str], line: str, *, is_quiet: bool) -> tuple[int, list[str]]:
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


def hide_invite(line: str, argument: str) -> None:
    """Starts this command again without the secret among its arguments, which every user of the machine can read."""
    os.environ[INVITE] = line
    arguments = [HIDDEN if word == argument else word for word in sys.argv[1:]]
    with held_back():
        os.execv(sys.executable, [sys.executable, "-m", "potluck.cli", *arguments])
