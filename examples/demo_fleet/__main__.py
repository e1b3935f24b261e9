"""The fleet's demo: a worker and the host of a run are killed, another joins, and no bit of the weights changes.

python -m examples.demo_fleet

Real commands and real kills; what is told is read from the run's events. Imports no torch.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from examples.demo_fleet.story import Comparison, FleetStory, Progression, StoryLine, together
from potluck.config import parse_toml
from potluck.errors import ConfigError, Interrupted, PotluckError
from potluck.files import first_free, table_in
from potluck.launch.options import Data, Out, Page, Settings, option
from potluck.page.reader import EVENTS
from potluck.save import checkpoint_folder
from potluck.save.export import write_plain
from potluck.save.run_folder import holds_run, make_run_folder
from potluck.show.sentences import Record
from potluck.signals import END, handling
from potluck.system import HAS_GROUPS
from potluck.train.arguments import TrainArgs, find_recipe, workers_of
from potluck.waiting import POLL_S, wait_until
from potluck.words import plural, say

RECIPE = str(Path(__file__).with_name("recipe.toml"))
NAME = "demo-fleet"
DISTURBED, UNDISTURBED = "disturbed", "undisturbed"
KILL_AFTER_STEP = 20
"""The first kill: when the run is well under way."""
STEPS_TOGETHER = 15
"""Steps with the newcomer, before the host is killed; and steps afterwards that are sure to be seen."""
EDGE_STEPS = 3
"""The host is not killed so close to the end of an epoch, whose proof it could be about to write."""
ATTEMPTS = 3
"""Each of a longer run, where this machine trains so fast that it is over before the story is."""
PATIENCE_S = 240.0
"""Seconds without any event. Loading PyTorch takes seconds, and minutes on a machine that does much else."""
GRACE_S = 5.0
"""How long each has to end by itself, when all are asked to."""
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Keeps children off the GPU: so small a model is trained sooner without one than one is woken."""
LAST_LINES = 12
"""How many lines of a child that failed are shown."""


@dataclass(frozen=True, kw_only=True)
class FleetOrder:
    """A host, and workers that join it, on this machine: one is killed with -9, another joins, the host is killed.

    The weights are, bit for bit, those of the same run undisturbed.
    """

    data: Data = ()
    joiners: Annotated[int, option("N", "Workers that join at first.", name="workers", aliases=["-n"])] = 3
    out: Out = None
    page: Page = None
    settings: Settings = field(default_factory=list)
    undisturbed: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Settings of the undisturbed run alone. For tests: with another seed the weights must differ, and be found to."""


def demo_fleet(order: FleetOrder) -> int:
    """Returns the exit code."""
    check(order)
    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal  # elsewhere, the reader breaks the lines
    folder = find_folder(order.out)
    for each in (folder, folder / "logs"):
        make_run_folder(each)  # for its owner alone: the host's words hold the invite
    teller, epochs = _Teller(console), epochs_of(order)
    console.print(
        f"Potluck: a host leads a run, and {order.joiners} workers join it, all on this machine. One is killed, another"
        " joins, the host is killed. Then the same run once more, left alone, to compare the weights.",
        style="bold",
    )
    temporary = tempfile.TemporaryDirectory(prefix="potluck-demo-", ignore_cleanup_errors=True)
    with handling(END, _interrupt), temporary as place:
        for attempt in range(ATTEMPTS):
            try:
                with Children(folder / "logs", Path(place)) as children:
                    story = _Run(order, folder / DISTURBED, children, teller).disturb(epochs)
                    undisturbed = _Run(order, folder / UNDISTURBED, children, teller).leave_undisturbed()
                return show_verdict(console, folder, story, undisturbed)
            except _OverTooSoon as error:
                epochs *= 4
                advice = f"Make it longer, with --set fit.epochs={epochs}"
                if attempt == ATTEMPTS - 1:
                    raise PotluckError(f"{error} {advice}") from None
                teller.tell(f"{error} Once more, with {epochs} epochs.", "yellow")
                order = replace(order, settings=[*order.settings, f"fit.epochs={epochs}"])
                (folder / DISTURBED).rename(folder / f"too-short-{attempt + 1}")
    raise AssertionError("unreachable")


def check(order: FleetOrder) -> None:
    if order.joiners < 2:
        raise ConfigError("One of those who join is killed, so it takes at least two: -n 2")
    if any(setting.startswith("policy") for setting in order.settings):
        raise ConfigError(
            "The promise of the same bits is Sync's, so the policy is not changed here. Try another with: potluck host"
            " demo --set policy.kind=cadence"
        )


def find_folder(out: str | None) -> Path:
    """--out, or runs/demo-fleet with a number."""

    def is_taken(folder: Path) -> bool:
        return any(map(holds_run, (folder, folder / DISTURBED, folder / UNDISTURBED)))

    if out is None:
        return first_free(Path("runs") / NAME, is_taken)
    if is_taken(Path(out)):
        raise ConfigError(f"{out} already holds a run. Name another folder with --out.")
    return Path(out)


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


class EventTail:
    """Reads what is new in a file of events. A line is read once it is whole; one that a kill has cut is passed
    over."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def read(self) -> list[Record]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return []
        self._at += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [record for line in lines if "event" in (record := table_in(line))]


