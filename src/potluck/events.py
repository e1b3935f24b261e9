"""What happened in a run, as records. The terminal, the log, the pictures and TensorBoard all read these.

Knows nothing of who listens, nor of torch.
"""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, dataclass_transform, get_args

from potluck.errors import ConfigError


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Event:
    """Each class below it is a frozen dataclass, whose name is what happened."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class RunStarted(Event):
    """A run begins, or resumes."""

    name: str
    folder: str
    workers: int
    device: str
    parameters: int
    """How many numbers are trained."""
    unit: str
    """What a sample is counted in: rows or tokens."""
    batch_size: int
    steps_total: int
    """0 where nobody has said how long the run is."""
    from_step: int
    """Where a resumed run continues; 0 for a new one."""
    layout: str = ""
    """Which layers each stage of a model has that is cut, and in what order they work: lines to be shown."""
    strategy: str = ""
    """What of a replica is split over its ranks: no_shard, shard_grad_op, full_shard, hybrid_shard; empty: not told."""
    policy: str = ""
    """When replicas agree: sync, cadence, async or auto; empty: not told."""
    wire: str = ""
    """In which form replicas send each other their numbers: fp32, bf16, int8, int4 or auto; empty: not told."""
    device_name: str = ""
    """What the device of the first worker is called, such as NVIDIA H200; empty: not told."""
    flops_per_sample: float = 0.0
    """Floating-point operations that a sample costs, forward and backward; 0: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStep:
    """One worker's part of one step."""

    rank: int
    rows: int
    samples: float
    busy_s: float
    """Computing: data, forward and backward, and the optimizer of the step before."""
    wait_s: float
    """Waiting for the others' gradients after its own were done."""
    name: str = ""
    """Of a worker that joined a host, or of a stage."""
    send_s: float = 0.0
    """Seconds spent sending to other stages."""


class StepDone(Event):
    """A step of the run was applied, on every worker alike."""

    step: int
    epoch: int
    rows_seen: int
    """Rows of all epochs so far."""
    samples: float
    """What this step's mean was over, in the run's unit."""
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    workers: tuple[WorkerStep, ...]


class Decided(Event):
    """How the work is shared from here on, and why."""

    step: int
    rows: tuple[int, ...]
    """Each worker's part of the next step, or of the window until the next agreement."""
    reason: str
    """As a sentence."""
    version: int = 0
    """Agreements so far, where workers step by themselves."""
    anchor: int = 1
    """Batches of the slowest until the next agreement."""
    divergence: float = 0.0
    """How far the workers had drifted apart at the last agreement, as a part of the mean."""


class StepSkipped(Event):
    """A step whose loss or gradient was not finite; all workers left it out together."""

    step: int
    loss: float
    in_a_row: int
    reason: str


LOSS = "loss"
"""Of figures by name, the one that is the loss: the lower the better."""


def loss_among(figures: float | dict[str, float]) -> float | None:
    """The loss of a validation, if it is told."""
    return figures.get(LOSS) if isinstance(figures, dict) else figures


