"""Listener: what a worker hears from its host, message by message, and the averages of each step, put together.

Averages come among the messages, in the order in which the host sent all of them. Of use to the training thread alone:
there is no lock. engine/node_listener.py lets all ranks of a node hear the same.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from potluck.coded_numbers import Floats
from potluck.fleet.client import Average, Client
from potluck.fleet.holder import ConnectionLost
from potluck.wire.messages import Admitted, Message, Welcome

_EMPTY: Floats = np.empty(0, np.float32)


@dataclass
class Means:
    """The averages of one step, as they arrive."""

    step: int
    parts: list[Floats]
    missing: set[int]
    """A part may come twice, if the step was begun anew: all of them do then, before the step is agreed on."""


class Listener:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.wants_stop = False
        self.on_stop: Callable[[], None] = lambda: None
        """Called when this worker was asked to stop."""
        self._means: dict[int, Means] = {}
        self._since = 0
        """Averages up to this step are in the weights."""
        self._kept: deque[Message] = deque()
        """Heard while only averages were wanted."""

    def ask_to_stop(self) -> None:
        self.wants_stop = True
        self.on_stop()

    def connect(self) -> Welcome:
        """Joins again: what was heard over the last connection is discarded."""
        self._kept.clear()
        self._means.clear()
        return self._connect()

    def _connect(self) -> Welcome:
        return self.client.connect(again=True)

    def receive(self, timeout_s: float | None = None) -> Message | ConnectionLost | None:
        """The next message, or that the connection is lost; none if neither came in time."""
        if self._kept:
            return self._kept.popleft()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while isinstance(heard := self._hear(deadline), Average):
            pass
        return heard

    def take_means(self, step: int, without: frozenset[int] = frozenset()) -> Means | None:
        """The averages of a step, once all of them are here; none if the connection was lost before that. `without`:
        parts of which there is none."""
        while (means := self._means.get(step)) is None or not means.missing <= without:
            heard = self._hear(None)
            if isinstance(heard, ConnectionLost):
                return None  # the next caller hears it again
            if isinstance(heard, Message):
                self._kept.append(heard)
        self._forget_until(step)
        return means

    def give_back(self, means: Means) -> None:
        """Gives the memory of a step's averages back, to be overwritten."""
        for part, floats in enumerate(means.parts):
            if part not in means.missing:
                self.client.release(Average(means.step, part, floats))

    def pass_over_until(self, step: int) -> None:
        """Averages up to this step are already in the weights."""
        self._since = step
        self._forget_until(step)

    def _forget_until(self, step: int) -> None:
        self._means = {number: means for number, means in self._means.items() if number > step}

    def _hear(self, deadline: float | None) -> Message | Average | ConnectionLost | None:
        """Take what comes next; an average is with those of its step by then."""
        heard = self._next(deadline)
        if isinstance(heard, Average) and heard.step > self._since:
            described = self.client.description
            assert described is not None
            count = len(described.parts)
            means = self._means.setdefault(heard.step, Means(heard.step, [_EMPTY] * count, set(range(count))))
            means.parts[heard.part] = heard.floats
            means.missing.discard(heard.part)
        elif isinstance(heard, Admitted) and heard.wait:
            self._means.clear()  # other weights will come, and other averages after them
            self._since = heard.step  # it may be an earlier step than ours, which the run has gone back to
        return heard

    def _next(self, deadline: float | None) -> Message | Average | ConnectionLost | None:
        return self.client.receive(None if deadline is None else max(0.0, deadline - time.monotonic()))
