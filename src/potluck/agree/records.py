"""Records of a run: where it stands, and what a worker reports. One type each, wherever they travel. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

Range = tuple[int, int]
"""The first place of an epoch's order, and the one after the last."""
LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTerms:
    """Terms that all workers of a run have alike, as far as rows and steps are counted by them."""

    rows: int = 0
    """Places of an epoch; 0: there is no loader."""
    batch: int = 1
    """Rows of a step of the run."""
    turns: int = 1
    """Optimizers that take turns: each of them steps once on a batch."""
    is_sync: bool = True
    """Whether each agreement is one step of the run; else each has as many as batches end in its rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run stands, no matter which workers have trained it so far."""

    version: int = 0
    """Agreements so far, which wire and journal call steps."""
    step: int = 0
    """Steps of the run, as people count: batches, each as often as it has turns. The last may be done in part."""
    epoch: int = 0
    row: int = 0
    """Rows of this epoch's shuffled order that are done."""
    rows_seen: int = 0
    """Rows of all epochs that are done."""
    turn: int = 0
    """How many of its turns the batch has had whose rows are not counted yet."""
    left: tuple[Range, ...] = ()
    """If what was left to do when this pass began was not one range, its ranges: they then follow what is done."""
    skipped: int = 0
    """Steps that were skipped."""
    skipped_rows: int = 0
    """Rows of this epoch in them."""
    ranges: tuple[Range, ...] = ()
    """At a host: the committed ranges of this epoch, by which it is proved. Checkpoints do not keep them."""

    def after(self, rows: int, terms: RunTerms, *, end: int | None = None) -> Self:
        """One agreement later. `rows` of the run are done with it; 0: a turn of the batch that is not its last.

        `end`: the row of the epoch that it ends at, where a loop left some rows out, or has no loader.
        """
        if not rows and self.turn < terms.turns - 1:
            return replace(self, version=self.version + 1, step=self.step + 1, turn=self.turn + 1)
        row = self.row + rows if end is None else end
        batches = 1 if terms.is_sync else -(-row // terms.batch) - -(-self.row // terms.batch)
        return replace(
            self,
            version=self.version + 1,
            step=self.step + (1 if terms.is_sync else terms.turns * batches - self.turn),
            row=row,
            rows_seen=self.rows_seen + rows,
            turn=0,
        )

    def skip(self, steps: int, rows: int = 0) -> Self:
        return replace(self, skipped=self.skipped + steps, skipped_rows=self.skipped_rows + rows)

    def next_epoch(self) -> Self:
        return replace(self, epoch=self.epoch + 1, row=0, left=(), skipped_rows=0, ranges=())

    def to_dict(self) -> dict[str, Any]:
        """The form of checkpoints."""
        found = {name: getattr(self, name) for name in _NUMBERS if name != "turn" or self.turn}
        return found | {"left": [list(part) for part in self.left]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Read a checkpoint's keys, those of earlier versions too. ValueError where they say no position."""
        numbers: dict[str, Any] = {"version": saved.get("step"), "turn": 0, "skipped": 0, "skipped_rows": 0} | {
            name: saved[name] for name in _NUMBERS if name in saved
        }
        if set(numbers) != set(_NUMBERS):
            raise ValueError(f"{' and '.join(sorted(set(_NUMBERS) - set(numbers)))} is missing")
        if not all(type(number) is int and 0 <= number <= LARGEST for number in numbers.values()):
            raise ValueError("some of its numbers are no whole numbers of at least 0")
        return cls(**numbers, left=tuple((start, end) for start, end in saved.get("left", ())))

    def to_wire(self, others: int = 0) -> str:
        """The form of Admitted.position. `others`: how many came before the worker that is told, if it does not
        speak for all."""
        where = {"step": self.version, "epoch": self.epoch, "row": self.row, "rows_seen": self.rows_seen}
        return json.dumps(where | ({"others": others} if others else {}))

    @staticmethod
    def others_in(text: str) -> int:
        """Return how many others to_wire() was told of."""
        return max(0, int(json.loads(text).get("others", 0)))

    @classmethod
    def from_wire(cls, text: str) -> Self:
        found = {name: int(number) for name, number in json.loads(text).items()}
        return cls(version=found["step"], epoch=found["epoch"], row=found["row"], rows_seen=found["rows_seen"])


_NUMBERS = ("version", "step", "epoch", "row", "rows_seen", "turn", "skipped", "skipped_rows")


class Report(NamedTuple):
    """One worker's report: of a step, of a window, of a batch of its own replica, or of a slice.

    In a group all of it is a row of floats, the figures last; a host hears it as a SliceReport.
    """

    samples: float = 0.0
    loss_sum: float = 0.0
    rows: float = 0.0
    batches: float = 0.0
    """Steps that the worker took by itself."""
    skipped: float = 0.0
    """Steps whose gradient was not finite."""
    skipped_rows: float = 0.0
    busy_s: float = 0.0
    """Seconds spent computing."""
    sync_s: float = 0.0
    """Seconds that the agreement before took."""
    send_s: float = 0.0
    """Seconds spent sending to other stages."""
    has_unused: float = 0.0
    """Whether some parameter got no gradient on this worker."""
    wants_stop: float = 0.0
    is_over: float = 0.0
    """Whether the window ends here. The first rank decides: one that continued alone would wait forever."""
    loss_scale: float = 1.0
    worker: float = 0.0
    """At a host: the id of the worker that told it."""
    figures: Mapping[str, float] = {}
    """Figures that the policy's planner asks for beside, by name: see engine/figures.py."""

    def to_row(self, names: Sequence[str] = ()) -> list[float]:
        """`names`: of the figures, which all workers have in the same order."""
        return [*map(float, self[:-1]), *(float(self.figures[name]) for name in names)]

    @classmethod
    def from_row(cls, row: Sequence[float], names: Sequence[str] = ()) -> Self:
        fixed = len(cls._fields) - 1
        return cls(*row[:fixed])._replace(figures=dict(zip(names, row[fixed:], strict=True)))  # type: ignore[arg-type]
