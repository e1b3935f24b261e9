"""Whether a machine is in use by somebody else, so that its worker yields: decided purely, from samples of others' use.

A sample is the share of the processor, or of a card, that processes have which are not ours. Cards are looked at
through nvidia-smi, and the processor through /proc. Imports no torch: whoever looks is not the worker.
"""

import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from potluck.errors import ConfigError

SAMPLE_S = 2.0
BUSY, FREE = 0.25, 0.1
"""Shares of use by others: busy from the first on, free below the second; between them nothing changes."""
BUSY_S, FREE_S = 6.0, 60.0
"""Seconds for which it must be so: a worker that comes back costs the others more than one that stays away a little
longer."""
CARD_BYTES = 1 << 30
"""A process of somebody else that holds more of a card than a desktop does has it in use, whatever it computes now."""


@dataclass(frozen=True)
class Sample:
    at: float
    share: float
    """Share of the whole that others use."""
    what: str
    """The thing that is used, as in "the processor is in use"."""


@dataclass(frozen=True)
class Verdict:
    yields: bool
    reason: str


def decide_yield(samples: Sequence[Sample], *, is_away: bool) -> Verdict:
    """Decide from the last samples, in order. It goes when all of BUSY_S were busy, and comes when all of FREE_S were
    free."""
    if not samples:
        return Verdict(is_away, "nothing was measured yet")
    last = samples[-1]
    for_s, is_wanted = (FREE_S, False) if is_away else (BUSY_S, True)
    recent = [sample for sample in samples if sample.at > last.at - for_s]
    is_long = last.at - samples[0].at >= for_s
    if is_away:
        turns = is_long and all(sample.share < FREE for sample in recent)
        free = f"{last.what} is free: others have used {max(s.share for s in recent):.0%} at most for {for_s:g} s"
        busy = f"{last.what} is in use by others, who have used up to {max(s.share for s in recent):.0%} of it"
        return Verdict(is_wanted if turns else True, free if turns else busy)
    turns = is_long and all(sample.share >= BUSY for sample in recent)
    least = min(sample.share for sample in recent)
    busy = f"{last.what} is in use by others, who have used {least:.0%} of it or more for {for_s:g} s"
    return Verdict(turns, busy if turns else f"{last.what} is not in use by others")


# Measuring


@dataclass
class ProcessorUse:
    """Measures the processor use of all processes but ours, from one look at /proc to the next."""

    cores: int
    _before: tuple[float, float, dict[int, int]] | None = None

    def look(self, now: float, ours: Collection[int]) -> Sample | None:
        """`ours`: processes whose use is not others'. None with the first look."""
        try:
            busy = read_busy(Path("/proc/stat").read_text(encoding="ascii"))
        except OSError:  # one look is missed; the next one says
            return None
        own = {pid: ticks for pid in ours if (ticks := ticks_of(pid)) is not None}
        before, self._before = self._before, (now, busy, own)
        if before is None or now <= before[0]:
            return None
        used = sum(ticks - before[2].get(pid, 0) for pid, ticks in own.items())
        whole = (now - before[0]) * self.cores * os.sysconf("SC_CLK_TCK")
        return Sample(now, min(1.0, max(0.0, (busy - before[1] - used) / whole)), "the processor of this machine")


def read_busy(stat: str) -> float:
    """Ticks that all processors together were not idle, of the first line of /proc/stat. What a virtual machine's host
    took is nobody's here."""
    numbers = [float(word) for word in stat.splitlines()[0].split()[1:]]
    user, nice, system, _idle, _waiting, hard, soft = numbers[:7]
    return user + nice + system + hard + soft


def ticks_of(pid: int) -> int | None:
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
        return int(words[11]) + int(words[12])
    except (OSError, IndexError, ValueError):  # it has ended between two looks
        return None


