"""Meeting: nodes that share a file system find each other in the run folder, in files for their owner alone.

The first calls with a word that it has just made up, each other greets with that word and one of its own, and the first
answers with the latter: so neither takes what lies there from an earlier start of the job for the other's. The invite
is in a file of its own. A first node holds the meeting before it writes, and removes only what is its own: where starts
have no name, another job may meet in the same folder. Knows no scheduler.
"""

import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from potluck.cluster.plan import As, NodeResources
from potluck.config import from_dict
from potluck.errors import ConfigError
from potluck.files import write_whole
from potluck.fleet.invite import Invite
from potluck.save.run_folder import hold
from potluck.waiting import POLL_S, wait_until

MOST_BYTES = 1 << 16
INVITE_FILE = "invite"
CALL = "call"


@dataclass(frozen=True, kw_only=True, slots=True)
class Greeting:
    word: str
    node: str
    workers: int
    brings: NodeResources
    call: str = ""
    """The first node's word, as far as it was heard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    word: str
    led: As
    address: str = ""
    """Address where the ranks of a group meet."""
    port: int = 0
    first: int = 0
    """The lowest rank on the node that is answered."""
    world: int = 1
    resume: bool = False
    is_over: bool = False
    """The first node could not begin, and has said why."""


class Meeting:
    def __init__(self, run: Path, attempt: str, tasks: int | None = None) -> None:
        """`tasks`: how many meet; None: nobody has said."""
        self._known, self._most = (tasks or 1) - 1, (tasks or 1 << 31) - 1  # others
        self.folder = run / "meeting"
        name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in attempt)[:100]
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            if name:
                self.folder /= name.strip(".") or "one"
                self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"Nodes cannot meet in {self.folder}: {error.strerror}. Name a run folder that all of them share, and"
                " that is yours alone, with --out."
            ) from None
        self._run, self._lock_name = run, f".meeting{'-' if name else ''}{name}.lock"
        self._call = ""
        self._written: dict[str, str] = {}
        self._answered: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def invite(self) -> Path:
        return self.folder / INVITE_FILE

    # The first node

    def hold(self) -> IO[bytes]:
        """While it leads: a second job that meets in this folder is refused before it writes anything."""
        return hold(self._run, self._lock_name)

    def greetings(self) -> dict[int, Greeting]:
        """Return the greetings of all others that have heard the call so far, by their task."""
        if not self._call:
            # Kept before it is written: what close() finds with this word is ours to remove.
            self._call = secrets.token_hex(8)
            self._write(CALL, self._call)
        greetings = {}
        for path in self.folder.glob("greeting-*.json"):
            number = path.stem.removeprefix("greeting-")
            if number.isdigit() and 0 < int(number) <= self._most:
                greetings[int(number)] = from_dict(Greeting, _read(path), f"{path}")
        return {task: each for task, each in sorted(greetings.items()) if each.call == self._call}

    def wait_for_all(self, seconds: float) -> dict[int, Greeting]:
        """Return the greetings of all others that are known to come, or of those that have when the time is over."""
        wait_until(lambda: len(self.greetings()) >= self._known, seconds)
        return self.greetings()

    def answer(self, task: int, answer: Reply) -> None:
        self._write(f"answer-{task}.json", json.dumps(asdict(answer)))
        self._answered[task] = answer.word

    def hand_over(self, invite: Invite) -> None:
        """Hand the invite to the nodes that have come, and until close() to any that comes."""
        self._write(INVITE_FILE, invite.line() + "\n")  # before any answer: who is answered reads it at once

        def look() -> None:
            while True:
                for task, greeting in self.greetings().items():
                    if self._answered.get(task) != greeting.word:
                        self.answer(task, Reply(word=greeting.word, led="host"))
                if self._ended.wait(POLL_S if len(self._answered) < self._most else 1.0):
                    return

        # A thread beside the host's: nodes that come late, or are started again, wait for an answer too.
        self._thread = threading.Thread(target=look, name="meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:  # it reads what goes now, and would write answers after that
            self._thread.join()
        for path in self.folder.glob("*"):
            with suppress(OSError, UnicodeDecodeError):  # the folder of a start that had a name, or none of our files
                text = path.read_text(encoding="utf-8")
                if self._written.get(path.name) == text or (self._call and f'"call": "{self._call}"' in text):
                    path.unlink()

    # The others

    def greet(self, task: int, node: str, workers: int, brings: NodeResources) -> Greeting:
        greeting = Greeting(word=secrets.token_hex(8), node=node, workers=workers, brings=brings)
        self._write(f"greeting-{task}.json", json.dumps(asdict(greeting)))
        return greeting

    def _heed_call(self, task: int, greeting: Greeting) -> Greeting:
        """The greeting with the word that the first node calls with now."""
        with suppress(OSError, UnicodeDecodeError):  # the first node has not called yet, or is just writing
            if (call := (self.folder / CALL).read_text(encoding="ascii")) != greeting.call:
                greeting = replace(greeting, call=call)
                self._write(f"greeting-{task}.json", json.dumps(asdict(greeting)))
        return greeting

    def wait_for_answer(self, task: int, greeting: Greeting, seconds: float, say: Callable[[str], None]) -> Reply:
        """Says that it waits once `seconds` are over, and gives up after ten times as long."""
        path = self.folder / f"answer-{task}.json"
        answers: list[Reply] = []

        def is_here() -> bool:
            nonlocal greeting
            greeting = self._heed_call(task, greeting)
            if path.exists():
                answer = from_dict(Reply, _read(path), f"{path}")
                answers.extend([answer] if answer.word == greeting.word else [])
            return bool(answers)

        trouble = (
            f"{greeting.node} has waited {seconds:.0f} s for the first node, which leaves its answer in {self.folder}."
            " Is that folder on a file system that all nodes share, and has the first node started?"
        )
        if not wait_until(is_here, seconds):
            say(trouble)
            if not wait_until(is_here, 9 * seconds):
                raise ConfigError(f"{trouble} Gave up after {10 * seconds:.0f} s.")
        return answers[0]

    def _write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text, 0o600)
        self._written[name] = text


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            table = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {error}. Remove {path.parent}, and start the job again.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is no answer of Potluck's. Remove {path.parent}, and start the job again.")
    return table