class Validated(Event):
    """The mean loss over the validation rows, and figures by name, if there are any."""

    step: int
    loss: float | None
    """None where there are figures by name, and no loss among them."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def in_words(self) -> str:
        """Such as "validation loss 0.3100, accuracy 0.9000", or "validation accuracy 0.9000"."""
        loss = {LOSS: self.loss} if self.loss is not None else {}
        return f"validation {', '.join(f'{name} {value:.4f}' for name, value in (loss | self.metrics).items())}"


class EpochDone(Event):
    """An epoch has ended, with the proof that each of its samples was used exactly once."""

    epoch: int
    used: int
    total: int
    same_weights: bool
    """Of those workers that were compared."""
    sentence: str
    not_compared: tuple[str, ...] = ()
    """Names of workers of which nobody knows whether they hold the same: there was no other of their kind, or they are
    plain peers."""


class CheckpointSaved(Event):
    """A checkpoint is whole on the disk."""

    step: int
    folder: str
    stall_s: float
    """How long training stood still for it: the copy to host memory."""
    bytes: int


class CheckpointFailed(Event):
    """The host could not write a checkpoint. Training continues, and the host tries again."""

    step: int
    reason: str


class CheckpointPassedOver(Event):
    """A checkpoint that cannot be loaded, so that an older one is."""

    folder: str
    reason: str


class Noticed(Event):
    """Something that is allowed, and that a person may not have meant; it is also said in the terminal."""

    sentence: str


class WorkerCame(Event):
    """A worker takes part from the next step on."""

    worker: int
    name: str
    kind: str
    step: int
    workers: int
    """How many take part now."""


class WorkerWent(Event):
    """A worker has left, or was lost."""

    worker: int
    name: str
    reason: str
    polite: bool
    """It said so before it went, and nothing was computed again."""
    workers: int


class Recovered(Event):
    """Workers were lost, and the others continue from what they had kept in memory for each other."""

    step: int
    """The last one that was kept; those after it are done again."""
    lost: tuple[int, ...]
    """By the ranks that they had."""
    workers: int
    """How many are left."""


class WentBack(Event):
    """Nobody has the newest weights any more: the run resumes from its newest checkpoint, or begins anew."""

    from_step: int
    """The last that was done."""
    step: int
    """Of the checkpoint; 0: there is none."""


class Stalled(Event):
    """The others wait for a worker, or cannot use what it sent."""

    worker: int
    name: str
    doing: str
    seconds: float
    then: str = ""
    """What is done about it."""


class Sampled(Event):
    """What the model writes now, from a fixed beginning: shown beside its loss."""

    step: int
    prompt: str
    """What it was given to continue."""
    text: str
    """What it wrote after that."""


class Ordered(Event):
    """A person asked for something on the live page, which allowed it (`--control`), and it was done or refused."""

    action: str
    """pause, resume, save or let_go."""
    step: int
    """The last that was done."""
    done: bool
    """Whether it was carried out."""
    sentence: str
    """What came of it."""
    worker: int | None = None
    """The id of the worker that it was about; None: all of them."""


class RunEnded(Event):
    """A run has finished, was interrupted, or failed."""

    reason: str
    """finished, interrupted, or the sentence of the error that ended it."""
    step: int
    rows_seen: int
    seconds: float
    loss: float | None
    validation_loss: float | None
    skipped: int


Listener = Callable[[Event], None]


def kind_of(event: object) -> str:
    """StepDone -> step_done."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()


class EventLog:
    """Hands each event to every listener, one at a time, from whatever thread it comes."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.last_step: StepDone | None = None
        """Of all workers together, also where this one had no part in it."""
        self._lock = threading.RLock()

    def emit(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, StepDone):
                self.last_step = event
            for listener in self.listeners:
                listener(event)


class EventFile:
    """A listener that appends each event to a file as one JSON line, written through at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+", encoding="utf-8")
        self._end_torn_line(path)

    def __call__(self, event: Event) -> None:
        # JSON has no NaN: a reader of another language would stumble over it.
        record = {"event": kind_of(event), "time": round(time.time(), 3)} | _finite(asdict(event))
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"Cannot write to {self._file.name}: {error.strerror}. Free some space, then continue with --resume."
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been said
            self._file.close()

    def _end_torn_line(self, path: Path) -> None:
        """A crash may have cut the last line; the next event must not become part of it."""
        text = path.read_bytes()
        if text and not text.endswith(b"\n"):
            self._file.write("\n")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; a line that a crash cut short is passed over. Numbers that are not finite are numbers again."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield _as_numbers(record)


_NUMBERS = {
    field.name
    for kind in (*Event.__subclasses__(), WorkerStep)
    for field in fields(kind)
    if float in (field.type, *get_args(field.type))
}


_TABLES = {"metrics"}
"""Fields that hold numbers by names of a user's own."""


def _as_numbers(value: Any, name: str = "") -> Any:
    """The reverse of _finite. A worker may be called nan; only fields that hold numbers are looked at."""
    match value:
        case dict():
            return {key: _as_numbers(item, name if name in _TABLES else key) for key, item in value.items()}
        case list():
            return [_as_numbers(item, name) for item in value]
        case "nan" | "inf" | "-inf" if name in _NUMBERS:
            return float(value)
    return value


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if value != value or value in (float("inf"), float("-inf")):
            return str(value)
    return value
