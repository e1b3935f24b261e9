"""Ways to end a worker, or a coordinator, at a certain point. Each leaves a file to prove that it happened."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from potluck.fleet import phases
from potluck.wire.messages import (
    AverageAt,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    CodedAverage,
    CodedPart,
    Committed,
    NonBlockGradientPayload,
    StateChunk,
)
from tests.fleet.fleet import STEPS, Fault, die, stop

AT_STEP = 4
assert 1 < AT_STEP < STEPS


def at(phase: str, call: Callable[..., None]) -> None:
    """Whenever a worker reaches this phase."""

    def listen(reached: str, step: int, **what: Any) -> None:
        if reached == phase:
            call(step, **what)

    phases.listeners.append(listen)


def _end_at(
    phase: str, place: Path, end: Any, what: str, step: int | None = AT_STEP, count: int = 1, part: int | None = None
) -> None:
    """The count-th time that it is reached in that step, or in any; `part`: for that one."""
    times = itertools.count(1)

    def reached(at: int, **found: Any) -> None:
        if step in (None, at) and part in (None, found.get("part")) and next(times) == count:
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
        if is_payload and step >= AT_STEP and not _fired(place, "half"):  # it may be given nothing of one step
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
    from potluck.replica.replica import Replica

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


# Of workers that step by themselves, and of nodes


def in_a_window(place: Path, end: Any = die) -> None:
    """Some of its batches are done, in the second window."""
    _end_at("batch", place, end, "window", step=2, count=2)


def while_sending(place: Path, end: Any = die, step: int = 2) -> None:
    """The report and some of the parts of its gradient, or of what it changed, have left."""

    def fatal(now: int, worker: Any, part: int, gradients: Any) -> None:
        if now == step and part == 1:
            worker.client.flush()
            time.sleep(0.05)
            end(place, f"sending-{step}")

    at("part", fatal)


def in_any_forward(place: Path, end: Any = die) -> None:
    """The second one. Later a worker may have nothing to compute: ranks that talk in each layer are slow at so small a
    model."""
    _end_at("forward", place, end, "forward", step=None, count=2)


def at_any_part(place: Path, end: Any = die) -> None:
    """In the second step of which it has a part, for the same reason."""
    _end_at("part", place, end, "part", step=None, count=2, part=1)


def between_two_parts(place: Path) -> None:
    """The report and one part are sent."""
    _die_in_a_node("collect", place, "parts")


def while_means_are_handed_out(place: Path) -> None:
    _die_in_a_node("hand_out", place, "means")


def _die_in_a_node(method: str, place: Path, what: str) -> None:
    """At the second time that this is done with part 1."""
    from potluck.sums.node_sums import NodeParts

    call, times = getattr(NodeParts, method), itertools.count(1)

    def fatal(self: Any, index: int, *given: Any) -> Any:
        if index == 1 and next(times) == 2:
            die(place, what)
        return call(self, index, *given)

    setattr(NodeParts, method, fatal)


WINDOW_PHASES: dict[str, Fault] = {"window": in_a_window, "sending-2": while_sending}

RANK_PHASES: dict[str, tuple[int, Fault]] = {
    "means": (1, while_means_are_handed_out),
    "window": (1, in_a_window),
    "parts": (0, between_two_parts),
    "forward": (1, in_any_forward),
    "part": (0, at_any_part),
}
"""With the rank of the node that it happens to."""

STOPS: dict[str, Fault] = {name: partial(fault, end=stop) for name, fault in (PHASES | WINDOW_PHASES).items()}


# The coordinator's


def before_recording(place: Path) -> None:
    _die_at("recording", place, "before")


def after_recording(place: Path, step: int = AT_STEP) -> None:
    _die_at("recorded", place, "after", step)


def after_telling_one(place: Path) -> None:
    """One worker knows that the step is committed, and the other does not."""

    def told(step: int, message: Any, connection: Any) -> None:
        if isinstance(message, Committed) and step == AT_STEP and not _fired(place, "told"):
            while connection.out.queued:
                time.sleep(0.001)
            time.sleep(0.2)
            die(place, "told")

    at("queued", told)


def while_averages_leave(place: Path) -> None:
    averages = itertools.count()

    def leaves(step: int, message: Any, pipe: Any, parts: list[Any]) -> None:
        is_average = isinstance(message, AverageAt | AveragedBlockGradient | AveragedNonBlockGradient | CodedAverage)
        if is_average and step == AT_STEP and next(averages) == 2 and not _fired(place, "averages"):
            die(place, "averages")

    at("sending", leaves)


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
    "after-2": partial(after_recording, step=2),
    "after-3": partial(after_recording, step=3),
}
"""Windows are fewer than steps."""


# Faults that nobody dies of


def sends_nan(place: Path) -> None:
    """One part of one step's gradient is not finite."""
    _spoil(place, float("nan"))


def sends_huge(place: Path) -> None:
    _spoil(place, 1e15)


def _spoil(place: Path, value: float) -> None:
    def spoiled(step: int, worker: Any, part: int, gradients: Any) -> None:
        if step >= AT_STEP and part == 1 and not _fired(place, "spoiled"):  # it may be given nothing of one step
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
