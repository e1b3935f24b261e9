"""The host's disk in a virtual fleet: it may be full, late, and lose what it had."""

import json
from collections.abc import Callable, Sequence

from potluck.agree.records import Position, Range
from tests.fleet.virtual.toy import ROWS, State


def stood(version: int, epoch: int, row: int, rows_seen: int, ranges: Sequence[Range] = (), turn: int = 0) -> Position:
    """Where a run stands in which each agreement is a step."""
    seen = {"rows_seen": rows_seen, "turn": turn}
    return Position(version=version, step=version, epoch=epoch, row=row, ranges=tuple(ranges), **seen)


class Disk:
    """The host's checkpoints."""

    def __init__(self, *, piece: int = 16) -> None:
        """`piece`: how many bytes of a checkpoint are sent at a time."""
        self.states: dict[int, bytes] = {}
        self._headers: dict[int, str] = {}
        self._piece = piece
        self.is_checkpoint: Callable[[bytes], bool] = lambda data: True
        """As the receiver finds by its checksums and its manifest."""
        self.is_full = False
        self.late_s = 0.01
        self.refused: list[int] = []
        """Steps that it had no room for."""
        self._arriving: tuple[int, str, Callable[..., None]] | None = None
        self._data = b""

    @property
    def newest(self) -> int | None:
        return max(self.states, default=None)

    @property
    def standing(self) -> Position | None:
        """Where the run stood at the newest, as its manifest says."""
        if self.newest is None:
            return None
        state = State.from_bytes(self.states[self.newest])
        epoch, row = (state.epoch + 1, 0) if state.row >= ROWS else (state.epoch, state.row)
        rows, seen = ((0, row),) if row else (), epoch * ROWS + row
        return stood(state.step, epoch, row, seen, rows)

    def begin(self, step: int, header: str, on_saved: Callable[..., None]) -> None:
        self._arriving, self._data = (step, header, on_saved), b""

    def feed(self, data: bytes) -> None:
        if self._arriving is None:  # of the next one, which was refused meanwhile
            return
        step, header, on_saved = self._arriving
        size = sum(size for _, size in json.loads(header))
        self._data += data
        if len(self._data) >= size:
            assert len(self._data) == size
            self._arriving = None
            if not self.is_whole(step, header, self._data):
                on_saved(step, "", "it is no checkpoint", 0, theirs=True)
                return
            if self.is_full:
                self.refused.append(step)
                on_saved(step, "", f"The host cannot keep the checkpoint of step {step}: No space left on device", 0)
                return
            self.states[step], self._headers[step] = self._data, header
            on_saved(step, f"step-{step:08d}", "", size)

    def is_whole(self, step: int, header: str, data: bytes) -> bool:
        return self.is_checkpoint(data)

    def stream(self, step: int) -> tuple[str, list[bytes]]:
        """A checkpoint as it is sent: its header, and its pieces."""
        data = self.states[step]
        return self._headers[step], [data[at : at + self._piece] for at in range(0, len(data), self._piece)]

    def abort(self) -> None:
        self._arriving = None
