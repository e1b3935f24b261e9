"""JournalSnapshot: the steps of a run that its journal no longer holds one by one, added up. Pure.

A host reads and checks all of its journal before it answers anybody, so the journal must not grow with the run.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from potluck.agree.records import Position
from potluck.fleet.ledger import Ledger, Range


@dataclass(kw_only=True)
class JournalSnapshot:
    """Where the run stood after `step`, and what was trained until then."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    rows_seen: int = 0
    turn: int = 0
    steps: list[Range] = field(default_factory=list)
    """The numbers of the steps that were added up, as half-open intervals."""
    whole: list[Range] = field(default_factory=list)
    """Epochs of which each row was trained exactly once, as half-open intervals."""
    ranges: dict[int, list[Range]] = field(default_factory=dict)
    """Rows of every other epoch, neighbours as one. A row that was trained twice is in two of them."""

    @property
    def position(self) -> Position:
        return Position(version=self.step, epoch=self.epoch, row=self.row, rows_seen=self.rows_seen, turn=self.turn)

    def stand_at(self, position: Position) -> None:
        self.step, self.epoch, self.row = position.version, position.epoch, position.row
        self.rows_seen, self.turn = position.rows_seen, position.turn

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | None) -> "JournalSnapshot":
        if text is None:
            return cls()
        fields = json.loads(text)
        for name in ("steps", "whole"):
            fields[name] = _pairs(fields[name])
        fields["ranges"] = {int(epoch): _pairs(ranges) for epoch, ranges in fields["ranges"].items()}
        return cls(**fields)

    def add(self, epoch: int, ranges: Iterable[Range], rows: int) -> None:
        """Adds what later steps have trained of an epoch, which has so many rows."""
        merged = Ledger(sorted([*self.ranges.pop(epoch, []), *ranges])).ranges
        if merged == [(0, rows)] and not self._is_whole(epoch):
            self.whole = Ledger(sorted([*self.whole, (epoch, epoch + 1)])).ranges
        elif merged:
            self.ranges[epoch] = merged

    def trained(self, epoch: int, rows: int) -> list[Range]:
        """The ranges of an epoch that were trained until this snapshot."""
        return [*([(0, rows)] if self._is_whole(epoch) else []), *self.ranges.get(epoch, [])]

    def _is_whole(self, epoch: int) -> bool:
        return any(start <= epoch < end for start, end in self.whole)

    def back_to(self, kept: Position) -> "JournalSnapshot":
        """The snapshot of a checkpoint that is older than this one."""
        snapshot = JournalSnapshot(
            steps=_until(self.steps, kept.version + 1),
            whole=_until(self.whole, kept.epoch),
            ranges={epoch: ranges for epoch, ranges in self.ranges.items() if epoch < kept.epoch}
            | ({kept.epoch: list(kept.ranges)} if kept.ranges else {}),
        )
        snapshot.stand_at(kept)
        return snapshot


def _pairs(found: list[list[int]]) -> list[Range]:
    return [(int(start), int(end)) for start, end in found]


def _until(intervals: list[Range], limit: int) -> list[Range]:
    return [(start, min(end, limit)) for start, end in intervals if start < limit]
