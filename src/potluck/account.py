"""Account: what this process does and waits for, written when somebody asks for it by SIGQUIT. Imports no torch.

faulthandler answers the signal, also while the main thread stands in a library and runs no Python: it writes the stacks
to a file. A thread sees that, and writes all the rest: names, what the parts of this process say of themselves, and
stacks with their lines. Each process has a folder of its own under the user's, where `potluck why` finds it. There is
no secret in it, and nobody else can read it.
"""

import atexit
import faulthandler
import json
import linecache
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from potluck.environment import runtime_folder
from potluck.errors import ConfigError
from potluck.files import make_own_anew, write_whole
from potluck.system import started_at

log = logging.getLogger("potluck.account")

PROCESS, STACKS, ASKED, ANSWER = "process.json", "stacks", "asked", "answer.json"
LOOK_S = 0.25
"""How often a thread looks whether somebody asked."""
TELL_S = 2.0
"""How long a part of this process has to say something of itself: it may hold a lock for ever."""
MOST_FRAMES = 40

Told = tuple[str, list[str]]
"""A sentence that says who waits for whom, or is empty; and lines of details."""

_tellers: dict[str, Callable[[], Told]] = {}
_facts: dict[str, Any] = {}
_folder: Path | None = None
on_quit: list[Callable[[], None]] = []
"""In a process that has started others: tells of all of them, in place of what this one has to say."""


def processes_folder() -> Path:
    return runtime_folder("processes")


def begin(role: str, name: str = "") -> None:
    """Answer SIGQUIT from now on, unless somebody else does so already, or the system has no such signal."""
    global _folder
    if _folder is not None or not hasattr(signal, "SIGQUIT") or signal.getsignal(signal.SIGQUIT) != signal.SIG_DFL:
        return
    try:
        folder = make_own_anew(processes_folder(), str(os.getpid()))
        stacks = (folder / STACKS).open("ab", buffering=0)
    except (OSError, ConfigError):  # in a container without a home, say: the stacks at least are shown
        faulthandler.register(signal.SIGQUIT)
        return
    faulthandler.register(signal.SIGQUIT, stacks)
    _folder = folder
    me = os.getpid()
    atexit.register(_clear, folder, me)
    know(pid=me, parent=os.getppid(), started=started_at(me), role=role, name=name)
    threading.Thread(target=_watch, args=(stacks, folder), name="account", daemon=True).start()


def _clear(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not one that it has forked
        shutil.rmtree(folder, ignore_errors=True)


def know(**facts: Any) -> None:
    """Note what tells others which process this is, such as `run`, the folder of its run."""
    _facts.update(facts)
    if _folder is not None:
        with suppress(OSError):  # a full disk must not end a run
            write_whole(_folder / PROCESS, json.dumps(_facts), 0o600)


def tell_with(name: str, teller: Callable[[], Told]) -> None:
    """Let a part of this process say in accounts what it does. The last of each name counts."""
    _tellers[name] = teller


def _watch(stacks: IO[bytes], folder: Path) -> None:
    seen, over = 0, threading.Event()
    while not over.wait(LOOK_S):
        length = os.fstat(stacks.fileno()).st_size
        if length != seen:
            seen = length
            try:
                _answer(folder)
            except Exception:  # a folder or a terminal that is gone: the next one may come through
                log.exception("no account could be given")


def _answer(folder: Path) -> None:
    with suppress(OSError):
        asked = (folder / ASKED).read_text(encoding="utf-8")
        (folder / ASKED).unlink()  # first: somebody may ask again while this is answered
        write_whole(folder / ANSWER, json.dumps(take_account() | {"asked": asked}), 0o600)
        return
    if on_quit:
        on_quit[-1]()
    else:
        account = take_account()
        print(f"{in_words(account)}\n{stacks_in_words(account)}", file=sys.stderr, flush=True)


def take_account() -> dict[str, Any]:
    """Describe this process for JSON: who it is, what its parts say, and the stacks of all of its threads."""
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    frames, own = sys._current_frames(), threading.get_ident()
    stacks = {t.name: stack(frames.get(t.ident or 0)) for t in threads if t.ident != own}
    told = {name: _ask(teller) for name, teller in list(_tellers.items())}
    sentence = next((words for words, _ in told.values() if words), "")
    lines = [line for _, details in told.values() for line in details]
    return {**_facts, "sentence": sentence, "lines": lines, "stacks": stacks}


def _ask(teller: Callable[[], Told]) -> Told:
    answers: list[Told] = []

    def ask() -> None:
        try:
            answers.append(teller())
        except Exception as error:  # of a part that changes while it is looked at: the rest is worth having
            answers.append(("", [f"It cannot be said ({type(error).__name__}: {error})."]))

    thread = threading.Thread(target=ask, name="account of a part", daemon=True)
    thread.start()
    thread.join(TELL_S)
    return answers[0] if answers else ("", [f"A part did not answer within {TELL_S:g} s: it may hold a lock."])


def stack(frame: FrameType | None) -> list[str]:
    """List the frames, one a line, the innermost first."""
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_FRAMES:
        name, number = frame.f_code.co_filename, frame.f_lineno
        if name == threading.__file__ and frame.f_code.co_name in ("_bootstrap", "_bootstrap_inner", "run"):
            break  # how a thread begins
        short = Path(*Path(name).parts[-3:])
        code = linecache.getline(name, number).strip()
        lines.append(f"{short}:{number} in {frame.f_code.co_name}" + (f": {code[:100]}" if code else ""))
        frame = frame.f_back
    return lines


def short_stack(thread: int, most: int = 20) -> str:
    """Say to others where a thread is, without folders and lines of code, the innermost call first."""
    frame, lines = sys._current_frames().get(thread), list[str]()
    while frame is not None and len(lines) < most:
        lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return "\n".join(lines)


def in_words(account: dict[str, Any], said: str = "") -> str:
    """Put an account in words, without its stacks. `said`: what need not be said again."""
    told = [account.get("sentence"), *account.get("lines", [])]
    return "\n  ".join([f"{name_in(account)}:", *(line for line in told if line and line != said)])


def stacks_in_words(account: dict[str, Any]) -> str:
    """Put the stack of each thread in words, the innermost call first."""
    lines = [f"Stacks of {name_in(account)}, the innermost call first:"]
    for name, frames in account.get("stacks", {}).items():
        lines += [f"  {name}", *(f"    {line}" for line in frames)]
    return "\n".join(lines)


def name_in(account: dict[str, Any]) -> str:
    who = " ".join(str(account[each]) for each in ("role", "name") if account.get(each))
    return f"{who} (process {account.get('pid')})"
