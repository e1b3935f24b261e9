"""Events in, one view out: all that the page shows of a run, of bounded size whatever the run's length. Pure.

The same lines in the same order give the same view, so that a page which is opened late, or again, shows what one that
was open all the time does. Events may come from a host that nobody here trusts, so whatever is kept of one is cut to a
size. Knows nothing of files, of clocks, nor of who looks.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from potluck.page.peaks import peak_of
from potluck.page.series import MOST_CELLS, MOST_POINTS, Cell, Point, Series, short
from potluck.show.pace import Pace
from potluck.show.sentences import Record, sentence_of, without_figures

MOST_STORY = {"workers": 150, "saves": 60, "decisions": 60, "run": 120}
"""Sentences that are kept of each group: a worker that was killed is not pushed out by a thousand decisions."""
_GROUP_OF = {
    "decided": "decisions",
    **dict.fromkeys(("worker_came", "worker_went", "recovered", "went_back"), "workers"),
    **dict.fromkeys(("checkpoint_saved", "checkpoint_failed", "checkpoint_passed_over"), "saves"),
}
"""The group of each kind of sentence; all others are of the run."""
MOST_LOOKS = 512
MOST_EPOCHS = 50
MOST_SAMPLES = 5
MOST_LANES = 48
"""Workers whose time is drawn."""
MOST_GONE = 50
"""Workers that have left, and are still listed."""
MOST_WORKERS = 4096
"""Workers that are listed at all: as many as a host takes at once."""
MOST_LETTERS, MOST_OF_SAMPLE, MOST_OF_NAME = 2000, 20_000, 200
MOST_ITEMS = 200
"""The most items of a list, or of a table, in what is kept of an event; and the most figures that have names."""
SMOOTH = 0.3
_COUNTS = ("steps_total", "from_step", "workers", "parameters", "flops_per_sample")
_WORDS = ("unit", "wire", "policy", "device", "device_name")
"""Fields of a run's beginning that figures are made of: a line in which one is not of its type is ignored."""


def cut(value: Any, letters: int = MOST_LETTERS, depth: int = 4) -> Any:
    """The value without what is beyond these sizes."""
    if isinstance(value, str):
        return value[:letters]
    if isinstance(value, list | dict) and not depth:
        return None
    if isinstance(value, list):
        return [cut(each, letters, depth - 1) for each in value[:MOST_ITEMS]]
    if isinstance(value, dict):
        items = islice(value.items(), MOST_ITEMS)
        return {name[:MOST_OF_NAME]: cut(each, letters, depth - 1) for name, each in items}
    return value


@dataclass(slots=True)
class WorkerRow:
    """One worker, from what events say of it."""

    id: int
    name: str
    device: str = ""
    rows: int = 0
    """Rows of the last step or window."""
    speed: float | None = None
    """Samples a second while it computes, smoothed."""
    busy: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    """Seconds in the last steps, smoothed."""
    rows_seen: int = 0
    is_in: bool = True
    at: float = 0.0
    """When an event last told of it."""

    def take(self, part: Record, time: float) -> None:
        busy, wait, send = part["busy_s"], part["wait_s"], part.get("send_s", 0.0)
        is_first = not self.rows_seen and not self.busy
        keep = 0.0 if is_first else 1 - SMOOTH
        self.busy = keep * self.busy + (1 - keep) * busy
        self.wait = keep * self.wait + (1 - keep) * wait
        self.send = keep * self.send + (1 - keep) * send
        self.rows, self.rows_seen, self.at, self.is_in = part["rows"], self.rows_seen + part["rows"], time, True
        if busy > 0 and part["samples"] > 0:
            speed = part["samples"] / busy
            self.speed = speed if self.speed is None else (1 - SMOOTH) * self.speed + SMOOTH * speed


