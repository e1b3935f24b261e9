"""A peer of a virtual fleet that speaks the eleven published messages and no other."""

from typing import TYPE_CHECKING

import numpy as np

from potluck.fleet.tree import slice_rows
from potluck.wire.messages import AveragedGradient, JoinAccepted, JoinRequest, ShardAssignment, Shutdown
from tests.fleet.virtual.line import Average, Lost, Payload
from tests.fleet.virtual.process import Life, Process, Receive, Sleep
from tests.fleet.virtual.task import in_parts
from tests.fleet.virtual.toy import BATCH, PARTS, ROWS, SLICES, UNIT, Floats, State, gradient_of

if TYPE_CHECKING:
    from tests.fleet.virtual.fleet import Fleet


class PlainPeer(Process):
    """It takes rows and gives gradients, sends no heartbeats, counts rows by itself, and ends with its connection."""

    def __init__(self, fleet: "Fleet", name: str, *, latency_s: float = 0.001, batch_s: float = 0.1) -> None:
        super().__init__(fleet, name, latency_s)
        self.state = State()
        self._batch_s = batch_s
        self._parts: dict[int, Floats] = {}

    def live(self) -> Life:
        self.connect()
        self.send(JoinRequest(self.name, 1, "cpu"))
        while True:
            match (yield Receive()):
                case JoinAccepted():
                    pass
                case ShardAssignment() as asked:
                    yield Sleep(self._batch_s)
                    self._give(asked.step, asked.shard_start, asked.shard_end)
                case Average() as average:
                    self._parts[average.part] = average.values
                    if len(self._parts) == len(PARTS):
                        self._apply(np.concatenate([self._parts[part] for part in range(len(PARTS))]))
                case AveragedGradient() as average:  # in the order of the model, which is not that of the backward
                    ends = np.cumsum(PARTS[::-1])[:-1]
                    self._apply(np.concatenate(np.split(average.gradients, ends)[::-1]))
                case Shutdown() | Lost():
                    return
                case other:
                    raise AssertionError(f"a plain peer cannot read {other}")

    def _give(self, step: int, start: int, end: int) -> None:
        """The mean over its rows, part by part; of no rows, nothing."""
        state = self.state
        assert step == state.step + 1, f"{self.name} is at step {state.step}, and was given rows of {step}"
        rows = min(BATCH, ROWS - state.row)
        inside = [found for found in slice_rows(state.row, rows, min(SLICES, rows)) if start <= found[0] < end]
        if inside:
            total = sum(gradient_of(state.weights, state.epoch, *found) for found in inside)
            for part, values in enumerate(in_parts(np.float32(1 / ((end - start) * UNIT)) * total)):
                self.send(Payload(step, part, values))

    def _apply(self, mean: Floats) -> None:
        self._parts = {}
        self.state.apply(mean, min(BATCH, ROWS - self.state.row))
        if self.state.row >= ROWS:
            self.state.epoch, self.state.row = self.state.epoch + 1, 0
