"""`potluck why`: asks the processes of a run on this machine what they do, and says who waits for whom.

Each process of this user has a folder (see account.py) that says which run it is of. It is asked by SIGQUIT, once it is
seen to be that very process and to answer that signal, and writes its account there. Imports no torch.
"""

import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.account import (
    ANSWER,
    ASKED,
    PROCESS,
    STACKS,
    in_words,
    name_in,
    processes_folder,
    stacks_in_words,
    take_account,
)
from potluck.errors import ConfigError
from potluck.events import read_events
from potluck.files import kept_by, read_table
from potluck.fleet.flight import FLIGHT
from potluck.fleet.invite import Invite
from potluck.page.reader import EVENTS
from potluck.system import catches, started_at, state_of
from potluck.waiting import wait_until
from potluck.wire.words import clean
from potluck.words import duration, plural

WAIT_S = 6.0
"""How long a process has to answer: where a library holds the interpreter, it never does."""
MOST_BYTES = 8 << 20
"""The most bytes of an account."""
MOST_STACKS = 1 << 14
"""Bytes of stacks that are shown as they were written, the last ones."""
STATES = {
    "T": "it is stopped, as by SIGSTOP or Ctrl-Z; kill -CONT continues it",
    "D": "it waits for a disk or a device",
}


@dataclass
class FoundProcess:
    folder: Path
    facts: dict[str, Any]
    account: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return int(self.facts.get("pid") or 0)

    @property
    def parent(self) -> int:
        return int(self.facts.get("parent") or 0)

    @property
    def is_here(self) -> bool:
        """Whether this very process still runs: another may have its number by now."""
        return bool(self.facts.get("started")) and started_at(self.pid) == self.facts["started"]

    def ask(self) -> None:
        """A process that does not catch the signal would be ended by it, and one that is stopped cannot answer."""
        question = f"{os.getpid()} {time.time_ns()}"
        with suppress(OSError):
            if self.is_here and state_of(self.pid) != "T" and catches(self.pid, signal.SIGQUIT):
                # The question first: without one the process would tell its own terminal, and nobody here.
                (self.folder / ASKED).write_text(question, encoding="utf-8")
                os.kill(self.pid, signal.SIGQUIT)
                self.account = {"asked": question}

    def has_answered(self) -> bool:
        """True too of one that could not be asked: there is nothing to wait for."""
        found = read_table(self.folder / ANSWER, MOST_BYTES)
        if self.account and found.get("asked") == self.account["asked"]:
            self.account = found
        return "stacks" in self.account or not self.account

    def in_words(self, said: str) -> str:
        if "stacks" in self.account:
            return in_words(self.account, said)
        state = STATES.get(state_of(self.pid), "it answers nothing" if self.account else "it cannot be asked")
        return f"{name_in(self.facts)}:\n  {state[0].upper()}{state[1:]}."

    def stacks_in_words(self) -> str:
        if "stacks" in self.account:
            return stacks_in_words(self.account)
        written = ""
        with suppress(OSError):  # what was written without Python: a library may hold the interpreter
            written = (self.folder / STACKS).read_bytes()[-MOST_STACKS:].decode("utf-8", "replace").strip()
        return f"Stacks of {name_in(self.facts)}, as they were written last:\n{written}" if written else ""


def find_processes() -> list[FoundProcess]:
    """Find the processes of this user on this machine, and clear away what killed ones have left behind."""
    return [_process_of(folder) for folder in kept_by(processes_folder(), lambda folder: _process_of(folder).is_here)]


def _process_of(folder: Path) -> FoundProcess:
    return FoundProcess(folder, read_table(folder / PROCESS, MOST_BYTES))


def of_run(found: list[FoundProcess], run: Path) -> list[FoundProcess]:
    """Choose those that say it is their run, those that joined its host, and their parents and siblings."""
    host = _host_of(run)
    own = [p for p in found if p.facts.get("run") == str(run.resolve()) or (host and p.facts.get("host") == host)]
    pids, parents = {p.pid for p in own}, {p.parent for p in own if p.facts.get("role") == "worker"}
    return [p for p in found if p in own or p.pid in parents or p.parent in pids | parents]


def _host_of(run: Path) -> str:
    """Name the run's host as its workers do; empty where it has none."""
    with suppress(OSError, ValueError, ConfigError):
        invite = Invite.parse((run / "invite").read_text(encoding="utf-8").strip())
        return f"{invite.port} {invite.pin or ''}"
    return ""


def why(run: str | None) -> int:
    folder = Path(run) if run is not None else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"There is no run folder {run}. Leave it out to ask all of your workers on this machine.")
    processes = find_processes()
    families: dict[int, list[FoundProcess]] = {}
    for process in of_run(processes, folder) if folder is not None else processes:
        starter = process.parent if process.facts.get("role") == "worker" else process.pid
        families.setdefault(starter if folder is None else 0, []).append(process)
    print("\n\n\n".join(map(tell_all, families.values())) or _tell_none(folder))
    return 0


def tell_own() -> None:
    """Answer SIGQUIT in a process that has started workers: for itself and for them."""
    me = os.getpid()
    others = [p for p in find_processes() if p.parent == me]
    own = FoundProcess(Path(), {"pid": me}, take_account())
    print(tell_all(others, [own]), file=sys.stderr, flush=True)


def tell_all(processes: list[FoundProcess], known: list[FoundProcess] | None = None) -> str:
    """Ask all, and say first who waits for whom, in a sentence; then each process by itself."""
    for process in processes:
        process.ask()
    wait_until(lambda: all(process.has_answered() for process in processes), WAIT_S)
    everybody = [*(known or []), *processes]
    sentence = _sentence(everybody)
    parts = [process.in_words(sentence) for process in everybody]
    parts += [process.stacks_in_words() for process in everybody]
    return "\n\n".join([sentence, *filter(None, parts)])


def _sentence(processes: list[FoundProcess]) -> str:
    """Choose the host's sentence, since it knows of all; or that of a worker that waits for others; or any."""
    said = [
        (str(p.account.get("role", "")), str(p.account["sentence"])) for p in processes if p.account.get("sentence")
    ]
    first = [words for role, words in said if not role.startswith("worker")]
    waits = [words for _, words in said if " waits " in words or " wait " in words]
    count = plural(len(processes), "process")
    none = f"{count} of this run on this machine, and none says what it waits for yet."
    return next(iter([*first, *waits, *(words for _, words in said)]), none)


def _tell_none(folder: Path | None) -> str:
    if folder is None:
        return "No process of yours on this machine takes part in a run."
    last: dict[str, Any] = {}
    with suppress(OSError):
        last = next(iter(deque(read_events(folder / EVENTS), maxlen=1)), {})
    if last.get("event") == "run_ended":
        ended = f"The run in {folder} has ended at step {last.get('step')}: {clean(str(last.get('reason')))}."
    else:
        at = f" {duration(time.time() - last['time'])} ago" if isinstance(last.get("time"), int | float) else ""
        since = f"; the last that it since, {last['event']}, was{at}" if last.get("event") else ""
        ended = (
            f"No process of the run in {folder} is on this machine{since}. It was killed, or it runs elsewhere: ask"
            " there, with potluck why."
        )
    replays = f" potluck replay {folder} says where its host stood." if (folder / FLIGHT).is_dir() else ""
    return ended + replays
