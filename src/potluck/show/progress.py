"""The terminal: a live view where there is one, plain lines elsewhere. Reads events and knows nothing else."""

import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from potluck.events import (
    CheckpointSaved,
    Decided,
    Event,
    Noticed,
    Ordered,
    RunEnded,
    RunStarted,
    StepDone,
    StepSkipped,
    Validated,
    WentBack,
    WorkerStep,
    record_of,
)
from potluck.show.pace import Pace
from potluck.show.sentences import STYLES, sentence_of, without_figures
from potluck.show.small_terminal import SmallTerminal
from potluck.words import count, duration, percent, plural, printable

LINE_EVERY_S = 5.0
"""Seconds between two lines without a terminal, at least."""
MOST_DRAWN = 4
"""Rows below the table that a worker's script may draw."""
ADDED = ("rows", "samples", "busy_s", "wait_s", "send_s")
"""Figures of a worker that are added up over the run."""


class BesideTable(io.TextIOBase):
    """Stands in for a stream of this process while there is a live table: lines go above it, and bars below."""

    def __init__(self, stream: Any, tell: Callable[[list[str], list[str]], None]) -> None:
        self._stream, self._tell = stream, tell
        self._terminal: SmallTerminal | None = SmallTerminal()

    def __getattr__(self, name: str) -> Any:  # its file number, by which a bar finds how wide it may be, and the like
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._terminal is None:  # a bar may have kept it from before the table's end
            return int(self._stream.write(text))
        lines = self._terminal.feed(text)
        if "\r" not in text and "\x1b" not in text:  # no bar that will go up again
            lines += self._terminal.settle()
        self._tell(lines, self._terminal.drawn)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(self._stream, "encoding", "utf-8"))

    def end(self) -> Any:
        """Tell what is left, and return the stream."""
        terminal, self._terminal = self._terminal, None
        if terminal is not None:
            self._tell(terminal.close(), [])
        return self._stream


class LiveTable(Live):
    """A table that stays below the lines that are printed above it."""

    def say(self, line: Text) -> None:
        """Print a line with no drawing in between: rich's own goes up by the rows of the table as it was when it began,
        and one of other rows, drawn meanwhile by its thread, would leave one behind or take one too many."""
        with self._lock:
            self.console.print(line)


