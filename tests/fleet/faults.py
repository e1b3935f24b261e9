"""Ways to end a worker, or a coordinator, at a certain point. Each leaves a file to prove that it happened."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from potluck.fleet import phases
from potluck.wire.messages import BlockGradientPayload, CodedPart, Committed, NonBlockGradientPayload, StateChunk
from tests.fleet.fleet import Fault, die, stop

AT_STEP = 4


def at(phase: str, call: Callable[..., None]) -> None:
    """Whenever a worker reaches this phase."""

    def listen(reached: str, step: int, **what: Any) -> None:
        if reached == phase:
            call(step, **what)

    phases.listeners.append(listen)


def _end_at(phase: str, place: Path, end: Any, what: str, step: int | None = AT_STEP, count: int = 1) -> None:
    """The count-th time that it is reached in that step, or in any."""
    times = itertools.count(1)

    def reached(at: int, **found: Any) -> None:
        if step in (None, at) and next(times) == count:
            end(place, what)

    at(phase, reached)


def at_connecting(place: Path, end: Any = die) -> None:
    """Connected, and nothing said yet."""
    _end_at("connected", place, end, "connected", step=None)


def at_joining(place: Path, end: Any = die) -> None:
    """Welcomed, but not ready."""
    _end_at("joined", place, end, "joined", step=None)


def in_forward(place: Path, end: Any = die) -> None:
    _end_at("forward", place, end, "forward")


def in_backward(place: Path, end: Any = die) -> None:
    """The report is sent, and some parts of the gradient, but not all."""
    _end_at("part", place, end, "backward", count=2)


def half_a_payload_sent(place: Path, end: Any = die) -> None:
    def half(step: int, message: Any, pipe: Any, parts: list[Any]) -> None:
        is_payload = isinstance(message, BlockGradientPayload | NonBlockGradientPayload | CodedPart)
        if is_payload and step == AT_STEP and not _fired(place, "half"):
            joined = b"".join(bytes(part) for part in parts)
            pipe.send([joined[: len(joined) // 2]])
            end(place, "half")
            parts[:] = [joined[len(joined) // 2 :]]  # once it may continue

    at("sending", half)


def all_sent(place: Path, end: Any = die) -> None:
    """Every part is sent: the average could be on its way."""

    def ended(step: int, worker: Any) -> None:
        if step == AT_STEP:
            worker.client.flush()
            end(place, "sent")

    at("sent", ended)


def half_an_average_received(place: Path, end: Any = die) -> None:
    _end_at("average", place, end, "average", count=2)


def a_payload_shown(place: Path, end: Any = die) -> None:
    """The host has been told where a payload lies, and may be reading it."""
    _end_at("shown", place, end, "shown")


def an_average_seen(place: Path, end: Any = die) -> None:
    """The host waits for the receipt of an average, and must not wait for ever."""
    _end_at("average seen", place, end, "seen", count=2)


def while_applying(place: Path, end: Any = die) -> None:
    from potluck.engine.replica import Replica

    apply, steps = Replica.apply, []

    def fatal(self: Any, scale: float) -> None:
        steps.append(1)
        if len(steps) == AT_STEP:
            parameter = self.trained[0]
            parameter.data.add_(1.0)  # half an update
            end(place, "applying")
        apply(self, scale)

    Replica.apply = fatal  # type: ignore[method-assign]


def while_saving(place: Path, end: Any = die) -> None:
    """In the middle of sending its state to the host's disk."""
    _end_at("chunk", place, end, "saving", step=None, count=2)


PHASES: dict[str, Fault] = {
    "half": half_a_payload_sent,
    "average": half_an_average_received,
    "applying": while_applying,
    "saving": while_saving,
    "connected": at_connecting,
    "joined": at_joining,
    "forward": in_forward,
    "backward": in_backward,
    "sent": all_sent,
}

SHARED_PHASES: dict[str, Fault] = {
    "backward": in_backward,
    "shown": a_payload_shown,
    "sent": all_sent,
    "seen": an_average_seen,
}
"""Of a worker on the host's machine, with which it shares memory."""

STOPS: dict[str, Fault] = {name: partial(fault, end=stop) for name, fault in PHASES.items()}


# The coordinator's


def before_recording(place: Path) -> None:
    _die_at("recording", place, "before")


def after_recording(place: Path, step: int = AT_STEP) -> None:
    _die_at("recorded", place, "after", step)


def after_telling_one(place: Path) -> None:
    """One worker knows that the step is committed, and the other does not."""

    def told(step: int, message: Any, connection: Any) -> None:
        if isinstance(message, Committed) and step == AT_STEP and not _fired(place, "told"):
            while connection.queue:
                time.sleep(0.001)
            time.sleep(0.2)
            die(place, "told")

    at("queued", told)


def while_averages_leave(place: Path) -> None:
    def leaves(step: int, part: int) -> None:
        if part == 2 and step == AT_STEP and not _fired(place, "averages"):
            die(place, "averages")

    at("average leaves", leaves)


def while_a_newcomer_catches_up(place: Path) -> None:
    def queued(step: int, message: Any, connection: Any) -> None:
        if isinstance(message, StateChunk) and not _fired(place, "catching"):
            die(place, "catching")

    at("queued", queued)


def _die_at(phase: str, place: Path, what: str, at_step: int = AT_STEP) -> None:
    """Once: the next coordinator records that step again."""

    def reached(step: int) -> None:
        if step == at_step and not _fired(place, what):
            die(place, what)

    at(phase, reached)


def _fired(place: Path, what: str) -> bool:
    return (place / f"fired-{what}").exists()


COORDINATOR: dict[str, Fault] = {
    "before": before_recording,
    "after": after_recording,
    "told": after_telling_one,
    "averages": while_averages_leave,
}


# Faults that nobody dies of


def sends_nan(place: Path) -> None:
    """One part of one step's gradient is not finite."""
    _spoil(place, float("nan"))


def sends_huge(place: Path) -> None:
    _spoil(place, 1e15)


def _spoil(place: Path, value: float) -> None:
    def spoiled(step: int, worker: Any, part: int, gradients: Any) -> None:
        if step == AT_STEP and part == 1:
            (place / "fired-spoiled").write_text("x")
            gradients[3] = value

    at("part", spoiled)


def drifts(place: Path) -> None:
    """A bit of its weights flips after a step."""

    def drifted(step: int, worker: Any) -> None:
        if step == AT_STEP and not _fired(place, "drifted"):
            (place / "fired-drifted").write_text("x")
            worker.run.replica.trained[0].data.view(-1)[5] += 1e-6

    at("applied", drifted)


def _flip_at(phase: str, place: Path, step: int | None = AT_STEP) -> None:
    """A bit of its weights, in memory, and once."""
    import torch

    def flipped(at: int, worker: Any) -> None:
        if step in (None, at) and not _fired(place, "flipped"):
            (place / "fired-flipped").write_text("x")
            worker.run.replica.trained[0].data.view(-1).view(torch.int32)[5] ^= 1 << 20

    at(phase, flipped)


def flips_after_applied(place: Path) -> None:
    _flip_at("told", place)


def flips_while_computing(place: Path) -> None:
    _flip_at("computing", place)


def flips_while_waiting(place: Path) -> None:
    """Its gradient has left."""
    _flip_at("sent", place)


def flips_before_joining_again(place: Path) -> None:
    """The host is gone, and this worker's weights are no longer what it told that one."""
    _flip_at("lost", place, step=None)


FLIPS: dict[str, Fault] = {
    "applied": flips_after_applied,
    "computing": flips_while_computing,
    "waiting": flips_while_waiting,
}
