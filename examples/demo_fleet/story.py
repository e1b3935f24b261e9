"""FleetStory: what happens to a fleet, told in sentences as its events arrive; and what two runs came to, side by side.

Reads records of events and what was done to the processes. Knows nothing of how: it starts and ends nothing, and says
only what a record has shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from potluck.show.sentences import STYLES, Record, sentence_of
from potluck.words import count, plural


class StoryLine(NamedTuple):
    """A sentence, when it was true, and how it looks."""

    at: float
    """Time by the clock of the events."""
    text: str
    style: str = ""


@dataclass(slots=True)
class Kill:
    """A process that was killed, and what has been seen of it since."""

    name: str
    at: float
    step: int
    """The last that was done before."""
    is_host: bool = False
    is_noticed: bool = False
    """The events show it: a worker that went without a word, or a host that resumes."""
    next_step: int | None = None
    """The first that was done afterwards."""


@dataclass(slots=True)
class Progression:
    """How far a run is, by its events."""

    step: int = 0
    total: int = 0
    loss: float | None = None
    validation: float | None = None
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of the last step that each worker computed."""
    proofs: dict[int, Record] = field(default_factory=dict)
    """Record of each epoch's end."""
    ended: Record | None = None
    repeated: int = 0
    """Steps that were done again, whoever lost them."""

    def hear(self, record: Record) -> None:
        match record["event"]:
            case "run_started":
                self.total = record["steps_total"]
            case "step_done":
                self.repeated += record["step"] <= self.step
                self.step, self.loss = record["step"], record["loss"]
                self.rows = {worker["name"]: worker["rows"] for worker in record["workers"]}
            case "validated":
                self.validation = record["loss"]
            case "epoch_done":
                self.proofs[record["epoch"]] = record
            case "run_ended":
                self.ended = record

    @property
    def is_finished(self) -> bool:
        return self.ended is not None and self.ended["reason"] == "finished"


class FleetStory:
    """`shown`: what a worker is called here, by the name that it has in the events."""

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        self.run = Progression()
        self.kills: list[Kill] = []
        self.present: list[str] = []
        self.joined_late: dict[str, int] = {}
        """Workers that came when the run was under way, and after which step."""
        self.shown = shown
        self._done_at: list[tuple[float, int]] = []

    def hear(self, record: Record) -> list[StoryLine]:
        """Tell a record as sentences; most have none."""
        lines = list(self._told(record, self.shown(str(record.get("name")))))
        self.run.hear(record)
        return [StoryLine(record["time"], text, style) for text, style in lines]

    def on_kill(self, name: str, at: float, *, is_host: bool = False) -> StoryLine:
        """Note that a process was killed. Call it once the events up to then have been heard."""
        step = max((step for when, step in self._done_at if when <= at), default=0)
        self.kills.append(Kill(name, at, step, is_host))
        return StoryLine(at, f"{_capital(name)} is killed (-9), after step {step}.", "bold red")

    def _told(self, record: Record, name: str) -> Iterator[tuple[str, str]]:
        match record["event"]:
            case "worker_came":
                yield self._came(record, name)
            case "worker_went":
                self.present = [each for each in self.present if each != name]
                if not record["polite"]:
                    for kill in self.kills:
                        kill.is_noticed |= kill.name == name and not kill.is_host
                    yield from _as_elsewhere(record, name)
            case "run_started":
                yield self._started(record), ""
            case "step_done":
                yield from self._stepped(record)
            case "epoch_done" | "went_back" | "stalled" | "run_ended":
                yield from _as_elsewhere(record, name)

    def _came(self, record: Record, name: str) -> tuple[str, str]:
        now = plural(record["workers"], "worker")
        is_back = name in self.present or name in self.joined_late
        self.present = [*(each for each in self.present if each != name), name]
        if self._host_kill() is not None and is_back:
            return f"{name} is back by itself; {now} now.", ""
        if not self.run.step:
            return f"{name} joins ({record['kind']}); {now} now.", ""
        self.joined_late[name] = self.run.step
        return f"{name} joins in the middle of the run, after step {self.run.step}; {now} now.", "green"

    def _started(self, record: Record) -> str:
        if (kill := self._host_kill()) is not None:
            kill.is_noticed = True
            return f"The host has read its journal, and resumes after step {record['from_step']}."
        parameters, batch = count(record["parameters"]), plural(record["batch_size"], "row")
        return f"Training {parameters} parameters: {plural(record['steps_total'], 'step')} of {batch}."

    def _stepped(self, record: Record) -> Iterator[tuple[str, str]]:
        """Tell of the first step after a kill: that it was done, and by whom. Other steps have no sentence."""
        self._done_at.append((record["time"], record["step"]))
        for kill in self.kills:
            if kill.is_noticed and kill.next_step is None:
                kill.next_step = record["step"]
                yield self._continued(kill, record), "green"

    def _continued(self, kill: Kill, record: Record) -> str:
        step, seconds = record["step"], record["time"] - kill.at
        who = together([self.shown(worker["name"]) for worker in record["workers"]])
        done = f"Step {step} is done {seconds:.1f} s after the kill, by {who}"
        if step <= kill.step:
            return f"{done}: {plural(kill.step - step + 1, 'step')} had to be done again."
        if kill.is_host and step > kill.step + 1:
            return f"{done}; those since step {kill.step} were in the journal. No step was done twice."
        return f"{done}. No step was lost, and none was done twice."

    def _host_kill(self) -> Kill | None:
        """Return the last kill of the host."""
        return next((kill for kill in reversed(self.kills) if kill.is_host), None)


