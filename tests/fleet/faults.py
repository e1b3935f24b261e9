"""Ways to end a worker, or a coordinator, at a certain point. Each leaves a file to prove that it happened."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from potluck.fleet import phases
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
    from potluck.fleet.pipe import Pipe

    send = Pipe.send

    def fatal(self: Any, parts: Any) -> None:
        if _is_payload_of(parts, AT_STEP):
            joined = b"".join(bytes(part) for part in parts)
            half = len(joined) // 2
            send(self, [joined[:half]])
            if not _fired(place, "half"):
                end(place, "half")
            parts = [joined[half:]]  # once it may go on
        send(self, parts)

    Pipe.send = fatal  # type: ignore[method-assign]


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
    from potluck.fleet.shared import Receipts

    wait, told = Receipts.wait, []

    def fatal(self: Any, most: int) -> int:
        told.append(most)
        if len(told) == 2 * AT_STEP:
            end(place, "shown")
        return wait(self, most)

    Receipts.wait = fatal  # type: ignore[method-assign]


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
    from potluck.engine import led

    def fatal(folder: Path, header: str) -> Any:
        yield b"x"
        end(place, "saving")

    led.chunks = fatal


def _is_payload_of(parts: Any, step: int) -> bool:
    import struct

    head = bytes(parts[1]) if len(parts) > 2 else b""
    return len(head) == 4 and struct.unpack("<I", head)[0] == 7 and struct.unpack("<Q", bytes(parts[2]))[0] == step


PHASES: dict[str, Fault] = {
    "connected": at_connecting,
    "joined": at_joining,
    "forward": in_forward,
    "backward": in_backward,
    "half": half_a_payload_sent,
    "sent": all_sent,
    "average": half_an_average_received,
    "applying": while_applying,
    "saving": while_saving,
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
    _around_journal(place, "before", before=True)


def after_recording(place: Path) -> None:
    _around_journal(place, "after", before=False)


def after_telling_one(place: Path) -> None:
    """One worker knows that the step is committed, and the other does not."""
    import time

    from potluck.fleet.server import Server
    from potluck.wire.messages import Committed

    send = Server._send

    def fatal(self: Any, effect: Any) -> None:
        send(self, effect)
        if isinstance(effect.message, Committed) and effect.message.step == AT_STEP and not _fired(place, "told"):
            seat = self.connections[effect.peer]
            while seat.queue:
                time.sleep(0.001)
            time.sleep(0.2)
            die(place, "told")

    Server._send = fatal  # type: ignore[method-assign]


def while_averages_leave(place: Path) -> None:
    from potluck.fleet.writing import Writer

    write = Writer.write

    def fatal(self: Any, out: Any) -> None:
        if out.part == 2 and out.step == AT_STEP and not _fired(place, "averages"):
            die(place, "averages")
        write(self, out)

    Writer.write = fatal  # type: ignore[method-assign]


def while_a_newcomer_catches_up(place: Path) -> None:
    from potluck.fleet.server import Server
    from potluck.wire.messages import StateChunk

    send = Server._send

    def fatal(self: Any, effect: Any) -> None:
        if isinstance(effect.message, StateChunk) and not _fired(place, "catching"):
            die(place, "catching")
        send(self, effect)

    Server._send = fatal  # type: ignore[method-assign]


def _around_journal(place: Path, what: str, *, before: bool) -> None:
    from potluck.fleet.journal import Journal

    record = Journal.record

    def fatal(self: Any, found: Any) -> None:
        fires = found.step == AT_STEP and not _fired(place, what)
        if fires and before:
            die(place, what)
        record(self, found)
        if fires:
            die(place, what)

    Journal.record = fatal  # type: ignore[method-assign]


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
