"""Ways to end a worker, or a coordinator, at a certain point. Each leaves a file to prove that it happened."""

from functools import partial
from pathlib import Path
from typing import Any

from tests.fleet.fleet import Fault, die, stop

AT_STEP = 4


def _when(engine: Any) -> bool:
    return bool(engine.step_number + 1 == AT_STEP)


def at_connecting(place: Path, end: Any = die) -> None:
    """Connected, and nothing said yet."""
    from potluck.fleet import client

    def pipe(connection: Any) -> Any:
        end(place, "connected")

    client.Pipe = pipe  # type: ignore[misc,assignment]


def at_joining(place: Path, end: Any = die) -> None:
    """Welcomed, but not ready."""
    from potluck.engine.elastic import ElasticEngine

    ElasticEngine._present = lambda self: end(place, "joined")  # type: ignore[method-assign]


def in_forward(place: Path, end: Any = die) -> None:
    from potluck.engine.elastic import ElasticEngine

    backward = ElasticEngine.backward

    def fatal(self: Any, loss: Any, **options: Any) -> None:
        if _when(self) and self._loader().current.number == 0:
            end(place, "forward")
        backward(self, loss, **options)

    ElasticEngine.backward = fatal  # type: ignore[method-assign]


def in_backward(place: Path, end: Any = die) -> None:
    """The report is sent, and some parts of the gradient, but not all."""
    from potluck.engine.slices import SliceSums

    complete = SliceSums._complete

    def fatal(self: Any, buffer: Any) -> None:
        if self.is_last_slice and self._completed == 1 and self.fatal_engine()._description and self.counted():
            end(place, "backward")
        complete(self, buffer)

    _watch_steps(SliceSums)
    SliceSums._complete = fatal  # type: ignore[method-assign]


def _watch_steps(kind: Any) -> None:
    """Lets SliceSums know which step it is in."""
    from potluck.engine.elastic import ElasticEngine

    engines: list[Any] = []
    begin = ElasticEngine._begin_work

    def noted(self: Any, work: Any) -> None:
        engines[:] = [self]
        begin(self, work)

    ElasticEngine._begin_work = noted  # type: ignore[method-assign]
    kind.fatal_engine = lambda self: engines[0]
    kind.counted = lambda self: _when(engines[0])


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
    from potluck.engine.elastic import ElasticEngine

    wait = ElasticEngine._await_step

    def fatal(self: Any) -> Any:
        if _when(self) and self._reports and self._slice_done:
            self.client.flush()
            end(place, "sent")
        return wait(self)

    ElasticEngine._await_step = fatal  # type: ignore[method-assign]


def half_an_average_received(place: Path, end: Any = die) -> None:
    from potluck.fleet.client import Client

    read = Client._read_average
    seen = []

    def fatal(self: Any, pipe: Any, head: Any, length: int) -> None:
        from potluck.wire.codec import open_bulk

        bulk = open_bulk(head, length, "bincode")
        if bulk is not None and bulk.fields["step"] == AT_STEP:
            seen.append(1)
            if len(seen) == 2:
                end(place, "average")
        read(self, pipe, head, length)

    Client._read_average = fatal  # type: ignore[method-assign]


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
    from potluck.fleet.client import Client

    take = Client._take_average

    def fatal(self: Any, session: Any, at: Any) -> None:
        if at.step == AT_STEP and at.part == 1:
            end(place, "seen")
        take(self, session, at)

    Client._take_average = fatal  # type: ignore[method-assign]


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
    from potluck.engine import elastic

    def fatal(folder: Path, header: str) -> Any:
        yield b"x"
        end(place, "saving")

    elastic.chunks = fatal


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
    from potluck.engine.elastic import ElasticEngine

    send = ElasticEngine._send_part

    def spoiled(self: Any, part: int, gradients: Any) -> None:
        if _when(self) and part == 1:
            (place / "fired-spoiled").write_text("x")
            gradients = gradients.clone()
            gradients[3] = value
        send(self, part, gradients)

    ElasticEngine._send_part = spoiled  # type: ignore[method-assign]


def drifts(place: Path) -> None:
    """A bit of its weights flips after a step."""
    from potluck.engine.elastic import ElasticEngine

    tell = ElasticEngine._tell_applied

    def drifted(self: Any, norm: float, fault: str) -> None:
        if self.step_number == AT_STEP and not _fired(place, "drifted"):
            (place / "fired-drifted").write_text("x")
            self.replica.trained[0].data.view(-1)[5] += 1e-6
        tell(self, norm, fault)

    ElasticEngine._tell_applied = drifted  # type: ignore[method-assign]


def _flip(engine: Any, place: Path) -> None:
    """A bit of its weights, in memory, and once."""
    import torch

    if not _fired(place, "flipped"):
        (place / "fired-flipped").write_text("x")
        engine.replica.trained[0].data.view(-1).view(torch.int32)[5] ^= 1 << 20


def flips_after_applied(place: Path) -> None:
    from potluck.engine.elastic import ElasticEngine

    tell = ElasticEngine._tell_applied

    def flipped(self: Any, norm: float, fault: str) -> None:
        tell(self, norm, fault)
        if self.version == AT_STEP:
            _flip(self, place)

    ElasticEngine._tell_applied = flipped  # type: ignore[method-assign]


def flips_while_computing(place: Path) -> None:
    from potluck.engine.elastic import ElasticEngine

    begin = ElasticEngine._begin_work

    def flipped(self: Any, work: Any) -> None:
        begin(self, work)
        if work.step == AT_STEP:
            _flip(self, place)

    ElasticEngine._begin_work = flipped  # type: ignore[method-assign]


def flips_while_waiting(place: Path) -> None:
    """Its gradient has left."""
    from potluck.engine.elastic import ElasticEngine

    wait = ElasticEngine._await_step

    def flipped(self: Any) -> Any:
        if self.version + 1 == AT_STEP and self._reports and self._slice_done:
            _flip(self, place)
        return wait(self)

    ElasticEngine._await_step = flipped  # type: ignore[method-assign]


def flips_before_joining_again(place: Path) -> None:
    """The host is gone, and this worker's weights are no longer what it told that one."""
    from potluck.engine.elastic import ElasticEngine

    mend = ElasticEngine._mend

    def flipped(self: Any, why: str) -> None:
        _flip(self, place)
        mend(self, why)

    ElasticEngine._mend = flipped  # type: ignore[method-assign]


FLIPS: dict[str, Fault] = {
    "applied": flips_after_applied,
    "computing": flips_while_computing,
    "waiting": flips_while_waiting,
}
