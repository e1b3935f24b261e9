"""potluck demo fleet: a worker and the host of a run are killed, another joins, and no bit of the weights changes.

Real commands and real kills; what is told is read from the run's events. Imports no torch.
"""

import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from potluck.config import parse_toml
from potluck.errors import ConfigError, PotluckError
from potluck.files import first_free, table_in
from potluck.launch.demo_children import Child, Children
from potluck.page.reader import EVENTS
from potluck.save import checkpoint_folder
from potluck.save.export import write_plain
from potluck.save.run_folder import holds_run, make_run_folder
from potluck.show.fleet_story import Comparison, FleetStory, Progression, StoryLine, together
from potluck.show.sentences import Record
from potluck.signals import END, handling
from potluck.train.arguments import TrainArgs, find_recipe, workers_of
from potluck.waiting import POLL_S
from potluck.words import plural

RECIPE = "demo-fleet"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOrder:
    settings: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    joiners: int = 3
    out: str | None = None
    page: str | None = None
    """Where the page of the disturbed run is, as --page says it."""
    undisturbed: tuple[str, ...] = ()
    """Settings of the undisturbed run alone. For tests: with another seed the weights must differ, and be found to."""


def demo_fleet(order: FleetOrder) -> int:
    """Returns the exit code."""
    check(order)
    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal  # elsewhere, the reader breaks the lines
    folder = find_folder(order.out)
    for each in (folder, folder / "logs"):
        make_run_folder(each)  # for its owner alone: the host's words hold the invite
    with ExitStack() as stack:
        stack.enter_context(handling(END, _interrupt))
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-demo-", ignore_cleanup_errors=True))
        teller = _Teller(console)
        teller.greet(order.joiners)
        epochs = epochs_of(order)
        for attempt in range(ATTEMPTS):
            try:
                with Children(folder / "logs", Path(temporary)) as children:
                    demo = _FleetDemo(order, folder, children, teller)
                    story = demo.disturb(epochs)
                    undisturbed = demo.leave_undisturbed()
                return show_verdict(console, folder, story, undisturbed)
            except _OverTooSoon as error:
                epochs *= 4
                advice = f"Make it longer: potluck demo fleet --set fit.epochs={epochs}"
                if attempt == ATTEMPTS - 1:
                    raise PotluckError(f"{error} {advice}") from None
                teller.tell(f"{error} Once more, with {epochs} epochs.", "yellow")
                order = replace(order, settings=(*order.settings, f"fit.epochs={epochs}"))
                (folder / DISTURBED).rename(folder / f"too-short-{attempt + 1}")
    raise AssertionError("unreachable")


def check(order: FleetOrder) -> None:
    if order.joiners < 2:
        raise ConfigError("One of those who join is killed, so it takes at least two: potluck demo fleet -n 2")
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
        return first_free(Path("runs") / RECIPE, is_taken)
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

    def greet(self, joiners: int) -> None:
        self.console.print(
            f"Potluck: a host leads a run, and {joiners} workers join it, all on this machine. One is killed, another"
            " joins, the host is killed. Then the same run once more, left alone, to compare the weights.",
            style="bold",
        )

    def tell(self, text: str, style: str = "") -> None:
        self.print(StoryLine(time.time(), text, style))

    def print(self, told: StoryLine) -> None:
        seconds = max(0, int(told.at - self.began))
        stamp, text = Text(f"{seconds // 60:02}:{seconds % 60:02}  ", style="dim"), Text(told.text, style=told.style)
        if not self.console.is_terminal:
            self.console.print(stamp + text)
            return
        line = Table.grid()  # a long sentence stays right of its time
        line.add_row(stamp, text)
        self.console.print(line)

    @contextmanager
    def showing(self, story: FleetStory) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        live = Live(
            get_renderable=lambda: draw_progress(story),
            console=self.console,
            transient=True,
            refresh_per_second=8,
        )
        with live:
            yield


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