@dataclass
class CardUse:
    """Measures others' use of the cards that these workers compute on, through nvidia-smi."""

    program: str
    cards: tuple[str, ...]
    """The cards' names for nvidia-smi: numbers, or UUIDs."""

    def look(self, now: float, ours: Collection[int]) -> Sample | None:
        """None where it cannot be told."""
        seen = self._ask("--query-gpu=uuid,utilization.gpu,memory.used", self.cards)
        held = self._ask("--query-compute-apps=gpu_uuid,pid,used_memory", self.cards)
        if seen is None or held is None:
            return None
        # In a container nvidia-smi may name processes by numbers that mean nothing here, our own among them.
        here = [line for line in held.splitlines() if _is_here(line)]
        return Sample(now, share_of_cards(seen, "\n".join(here), ours), "the card of this machine")

    def _ask(self, query: str, cards: tuple[str, ...]) -> str | None:
        command = [self.program, query, "--format=csv,noheader,nounits", f"--id={','.join(cards)}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):  # a driver that hangs must not stop the workers' parent
            return None
        return done.stdout if done.returncode == 0 else None


def _is_here(line: str) -> bool:
    return Path("/proc", line.split(",")[1].strip()).exists() if line.count(",") == 2 else False


def share_of_cards(seen: str, held: str, ours: Collection[int]) -> float:
    """Return the share of the card that others use most. `seen` has a line for each card: UUID, % busy, MiB in use;
    `held` a line for each process: UUID of the card, process, MiB. `seen`: a line for each card: UUID, % busy, MiB in
    use; `held`: a line for each process: UUID of the card, process, MiB.

    How busy a card is can be told apart by process nowhere, so while ours computes on it, others count by their memory.
    """
    processes = [line.split(",") for line in held.splitlines() if line.count(",") == 2]
    most = 0.0
    for line in seen.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 3:
            continue
        card, busy, used = words[0], _number(words[1]), _number(words[2])
        others = [
            _number(mib) for uuid, pid, mib in processes if uuid.strip() == card and int(_number(pid)) not in ours
        ]
        if any(mib * 2**20 >= CARD_BYTES for mib in others):
            most = max(most, 1.0)
        elif not ours:  # all of it is others', also where nvidia-smi names no process, as in containers
            most = max(most, 1.0 if used * 2**20 >= CARD_BYTES else busy / 100)
    return most


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:  # [N/A]
        return 0.0


def find_use(count: int, cores: int, environment: Mapping[str, str] = os.environ) -> ProcessorUse | CardUse:
    """Find what `count` workers here compute on: cards where there are some, and else the processor."""
    program = shutil.which("nvidia-smi")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if program is not None and visible != "":
        cards = visible.split(",") if visible else [str(number) for number in range(count)]
        use = CardUse(program, tuple(cards[:count]))
        if use.look(0.0, ()) is not None:
            return use
    if not Path("/proc/stat").exists():
        raise ConfigError(
            "--yield looks at NVIDIA cards through nvidia-smi, and at the processor through /proc, and this machine has"
            " neither. Use --hours, or potluck pause."
        )
    return ProcessorUse(cores)


@dataclass
class YieldWatch:
    """Looks now and then, and says whether this machine is to be left to others."""

    use: ProcessorUse | CardUse
    verdict: Verdict = Verdict(False, "nothing was measured yet")
    _samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=1024))
    _next: float = 0.0

    def look(self, now: float, ours: Callable[[], Collection[int]]) -> Verdict:
        if now < self._next:
            return self.verdict
        self._next = now + SAMPLE_S
        sample = self.use.look(now, ours())
        if sample is not None:
            self._samples.append(sample)
        verdict = decide_yield(self._samples, is_away=self.verdict.yields)
        if verdict.yields != self.verdict.yields:
            self._samples.clear()  # what comes next is counted from here
        self.verdict = verdict
        return verdict


def family(roots: Collection[int]) -> set[int]:
    """These processes and all that they have started, as far as /proc tells."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").exists() else ():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
                parents.setdefault(int(words[1]), []).append(int(entry.name))
            except (OSError, IndexError, ValueError):  # it has ended since the folder was listed
                continue
    pids, waiting = set(roots), list(roots)
    while waiting:
        new = [pid for pid in parents.get(waiting.pop(), []) if pid not in pids]
        pids.update(new)
        waiting += new
    return pids