class Progress:
    """A listener. Give it a console to see what a person would."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())
        self._live: LiveTable | None = None
        self._run: RunStarted | None = None
        self._last: StepDone | None = None
        self._decided: Decided | None = None
        self._told = ""
        """The last reason that was said, without its numbers."""
        self._validation = ""
        """What else was found at the last validation."""
        self._sums: dict[str, WorkerStep] = {}
        """What each worker did in the whole run, by its name."""
        self._skipped = 0
        self._pace = Pace()
        self._line_at = -LINE_EVERY_S
        self._drawn: dict[str, list[str]] = {}
        """Rows that each worker's script draws over now, such as a progress bar."""

    def __call__(self, event: Event, at: float | None = None) -> None:
        """`at`: when it was emitted, in seconds since 1970, if that is not now."""
        match event:
            case RunStarted():
                self._start(event)
            case StepDone():
                self._last = event
                self._pace.add(time.time() if at is None else at, event.step, event.samples, event.seconds)
                self._add_up(event.workers)
                self._show_step()
            case Decided():
                was, self._decided = self._decided, event  # shown with the next step: it is what led to that
                if was is not None and bool(was.anchor) != bool(event.anchor):  # from steps to windows, or back
                    self._say_reason()
            case StepSkipped():
                self._skipped += 1
                self._say_event(event)
            case Validated():
                self._validation = event.in_words.replace("validation loss", "validation", 1)
                if self._live is not None:
                    self._live.update(self._picture())
                else:
                    self.say(f"step {event.step}: {event.in_words}")
            case CheckpointSaved() if self._live is not None:
                pass
            case Noticed() | Ordered():  # the one that emits these says them too
                if isinstance(event, Ordered) and event.action == "resume" and event.done:
                    self._pace.clear()
            case WentBack():
                self._pace.clear()
                self._say_event(event)
            case RunEnded():
                self._give_back_streams()  # before the last picture, beside which nothing is drawn
                if self._live is not None and self._sums:
                    self._live.update(self._picture(of_run=True))
                self.close()
            case _:
                self._say_event(event)

    def _say_event(self, event: Event) -> None:
        if (told := sentence_of(record_of(event))) is not None:
            self.say(told.text, style=STYLES[told.tone])

    def say_of(self, worker: str, lines: Sequence[str], drawn: Sequence[str] = (), *, is_error: bool = False) -> None:
        """Show lines that a worker's script printed; and what it draws over, below the table, where there is one."""
        mark = f"[{worker}] " if worker else ""
        for line in lines:
            if self._live is None and is_error:
                print(f"{mark}{printable(line)}", file=sys.stderr, flush=True)
            else:
                self._print(Text(mark) + Text.from_ansi(line))
        self._drawn[f"{worker} {is_error}"] = [f"{mark}{row}" for row in drawn[-MOST_DRAWN:]]
        if self._live is not None:
            self._live.update(self._picture())

    def say(self, text: str, style: str = "") -> None:
        self._print(Text(text, style=style))

    def _print(self, line: Text) -> None:
        (self._live.say if self._live is not None else self.console.print)(line)

    def close(self) -> None:
        if self._live is not None:
            self._give_back_streams()
            self._live.stop()
            self._live = None

    def _give_back_streams(self) -> None:
        for name in ("stdout", "stderr"):
            if isinstance(stream := getattr(sys, name), BesideTable):
                setattr(sys, name, stream.end())

    def _live_say(self, *, is_error: bool) -> Callable[[list[str], list[str]], None]:
        """Show what is printed in this process, which needs no name."""
        return lambda lines, drawn: self.say_of("", lines, drawn, is_error=is_error)

    def _start(self, run: RunStarted) -> None:
        self._run = run
        self._pace.clear()
        steps = plural(run.steps_total, "step") if run.steps_total else "steps"
        self.say(
            f"Training {count(run.parameters)} parameters on {plural(run.workers, 'worker')} ({run.device}): {steps} of"
            f" {plural(run.batch_size, 'row')}, in {run.folder}"
        )
        if run.layout:
            self.say(run.layout, style="dim")
        if run.from_step:
            self.say(f"Continuing from step {run.from_step:,}.")
        if self.console.is_terminal:
            self._live = LiveTable(
                self._picture(),
                console=self.console,
                refresh_per_second=4,
                redirect_stdout=False,  # rich's own would make a line of each state of a progress bar
                redirect_stderr=False,
            )
            self._live.start()
            for name in ("stdout", "stderr"):
                setattr(sys, name, BesideTable(getattr(sys, name), self._live_say(is_error=name == "stderr")))

    def _show_step(self) -> None:
        if self._live is not None:
            self._live.update(self._picture())
            return
        if self._run is None:
            return
        assert self._last is not None
        now = time.perf_counter()
        if now - self._line_at >= LINE_EVERY_S or self._last.step == self._run.steps_total:
            self._line_at = now
            self.say(f"{self._headline()}{self._waiting(self._last.workers)}")
            self._say_reason()

    def _waiting(self, workers: tuple[WorkerStep, ...]) -> str:
        if any(worker.send_s for worker in workers):
            told = ", ".join(f"{_name(worker)} {'/'.join(_shares(worker))}" for worker in workers)
            return f"; busy/waiting/sending: {told}"
        waits = " ".join(f"{w.name or w.rank}:{share(w.wait_s, w.busy_s)}" for w in workers)
        return f", waiting {waits}" if len(workers) > 1 else ""

    def _say_reason(self) -> None:
        """When something else is decided than before."""
        if self._decided is not None and (without := without_figures(self._decided.reason)) != self._told:
            self._told = without
            self.say(f"  {sentence(self._decided.reason)}", style="dim")

    def _headline(self) -> str:
        run, last = self._run, self._last
        assert run is not None
        of_all = f"/{run.steps_total:,}" if run.steps_total else ""
        if last is None:
            return f"step {run.from_step:,}{of_all}, computing the {'next' if run.from_step else 'first'} one"
        validation = f", {self._validation}" if self._validation else ""
        skipped = f", {self._skipped} skipped" if self._skipped else ""
        left_s, rate = self._pace.left_s(run.steps_total), self._pace.rate
        left = f", {duration(left_s[0])} left" if left_s is not None else ""
        speed = f", {rate:,.0f} {run.unit}/s" if rate is not None else ""
        return f"step {last.step:,}{of_all}, loss {last.loss:.4f}{validation}{speed}{left}{skipped}"

    def _add_up(self, workers: tuple[WorkerStep, ...]) -> None:
        for new in workers:
            old = self._sums.get(_name(new), WorkerStep(rank=new.rank, rows=0, samples=0, busy_s=0, wait_s=0))
            sums = {each: getattr(old, each) + getattr(new, each) for each in ADDED}
            self._sums[_name(new)] = replace(new, **sums)

    def _picture(self, *, of_run: bool = False) -> Group:
        """Draw the state as of the last step or window; at the end, of the whole run."""
        assert self._run is not None
        done = self._last.step if self._last is not None else self._run.from_step
        bar = Table.grid()  # a bar by itself would not end its line
        if self._run.steps_total:
            bar.add_row(ProgressBar(total=self._run.steps_total, completed=done, width=60))
        workers = self._last.workers if self._last is not None else ()
        if of_run:
            return Group(Text(self._headline(), style="bold"), bar, self._table(tuple(self._sums.values())))
        reason = [Text(sentence(self._decided.reason), style="dim")] if self._decided is not None else []
        drawn = [
            Text.from_ansi(row, no_wrap=True, overflow="ellipsis") for rows in self._drawn.values() for row in rows
        ]
        return Group(Text(self._headline(), style="bold"), bar, self._table(workers), *reason, *drawn)

    def _table(self, workers: tuple[WorkerStep, ...]) -> Table:
        assert self._run is not None
        if any(worker.send_s for worker in workers):
            return _table_of_stages(workers)
        table = _table_of("worker", "rows", "share", "busy", "waiting", f"{self._run.unit}/s")
        rows = sum(worker.rows for worker in workers)
        for worker in workers:
            took = max(worker.busy_s + worker.wait_s, 1e-9)
            table.add_row(
                Text(_name(worker)),  # as it is: brackets in a bare string would be instructions
                f"{worker.rows:,}",
                share(worker.rows, rows - worker.rows),
                f"{worker.busy_s * 1000:,.0f} ms" if worker.busy_s < 10 else f"{worker.busy_s:,.1f} s",
                share(worker.wait_s, worker.busy_s),
                f"{worker.samples / took:,.0f}",
            )
        return table


def _table_of_stages(workers: tuple[WorkerStep, ...]) -> Table:
    """Show where the time of each stage goes."""
    table = _table_of("stage", "rows", "busy", "waiting", "sending")
    for worker in workers:
        table.add_row(Text(_name(worker).removeprefix("stage ")), f"{worker.rows:,}", *_shares(worker))
    return table


def _table_of(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (first, *others):
        table.add_column(Text(name), justify="left" if name == first else "right", min_width=9)
    return table


def _shares(worker: WorkerStep) -> list[str]:
    """Busy, waiting, sending."""
    parts = (worker.busy_s, worker.wait_s, worker.send_s)
    return [share(part, sum(parts) - part) for part in parts]


def _name(worker: WorkerStep) -> str:
    return worker.name or f"{worker.rank}"


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def share(part: float, rest: float) -> str:
    return percent(part / max(part + rest, 1e-9))