def _as_elsewhere(record: Record, name: str) -> Iterator[tuple[str, str]]:
    """Tell it as the terminal and the page of a run do."""
    if (told := sentence_of(record | {"name": name})) is not None:
        yield told.text, STYLES[told.tone]


def _capital(name: str) -> str:
    """Write a name at the beginning of a sentence: words with a capital, and names as they are."""
    return name[0].upper() + name[1:] if " " in name else name


def together(names: list[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "nobody"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares a run that was disturbed with the same run undisturbed."""

    story: FleetStory
    undisturbed: Progression
    hashes: tuple[str, str]
    """Hashes of the weights: disturbed, undisturbed."""

    def faults(self) -> list[str]:
        """Why the promise was not kept, or not shown; empty if it was."""
        run, other = self.story.run, self.undisturbed
        faults = []
        if self.hashes[0] != self.hashes[1]:
            faults.append("The weights of the disturbed run are not those of the undisturbed one.")
        for name, each in (("disturbed", run), ("undisturbed", other)):
            if not each.is_finished:
                faults.append(f"The {name} run did not finish.")
            faults += [
                f"Of epoch {epoch + 1} of the {name} run there is no proof that each sample was used exactly once."
                for epoch in sorted({*run.proofs, *other.proofs})
                if not _is_proof(each.proofs.get(epoch))
            ]
        faults += [
            f"{_capital(kill.name)} was killed, and the events do not show how the run continued."
            for kill in self.story.kills
            if not kill.is_noticed or kill.next_step is None
        ]
        return faults

    def rows(self) -> list[tuple[str, str, str]]:
        """List the rows of the comparison: a name, the disturbed run's value, the undisturbed one's."""
        run, other = self.story.run, self.undisturbed
        done = [(kill.step, f"{kill.name} killed (-9)") for kill in self.story.kills]
        done += [(step, f"{name} joined") for name, step in self.story.joined_late.items()]
        said = "\n".join(f"step {step}: {what}" for step, what in sorted(done))
        rows = [("what was done to it", said or "nothing", "nothing")]
        rows.append(("steps", f"{run.step:,}", f"{other.step:,}"))
        rows.append(("steps done again", f"{run.repeated:,}", f"{other.repeated:,}"))
        rows += [
            (f"epoch {epoch + 1}: used exactly once", _proof(run.proofs.get(epoch)), _proof(other.proofs.get(epoch)))
            for epoch in sorted({*run.proofs, *other.proofs})
        ]
        rows.append(("loss of the last step", _exact(run.loss), _exact(other.loss)))
        rows.append(("validation loss", _exact(run.validation), _exact(other.validation)))
        rows.append(("SHA-256 of the weights", f"{self.hashes[0][:16]} ...", f"{self.hashes[1][:16]} ..."))
        return rows


def _is_proof(record: Record | None) -> bool:
    return record is not None and bool(record["used"] == record["total"] > 0 and record["same_weights"])


def _proof(record: Record | None) -> str:
    if record is None:
        return "no record"
    return f"{record['used']:,} of {record['total']:,} rows" if _is_proof(record) else record["sentence"]


def _exact(value: float | None) -> str:
    """Every digit: two that differ anywhere look different."""
    return "none" if value is None else repr(value)