@dataclass(slots=True)
class Fold:
    run: Record = field(default_factory=dict)
    series: Series[Point] = field(default_factory=lambda: Series(MOST_POINTS))
    timeline: Series[Cell] = field(default_factory=lambda: Series(MOST_CELLS))
    """Who computed and who waited, over the whole run."""
    workers: dict[int, WorkerRow] = field(default_factory=dict)
    stories_of: dict[str, deque[list[Any]]] = field(
        default_factory=lambda: {group: deque(maxlen=most) for group, most in MOST_STORY.items()}
    )
    """Sentences of each group: [number, time, step, group, tone, text]"""
    stories: int = 0
    """How many there were."""
    looks: list[list[Any]] = field(default_factory=list)
    """Validations: [rows, seconds, loss, step, {name: figure}]"""
    epochs: deque[Record] = field(default_factory=lambda: deque(maxlen=MOST_EPOCHS))
    epochs_done: int = 0
    epochs_right: int = 0
    """Also of those that are not kept: how many there were, and of how many exactly once was proved."""
    samples: deque[Record] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    ended: Record | None = None
    last: Record = field(default_factory=dict)
    """The last step."""
    skipped: int = 0
    pace: Pace = field(default_factory=Pace)
    first_at: float | None = None
    trained_s: float = 0.0
    _begun_at: float | None = None
    """When the run began, or was continued, and ..."""
    _begun_s: float = 0.0
    """... how long it had been trained then."""
    _told: str = ""
    lanes: list[int] = field(default_factory=list)
    working: frozenset[int] = frozenset()
    """Workers that had part in the last step."""

    def take(self, record: Record) -> None:
        """Take one event. A record that is not as it should be is passed over: a page never fails for a line."""
        try:
            self._take(record)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            return

    def _take(self, record: Record) -> None:
        kind, time = record["event"], float(record.get("time", 0.0))
        self.first_at = time if self.first_at is None else self.first_at
        if kind in _HEARD:
            _HEARD[kind](self, record, time)
        self._tell(record, kind, time)

    def _tell(self, record: Record, kind: str, time: float) -> None:
        sentence = sentence_of(record)
        if sentence is None:
            return
        text = sentence.text[:MOST_LETTERS]
        if kind == "decided":
            if (without := without_figures(text)) == self._told:
                return
            self._told = without
        step: Any = record.get("step", self.last.get("step", 0))
        self.stories += 1
        group, at_step = _GROUP_OF.get(sentence.kind, "run"), step if isinstance(step, int | float) else 0
        self.stories_of[group].append([self.stories, time, at_step, group, sentence.tone, text])

    def story(self, after: int = 0) -> list[list[Any]]:
        """List the sentences of all groups that came after the one of this number, in their order."""
        return sorted(told for group in self.stories_of.values() for told in group if told[0] > after)

    # What happened

    def _on_started(self, record: Record, time: float) -> None:
        _ = [record.get(name, 0) + 0 for name in _COUNTS], [record.get(name, "") + "" for name in _WORDS]
        _ = record.get("settings", {}).items()
        if record.get("from_step") and self.last and record["from_step"] < self.last["step"]:
            self._drop_after(record["from_step"])
        if not record.get("from_step") and self.last:  # it begins anew
            self._drop_after(-1)
        self.run, self.ended = cut(record), None
        self._begun_at, self._begun_s = time, self.trained_s
        self.pace.clear()

    def _on_step(self, record: Record, time: float) -> None:
        """All of it is looked at before anything is changed: a line that is no step changes nothing."""
        if len(record["workers"]) > MOST_WORKERS:
            raise ValueError("more workers than a host takes")
        for part in record["workers"]:
            _ = part["rank"] + 0, part["rows"] + 0, part["samples"] + 0, part["busy_s"] + part["wait_s"]
        begun_at = time - record["seconds"] if self._begun_at is None else self._begun_at
        trained_s = self._begun_s + max(0.0, time - begun_at)
        loss, norm = float(record["loss"]), float(record["grad_norm"])
        is_finite = short(loss) is not None
        point = Point(
            record["step"] + 0,
            record["step"],
            record["rows_seen"] + 0,
            trained_s,
            float(record["lr"]),
            norm,
            record["seconds"] + 0,
            loss_sum=loss if is_finite else 0.0,
            losses=int(is_finite),
            least=loss if is_finite else float("inf"),
            most=loss if is_finite else float("-inf"),
            most_norm=norm if short(norm) is not None else float("-inf"),
        )
        self.pace.add(time, record["step"], record["samples"] + 0, record["seconds"])
        self._begun_at, self.trained_s = begun_at, trained_s
        self.last = cut({name: value for name, value in record.items() if name != "workers"})
        self.series.add(point)
        self._take_parts(record["workers"], time)

    def _take_parts(self, parts: list[Record], time: float) -> None:
        done: dict[int, list[float]] = {}
        self.working = frozenset(part["rank"] for part in parts)
        for part in parts:
            row = self.workers.get(part["rank"])
            if row is None:
                name = str(part.get("name") or f"worker {part['rank']}")[:MOST_OF_NAME]
                row = WorkerRow(part["rank"], name, self.run.get("device_name") or "")
                self._list(row)
            row.take(part, time)
            if part["rank"] not in self.lanes and len(self.lanes) < MOST_LANES:
                self.lanes.append(part["rank"])
                self.timeline.generation += 1
            if part["rank"] in self.lanes:
                done[part["rank"]] = [part["busy_s"], part["wait_s"], part.get("send_s", 0.0)]
        if len(parts) < sum(row.is_in for row in self.workers.values()):
            for row in self.workers.values():
                if row.is_in and row.id not in self.working and row.rows_seen:
                    row.is_in = False
            self._forget_gone()
        # A step began when its first worker did: before that, nobody had anything to do.
        before_s = self.timeline.points[-1].end_s if self.timeline.points else 0.0
        start_s = max(before_s, self.trained_s - max(map(sum, done.values()), default=0.0))
        self.timeline.add(Cell(start_s, self.trained_s, done))

    def _list(self, row: WorkerRow) -> None:
        """A host may tell of workers that came, and never that they went: the first of those make room."""
        self.workers[row.id] = row
        if len(self.workers) > MOST_WORKERS:
            del self.workers[next(iter(self.workers))]

    def _forget_gone(self) -> None:
        gone = sorted((row for row in self.workers.values() if not row.is_in), key=lambda row: row.at)
        for row in gone[: max(0, len(gone) - MOST_GONE)]:
            del self.workers[row.id]

    def _on_look(self, record: Record, time: float) -> None:
        if self.looks and self.looks[-1][3] >= record["step"]:
            self.looks = [look for look in self.looks if look[3] < record["step"]]
        rows = self.last.get("rows_seen", 0)
        loss = record.get("loss")
        named = islice(record.get("metrics", {}).items(), MOST_ITEMS)
        metrics = {name[:MOST_OF_NAME]: short(float(value)) for name, value in named}
        self.looks.append(
            [rows, short(self.trained_s), short(None if loss is None else float(loss)), record["step"] + 0, metrics]
        )
        if len(self.looks) > MOST_LOOKS:
            self.looks = self.looks[1::2] if len(self.looks) % 2 == 0 else self.looks[::2]

    def _on_came(self, record: Record, time: float) -> None:
        name, kind = record["name"][:MOST_OF_NAME] + "", record["kind"][:MOST_OF_NAME] + ""
        self._list(WorkerRow(record["worker"] + 0, name, kind, at=time))

    def _on_went(self, record: Record, time: float) -> None:
        if (row := self.workers.get(record["worker"])) is not None:
            row.is_in, row.at = False, time
            self._forget_gone()

    def _on_back(self, record: Record, time: float) -> None:
        """Go back to an earlier step; also where workers were lost and the others had kept one."""
        self._drop_after(record["step"])
        self.looks = [look for look in self.looks if look[3] <= record["step"]]
        self.pace.clear()

    def _drop_after(self, step: int) -> None:
        self.series.drop(lambda point: point.first > step)

    def _on_ordered(self, record: Record, time: float) -> None:
        """The time of a pause is no training, and says nothing of the run's speed."""
        if record["action"] == "resume" and record["done"]:
            self._begun_at, self._begun_s = time, self.trained_s
            self.pace.clear()

    def _on_ended(self, record: Record, time: float) -> None:
        _ = record["reason"] + "", record["step"] + record["seconds"] + record["time"]
        self.ended = cut(record)

    def _on_sample(self, record: Record, time: float) -> None:
        told = {name: record[name] for name in ("time", "step", "prompt", "text")}
        self.samples.append(cut(told, MOST_OF_SAMPLE))

    def _on_skipped(self, record: Record, time: float) -> None:
        self.skipped += 1

    def _on_epoch(self, record: Record, time: float) -> None:
        """One that is done again, after a restart, takes the place of what it was."""
        wanted = ("epoch", "used", "total", "same_weights", "sentence")
        epoch = cut({name: record[name] for name in wanted}) | {"time": time}
        while self.epochs and self.epochs[-1]["epoch"] >= epoch["epoch"]:
            self._count_epoch(self.epochs.pop(), -1)
        self.epochs.append(epoch)
        self._count_epoch(epoch, 1)

    def _count_epoch(self, told: Record, number: int) -> None:
        self.epochs_done += number
        self.epochs_right += number * (told["used"] == told["total"] and told["same_weights"])

    # Figures of it

    @property
    def rate(self) -> float | None:
        """Samples a second over the last steps."""
        return self.pace.rate

    def left_s(self) -> tuple[float, float, float] | None:
        """Seconds until the end, if it is known where that is: from the last steps; and the band, least and most."""
        return None if self.ended else self.pace.left_s(self.run.get("steps_total", 0))

    def takes_part(self, row: WorkerRow) -> bool:
        """Tell whether a worker takes part; in a run that has ended, whether it did to the end."""
        return row.id in self.working if self.ended else row.is_in

    def usage(self, devices: list[str]) -> float | None:
        """MFU: what is computed of what all these devices could, at best; None where one of them is not known."""
        each, peaks = self.run.get("flops_per_sample", 0.0), [peak_of(device) for device in devices]
        if not each or not devices or self.rate is None:
            return None
        known = [peak for peak in peaks if peak is not None]
        return self.rate * each / sum(known) if len(known) == len(peaks) else None


_HEARD: dict[str, Callable[[Fold, Record, float], None]] = {
    "run_started": Fold._on_started,
    "step_done": Fold._on_step,
    "validated": Fold._on_look,
    "worker_came": Fold._on_came,
    "worker_went": Fold._on_went,
    "went_back": Fold._on_back,
    "recovered": Fold._on_back,
    "ordered": Fold._on_ordered,
    "run_ended": Fold._on_ended,
    "sampled": Fold._on_sample,
    "step_skipped": Fold._on_skipped,
    "epoch_done": Fold._on_epoch,
}