class _Teller:
    """The terminal: stamped lines, and below them, where it is a real one, a line that says where the run stands."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.time()

    def tell(self, text: str, style: str = "") -> None:
        self.print(StoryLine(time.time(), text, style))

    def print(self, told: StoryLine) -> None:
        minutes, seconds = divmod(max(0, int(told.at - self.began)), 60)
        stamp, text = Text(f"{minutes:02}:{seconds:02}  ", style="dim"), Text(told.text, style=told.style)
        line = Table.grid()  # a long sentence stays right of its time
        line.add_row(stamp, text)
        self.console.print(line if self.console.is_terminal else stamp + text)

    def showing(self, story: FleetStory) -> AbstractContextManager[Any]:
        if not self.console.is_terminal:
            return nullcontext()
        draw = partial(draw_progress, story)
        return Live(get_renderable=draw, console=self.console, transient=True, refresh_per_second=8)


def draw_progress(story: FleetStory) -> Table:
    run, grid = story.run, Table.grid(padding=(0, 1))
    if not run.total:
        grid.add_row(Text("waiting for the first step ...", style="dim"))
        return grid
    loss = f"loss {run.loss:.3f}" if run.loss is not None else ""
    who = ", ".join(f"{story.shown(name)} {rows}" for name, rows in run.rows.items())
    bar = ProgressBar(total=run.total, completed=run.step, width=20)
    grid.add_row(f"step {run.step}/{run.total}", bar, loss, Text(f"rows: {who}", style="dim", overflow="ellipsis"))
    return grid


def shown_name(name: str, names: dict[int, str]) -> str:
    """A worker's name in the events is that of its machine and the number of the process that brought it."""
    number = name.rpartition("-")[2]
    return names.get(int(number), name) if number.isdecimal() else name


class ChildFailed(PotluckError):
    """A child failed: its last words are in the sentence."""


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    is_doomed: bool = False
    """We have killed it, so that its end is none of its own."""

    def check(self) -> None:
        """ChildFailed, if it has failed by itself."""
        if not self.is_doomed and self.process.poll():
            raise self.failure()

    def failure(self) -> ChildFailed:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        words = "\n".join(f"  {line}" for line in text.strip().splitlines()[-LAST_LINES:])
        said = f" The last it said, in {self.log}:\n{words}" if words else f" It said nothing ({self.log})."
        return ChildFailed(f"{self.name} stopped with exit code {self.process.returncode}.{said}")

    def kill(self) -> float:
        """-9: what computes first, then what has started it, before either can say a word. Returns when."""
        self.is_doomed = True
        computing = _started_by(self.process)
        at = time.time()
        _kill(computing)
        self.process.kill()
        self.process.wait()
        return at


class Children:
    """Each in a session of its own: Ctrl-C reaches us, and we end them. Leaving the context ends all of them."""

    def __init__(self, logs: Path, temporary: Path) -> None:
        self.logs, self._temporary = logs, temporary
        self._all: list[Child] = []

    def start(self, name: str, *arguments: str) -> Child:
        log = self.logs / f"{name.replace(' ', '-')}.log"
        # What a killed process leaves in its temporary folder goes with ours.
        environment = os.environ | ON_CPU | {"TMPDIR": str(self._temporary), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "potluck.cli", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=HAS_GROUPS,
            )
        child = Child(name, process, log)
        self._all.append(child)
        return child

    def check(self) -> None:
        for child in self._all:
            child.check()

    def have_ended(self) -> bool:
        return all(child.process.poll() is not None for child in self._all)

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *exception: object) -> None:
        """Politely first: a worker that leaves, or a host that saves, ends its own. Another Ctrl-C ends all now."""
        living = [child for child in self._all if child.process.poll() is None]
        computing = [process for child in living for process in _started_by(child.process)]
        try:
            for child in living:
                child.is_doomed = True
                child.process.send_signal(signal.SIGTERM)
            wait_until(self.have_ended, GRACE_S)
        finally:
            for child in living:
                child.process.kill()
                child.process.wait()
            _kill(computing)


