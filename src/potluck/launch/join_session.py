"""JoinSession: workers of this machine in a run that is led elsewhere; they go when somebody wants the machine.

While their owner wants it, this process waits without them, and starts them again afterwards. When the machine is taken
back, or on Ctrl-C, it ends. Each worker hands over its own work when it goes. Imports no torch.
"""

import os
import signal
import time
from collections.abc import Collection
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from potluck.environment import IGNORED, LEAVING, RETURNING, usable_cores
from potluck.errors import Interrupted
from potluck.launch.absence import Absence, AbsenceWatch, Hours
from potluck.launch.control import Control
from potluck.launch.notices import Notice, NoticeWatch, check_watch, start_watch
from potluck.launch.processes import WorkerPool
from potluck.launch.yielding import YieldWatch, family, find_use
from potluck.signals import Interrupts, handling
from potluck.train.arguments import WorkersConfig
from potluck.waiting import POLL_S
from potluck.words import say

GRACE_S = 25.0
"""Seconds left after SIGTERM where nobody says how many: less than the 30 s of Kubernetes and of SLURM."""
MARGIN_S = 2.0
"""Seconds that are left before the end of a notice: a host that loses a machine without a word waits for it in vain."""
USUAL_PATIENCE_S = 30.0
"""Patience of a host that has not told its own."""
NOTICE_SIGNAL = getattr(signal, "SIGUSR1", None)
"""Signal that `sbatch --signal=USR1@120` sends to all processes of a job; heard with --watch."""


@dataclass(frozen=True)
class JoinTerms:
    """The terms on which this machine takes part."""

    watch: str = "off"
    hours: Hours | None = None
    yields: bool = False

    @classmethod
    def of(cls, watch: str, hours: str | None, *, yields: bool) -> "JoinTerms":
        return cls(check_watch(watch), Hours.parse(hours) if hours is not None else None, yields)


class JoinSession:
    def __init__(self, config: WorkersConfig, terms: JoinTerms, control: Control, names: list[str]) -> None:
        self._config = config
        self._control = control
        self._names = names
        self._watch = terms.watch
        yielding = None
        if terms.yields:
            yielding = YieldWatch(find_use(config.count * (config.ranks or 1), os.cpu_count() or usable_cores()))
        self._absences = AbsenceWatch(control, terms.hours, yielding)
        self._interrupts = Interrupts(lambda number: None)
        self._notices = NoticeWatch()
        self._notice: Notice | None = None
        self._is_going = False
        """For good: it was said."""
        self._was_away = False

    def run(self, command: list[str], environment: dict[str, str], folder: Path) -> int:
        """Run workers until the run is over for this machine. `folder`: for what parent and workers tell each other."""
        why, kept = folder / "leaving", folder / "patience"
        environment = environment | {LEAVING: str(why), RETURNING: str(kept)}
        with ExitStack() as stack:
            stack.enter_context(self._interrupts.handled())
            if self._watch != "off" and NOTICE_SIGNAL is not None:
                stack.enter_context(handling((NOTICE_SIGNAL,), self._on_notice_signal))
                environment[IGNORED] = f"{os.environ.get(IGNORED, '')} {signal.Signals(NOTICE_SIGNAL).name}"
            self._notices = stack.enter_context(closing(start_watch(self._watch, say)))
            while True:
                if not self._await_turn():
                    return Interrupted.exit_code
                why.unlink(missing_ok=True)
                if self._was_away and not kept.exists():  # none of ours was in yet
                    kept.write_text(str(USUAL_PATIENCE_S), encoding="utf-8")
                code = self._work(WorkerPool(command, self._config, environment), why)
                if code is not None:
                    return code

    # Why it goes

    def _on_notice_signal(self, number: int) -> None:
        self._notice = self._notice or Notice(signal.Signals(number).name, None)

    def _end(self) -> tuple[str, str] | None:
        """Why this machine goes for good, if it does: for its owner, and for the host."""
        now = time.time()
        self._notice = self._notice or self._notices.notice
        if self._notice is None and signal.SIGTERM in self._interrupts.heard:
            self._notice = Notice("SIGTERM", now + GRACE_S)
        if self._notice is not None:
            sentence = f"{self._notice.sentence(now)}: leaving after this step."
            return sentence, f"its machine is taken back ({self._notice.source})"
        if self._interrupts.count:
            return "Leaving after this step. Ctrl-C again leaves at once.", "asked to stop"
        return None

    @property
    def _is_late(self) -> bool:
        """There is no time to be polite in."""
        seconds = self._notice.seconds(time.time()) if self._notice is not None else None
        return self._interrupts.count > 1 or (seconds is not None and seconds < MARGIN_S and self._is_going)

    # Waiting, and working

    def _await_turn(self) -> bool:
        """Wait until nothing speaks against working. Returns whether that came."""
        shown: Absence | None = None
        while (absence := self._absences.look(tuple)) is not None:
            if shown is None or absence.reason != shown.reason:  # others' use alone changes every few seconds
                say(absence.sentence)
            if absence != shown:
                self._control.tell("paused", absence.sentence)
                shown = absence
            if self._end() is not None:
                say("Ended while it was away.")
                return False
            time.sleep(POLL_S)
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
                    absence = self._absences.look(lambda: self._computing(pool))
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
        why.write_text(reason, encoding="utf-8")
        if pool is not None:
            pool.interrupt()

    def _computing(self, pool: WorkerPool) -> Collection[int]:
        return family(pool.pids)