class _Watch:
    """A run's events, told as they arrive, while its processes are watched over."""

    def __init__(self, folder: Path, children: Children, teller: _Teller, names: dict[int, str]) -> None:
        self.story = FleetStory(lambda name: shown_name(name, names))
        self._tail = EventTail(folder / EVENTS)
        self._children, self._teller = children, teller
        self._heard_at = time.monotonic()

    def wait(self, what: str, holds: Callable[[], bool], *, is_last: bool = False) -> None:
        """Wait until it holds by the events; a child that fails, or a run that is over before it, ends the waiting."""
        while not holds():
            self.hear()
            if holds():
                return
            self._children.check()
            if self.story.run.ended is not None and not is_last:
                step = self.story.run.step
                raise _OverTooSoon(
                    f"The run was over, after step {step}, before {what}: it is too short for this machine."
                )
            if time.monotonic() > self._heard_at + PATIENCE_S:
                raise PotluckError(
                    f"For {PATIENCE_S:.0f} s nothing has happened, while we waited for this: {what}. What each process"
                    f" said is in {self._children.logs}."
                )
            time.sleep(POLL_S)

    def wait_for_end(self) -> None:
        self.wait("the end", self._children.have_ended, is_last=True)
        self.hear()

    def hear(self) -> None:
        for record in self._tail.read():
            self._heard_at = time.monotonic()
            for told in self.story.hear(record):
                self._teller.print(told)


def shown_name(name: str, names: dict[int, str]) -> str:
    """A worker's name in the events is that of its machine and the number of the process that brought it."""
    number = name.rpartition("-")[2]
    return names.get(int(number), name) if number.isdecimal() else name