def _started_by(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return list(psutil.Process(process.pid).children())
    return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has ended; psutil knows if its number is another's by now
            process.kill()


class _Run:
    """A run of the demo: its processes, and its events, told as they arrive."""

    def __init__(self, order: FleetOrder, folder: Path, children: Children, teller: _Teller) -> None:
        self.order, self.folder, self.children, self.teller = order, folder, children, teller
        self.names: dict[int, str] = {}
        """What each who joins is called, by the number of its process."""
        self.story = FleetStory(lambda name: shown_name(name, self.names))
        self.tell = teller.tell
        self._tail = EventTail(folder / EVENTS)
        self._heard_at = time.monotonic()
        self._threads = str(workers_of(TrainArgs(recipe=RECIPE, settings=tuple(order.settings))).threads or 1)

    # The story

    def disturb(self, epochs: int) -> FleetStory:
        story = self.story
        with self.teller.showing(story):
            host = self._host()
            joiners = [self._join() for _ in range(self.order.joiners)]
            names = together([each.name for each in joiners])
            self.tell(f"A host and {names} are started; each loads PyTorch.")
            self._wait("anybody joined", lambda: self._tells_of_page(host) or bool(story.present))
            self._wait("it was well under way", lambda: story.run.step >= KILL_AFTER_STEP)
            lost = joiners[1]
            self.tell(f"Next: kill -9 {lost.name}. A DDP run would end here: each step needs all of its ranks.", "bold")
            self._kill(lost)
            self._wait("the others continued", lambda: story.kills[-1].next_step is not None)
            self._bring_another(epochs)
            host = self._kill_host(host)
            self._wait_for_end()
        if not story.run.is_finished:
            raise host.failure()
        return story

    def _bring_another(self, epochs: int) -> None:
        run, late = self.story.run, self.story.joined_late
        self.tell(
            "Next: another worker joins. A DDP run could not take it: who takes part is fixed when it starts.", "bold"
        )
        before, began = run.step, time.time()
        newcomer = self._join()
        self.tell(f"{newcomer.name} is started, and loads PyTorch.")
        self._wait(f"{newcomer.name} had loaded PyTorch and joined", lambda: newcomer.name in late)
        steps, seconds = late[newcomer.name] - before, time.time() - began
        self.tell(f"Nobody waited for it: the others did {plural(steps, 'step')} in these {seconds:.0f} s.")
        target = run.step + STEPS_TOGETHER
        self._wait("the host could be killed", lambda: run.step >= target and is_within_epoch(run, epochs))

    def _kill_host(self, host: Child) -> Child:
        self.tell(
            "Next: kill -9 the host. A DDP run would end here too: its ranks meet at one of them, which is gone.",
            "bold",
        )
        self._kill(host, is_host=True)
        again = self._host(resume=True)
        self.tell("The host is started again, with --resume.")
        self._wait("it had resumed", lambda: self.story.kills[-1].next_step is not None)
        return again

    def leave_undisturbed(self) -> Progression:
        """Do the run again with one worker of its own host: under Sync the bits do not depend on how many there are."""
        self.tell("The same run once more, undisturbed, by one worker.", "bold")
        alone = ("-n", "1", "--threads", self._threads, "--page", "off", *_set(self.order.undisturbed))
        with self.teller.showing(self.story):
            self.children.start(
                "undisturbed host", "host", RECIPE, "--out", str(self.folder), *self._settings(), *alone
            )
            self._wait_for_end()
        return self.story.run

    # Events

    def _wait(self, what: str, holds: Callable[[], bool], *, is_last: bool = False) -> None:
        """Wait until it holds by the events; a child that fails, or a run that is over before it, ends the waiting."""
        while not holds():
            self._hear()
            if holds():
                return
            self.children.check()
            if self.story.run.ended is not None and not is_last:
                step = self.story.run.step
                raise _OverTooSoon(
                    f"The run was over, after step {step}, before {what}: it is too short for this machine."
                )
            if time.monotonic() > self._heard_at + PATIENCE_S:
                raise PotluckError(
                    f"For {PATIENCE_S:.0f} s nothing has happened, while we waited for this: {what}. What each process"
                    f" said is in {self.children.logs}."
                )
            time.sleep(POLL_S)

    def _wait_for_end(self) -> None:
        self._wait("the end", self.children.have_ended, is_last=True)
        self._hear()

    def _hear(self) -> None:
        for record in self._tail.read():
            self._heard_at = time.monotonic()
            for told in self.story.hear(record):
                self.teller.print(told)

    # Processes

    def _settings(self) -> tuple[str, ...]:
        return (*_set(self.order.settings), *(("--data", *self.order.data) if self.order.data else ()))

    def _host(self, *, resume: bool = False) -> Child:
        what = [str(self.folder / "run.toml"), "--resume"] if resume else [RECIPE, *self._settings()]
        least = ("--at-least", "1" if resume else str(self.order.joiners))
        page = ("--page", self.order.page) if self.order.page is not None else ()
        host = self.children.start("the host", "host", *what, "--out", str(self.folder), "-n", "0", *least, *page)
        invite = self.folder / "invite"
        self._wait("the host listened", lambda: invite.exists() and invite.read_bytes().endswith(b"\n"))
        return host

    def _join(self) -> Child:
        name = f"joiner-{len(self.names) + 1}"
        data = [word for path in self.order.data for word in ("--data", path)]
        joiner = self.children.start(name, "join", "--threads", self._threads, *data, str(self.folder / "invite"))
        self.names[joiner.process.pid] = name
        return joiner

    def _kill(self, child: Child, *, is_host: bool = False) -> None:
        at = child.kill()
        self._hear()
        self.teller.print(self.story.on_kill(child.name, at, is_host=is_host))

    def _tells_of_page(self, host: Child) -> bool:
        """Say where the run can be watched, once the host says that it serves a page."""
        found = re.search(r"^The page of this run: (\S+)", host.log.read_text(encoding="utf-8"), re.MULTILINE)
        if found is not None:
            self.tell(f"Watch it live: {found[1]}", "bold cyan")
        return found is not None


def epochs_of(order: FleetOrder) -> int:
    text, source = find_recipe(RECIPE)
    fit = parse_toml(text, source=source, overrides=tuple(order.settings)).get("fit", {})
    epochs = fit.get("epochs", 1) if isinstance(fit, dict) else 0
    if not isinstance(epochs, int) or epochs < 1:
        raise ConfigError(f"fit.epochs is at least 1, not {epochs!r}.")
    return epochs


def is_within_epoch(run: Progression, epochs: int) -> bool:
    """Tell whether the run is well within an epoch, and neither begins nor ends one."""
    each = max(1, run.total // epochs)
    return EDGE_STEPS < run.step % each < each - EDGE_STEPS or each <= 2 * EDGE_STEPS + 1


class _OverTooSoon(PotluckError):
    """This machine trains faster than it loads PyTorch."""


def _set(settings: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for setting in settings for word in ("--set", setting))


def show_verdict(console: Console, folder: Path, story: FleetStory, undisturbed: Progression) -> int:
    """The table, a sentence, and the exit code."""
    hashes = (export_and_hash(folder, DISTURBED), export_and_hash(folder, UNDISTURBED))
    comparison = Comparison(story, undisturbed, hashes)
    headings = (Column(name, overflow="fold") for name in ("", DISTURBED, UNDISTURBED))
    table = Table(*headings, show_edge=False, pad_edge=False)
    for row in comparison.rows():
        table.add_row(*row)
    console.print(table, soft_wrap=False)
    console.print(f"Both models, for sha256sum: {folder}/*.safetensors. What each process said: {folder}/logs/")
    faults = comparison.faults()
    if faults:
        for fault in faults:
            console.print(fault, style="bold red")
        console.print(
            "This is not as promised. Please report it, with that folder and what potluck doctor says.", style="red"
        )
        return 1
    console.print(
        "The same weights, bit for bit, and each row of each epoch used exactly once: whatever was killed, the run"
        " became what it would have been.",
        style="bold green",
    )
    return 0


def export_and_hash(folder: Path, name: str) -> str:
    """Hash the plain safetensors file of a run's last checkpoint, as `potluck export` writes it."""
    out = folder / f"{name}.safetensors"
    checkpoints = checkpoint_folder.found(folder / name / "checkpoints")
    if not checkpoints:
        raise PotluckError(f"The {name} run has left no checkpoint in {folder / name}.")
    write_plain(checkpoints[0], out)
    with out.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    try:
        return demo_fleet(tyro.cli(FleetOrder, prog="python -m examples.demo_fleet"))
    except PotluckError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code


if __name__ == "__main__":
    sys.exit(main())
