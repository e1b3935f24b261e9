"""How much of its machine's processor, memory and GPU a worker uses, for people to look at. Imports no torch.

Nothing is decided by these figures. They are those of a process and of all that it has started, such as the readers of
a DataLoader.
"""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import psutil

from potluck.environment import machine_bytes, usable_cores

LOOK_S = 5.0
"""How often it is measured: looking for the processes that one has started takes some milliseconds."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MachineUse:
    cores: float
    """Cores that it has kept busy since the last look."""
    of_cores: int
    memory_bytes: int
    of_memory_bytes: int
    gpu: float = 0.0
    """Share of the time in which its cards were busy, whoever used them."""
    gpu_bytes: int = 0
    of_gpu_bytes: int = 0
    """0: it uses no GPU, or nobody can tell."""


class UseMeter:
    """Measures one process with its children, from one look to the next."""

    def __init__(self, pid: int, *, on_card: bool | None = None) -> None:
        """`on_card`: whether it computes on a GPU; None: nobody has said."""
        self._pid, self._on_card = pid, on_card
        self._before: tuple[float, dict[int, float]] | None = None
        self._smi = shutil.which("nvidia-smi") if on_card is not False else None

    def look(self) -> MachineUse | None:
        """None with the first look, and once the process has ended."""
        now, busy_s, memory = time.monotonic(), dict[int, float](), 0
        for process in _family(self._pid):
            try:
                times, kept = process.cpu_times(), process.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
            busy_s[process.pid] = times.user + times.system
            memory += kept
        before, self._before = self._before, (now, busy_s)
        if before is None or self._pid not in busy_s or now <= before[0]:
            return None
        used_s = sum(max(0.0, seconds - before[1].get(pid, 0.0)) for pid, seconds in busy_s.items())
        gpu, gpu_bytes, of_gpu_bytes = self._look_at_cards(busy_s)
        return MachineUse(
            used_s / (now - before[0]), usable_cores(), memory, machine_bytes(), gpu, gpu_bytes, of_gpu_bytes
        )

    def _look_at_cards(self, pids: Collection[int]) -> tuple[float, int, int]:
        cards = _ask(self._smi, "--query-gpu=uuid,utilization.gpu,memory.used,memory.total")
        if not cards:
            return NONE
        held = _ask(self._smi, "--query-compute-apps=gpu_uuid,pid,used_memory")
        return card_use(cards, held, pids, on_card=bool(self._on_card))


NONE = (0.0, 0, 0)


def card_use(cards: str, held: str, pids: Collection[int], *, on_card: bool) -> tuple[float, int, int]:
    """Return how busy the cards of these processes are, the bytes that they hold there, and all bytes of these cards.

    `cards` has a line for each card: UUID, % busy, MiB in use, MiB; `held` one for each process: UUID, number, MiB. A
    container's processes have other numbers there, or none: one that is known to be on a card is then shown the whole
    of the only one.
    """
    seen = {words[0]: [_number(word) for word in words[1:]] for words in _rows(cards, 4)}
    own = [words for words in _rows(held, 3) if int(_number(words[1])) in pids and words[0] in seen]
    if not own and on_card and len(seen) == 1:
        own = [[uuid, "", str(used)] for uuid, (_, used, _) in seen.items()]
    names = {words[0] for words in own}
    if not names:
        return NONE
    busy = sum(seen[name][0] for name in names) / 100 / len(names)
    return busy, int(MIB * sum(_number(words[2]) for words in own)), int(MIB * sum(seen[name][2] for name in names))


def _rows(text: str, count: int) -> list[list[str]]:
    rows = ([word.strip() for word in line.split(",")] for line in text.splitlines())
    return [words for words in rows if len(words) == count]


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:  # [N/A]
        return 0.0


def _ask(program: str | None, query: str) -> str:
    """Ask nvidia-smi; empty where there is none, or its driver hangs."""
    if program is None:
        return ""
    try:
        command = [program, query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


class UseWatch:
    """Measures this process in a thread of its own, which no step waits for."""

    def __init__(self, *, on_card: bool, every_s: float = LOOK_S) -> None:
        self._on_card, self._every_s = on_card, every_s
        self._newest: MachineUse | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="machine use", daemon=True).start()

    def take(self) -> MachineUse | None:
        """Return what was measured since this was last asked; None if nothing was."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        meter = UseMeter(os.getpid(), on_card=self._on_card)
        while True:
            self._newest = meter.look() or self._newest
            if self._is_over.wait(self._every_s):
                return