class _FleetDemo:
    def __init__(self, order: FleetOrder, folder: Path, children: Children, teller: _Teller) -> None:
        self.order, self.folder, self.children, self.teller = order, folder, children, teller
        self.run = folder / DISTURBED
        self.names: dict[int, str] = {}
        """What each who joins is called, by the number of its process."""
        self.watch = _Watch(self.run, children, teller, self.names)
        self.threads = str(workers_of(TrainArgs(recipe=RECIPE, settings=order.settings)).threads or 1)

    # The story

    def disturb(self, epochs: int) -> FleetStory:
        story = self.watch.story
        with self.teller.showing(story):
            host = self._host()
            joiners = [self._join() for _ in range(self.order.joiners)]
            names = together([each.name for each in joiners])
            self.teller.tell(f"A host and {names} are started; each loads PyTorch.")
            self.watch.wait("anybody joined", lambda: self._tells_of_page(host) or bool(story.present))
            self.watch.wait("it was well under way", lambda: story.run.step >= KILL_AFTER_STEP)
            self._kill_joiner(joiners[1])
            self._bring_another(epochs)
            host = self._kill_host(host)
            self.watch.wait_for_end()
        if not story.run.is_finished:
            raise host.failure()
        return story

    def _kill_joiner(self, joiner: Child) -> None:
        self.teller.tell(
            f"Next: kill -9 {joiner.name}. A DDP run would end here: each step needs all of its ranks.", "bold"
        )
        self._kill(joiner)
        self.watch.wait("the others continued", lambda: self.watch.story.kills[-1].next_step is not None)

    def _bring_another(self, epochs: int) -> None:
        story = self.watch.story
        self.teller.tell(
            "Next: another worker joins. A DDP run could not take it: who takes part is fixed when it starts.", "bold"
        )
        before, began = story.run.step, time.time()
        newcomer = self._join()
        self.teller.tell(f"{newcomer.name} is started, and loads PyTorch.")
        self.watch.wait(f"{newcomer.name} had loaded PyTorch and joined", lambda: newcomer.name in story.joined_late)
        steps, seconds = story.joined_late[newcomer.name] - before, time.time() - began
        self.teller.tell(f"Nobody waited for it: the others did {plural(steps, 'step')} in these {seconds:.0f} s.")
        target = story.run.step + STEPS_TOGETHER
        self.watch.wait(
            "the host could be killed", lambda: story.run.step >= target and is_within_epoch(story.run, epochs)
        )

    def _kill_host(self, host: Child) -> Child:
        story = self.watch.story
        self.teller.tell(
            "Next: kill -9 the host. A DDP run would end here too: its ranks meet at one of them, which is gone.",
            "bold",
        )
        self._kill(host, is_host=True)
        again = self._host(resume=True)
        self.teller.tell("The host is started again, with --resume.")
        self.watch.wait("it had resumed", lambda: story.kills[-1].next_step is not None)
        return again

    def _kill(self, child: Child, *, is_host: bool = False) -> None:
        at = child.kill()
        self.watch.hear()
        self.teller.print(self.watch.story.on_kill(child.name, at, is_host=is_host))

    def leave_undisturbed(self) -> Progression:
        """Do the run again with one worker of its own host: under Sync the bits do not depend on how many there are."""
        run = self.folder / UNDISTURBED
        watch = _Watch(run, self.children, self.teller, {})
        self.teller.tell("The same run once more, undisturbed, by one worker.", "bold")
        settings = (*self._settings(), *_set(self.order.undisturbed))
        with self.teller.showing(watch.story):
            alone = ("-n", "1", "--threads", self.threads, "--page", "off")
            self.children.start("undisturbed host", "host", RECIPE, "--out", str(run), *alone, *settings)
            watch.wait_for_end()
        return watch.story.run

    # Processes

    def _settings(self) -> tuple[str, ...]:
        return (*_set(self.order.settings), *(("--data", *self.order.data) if self.order.data else ()))

    def _host(self, *, resume: bool = False) -> Child:
        what = [str(self.run / "run.toml"), "--resume"] if resume else [RECIPE, *self._settings()]
        least = ("--at-least", "1" if resume else str(self.order.joiners))
        page = ("--page", self.order.page) if self.order.page is not None else ()
        host = self.children.start("the host", "host", *what, "--out", str(self.run), "-n", "0", *least, *page)
        invite = self.run / "invite"
        self.watch.wait("the host listened", lambda: invite.exists() and invite.read_bytes().endswith(b"\n"))
        return host

    def _join(self) -> Child:
        name = f"joiner-{len(self.names) + 1}"
        data = [word for path in self.order.data for word in ("--data", path)]
        joiner = self.children.start(name, "join", "--threads", self.threads, *data, str(self.run / "invite"))
        self.names[joiner.process.pid] = name
        return joiner

    def _tells_of_page(self, host: Child) -> bool:
        """Say where the run can be watched, once the host says that it serves a page."""
        found = re.search(r"^The page of this run: (\S+)", host.log.read_text(encoding="utf-8"), re.MULTILINE)
        if found is not None:
            self.teller.tell(f"Watch it live: {found[1]}", "bold cyan")
        return found is not None


def epochs_of(order: FleetOrder) -> int:
    text, source = find_recipe(RECIPE)
    fit = parse_toml(text, source=source, overrides=order.settings).get("fit", {})
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


def _set(settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for setting in settings for word in ("--set", setting))


def show_verdict(console: Console, folder: Path, story: FleetStory, undisturbed: Progression) -> int:
    """The table, a sentence, and the exit code."""
    hashes = (export_and_hash(folder, DISTURBED), export_and_hash(folder, UNDISTURBED))
    comparison = Comparison(story, undisturbed, hashes)
    console.print(draw_table(comparison), soft_wrap=False)
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


def draw_table(comparison: Comparison) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "disturbed", "undisturbed"):
        table.add_column(heading, overflow="fold")
    for row in comparison.rows():
        table.add_row(*row)
    return table


def export_and_hash(folder: Path, name: str) -> str:
    """Hash the plain safetensors file of a run's last checkpoint, as `potluck export` writes it."""
    out = folder / f"{name}.safetensors"
    checkpoints = checkpoint_folder.found(folder / name / "checkpoints")
    if not checkpoints:
        raise PotluckError(f"The {name} run has left no checkpoint in {folder / name}.")
    write_plain(checkpoints[0], out)
    with out.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
