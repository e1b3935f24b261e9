"""Events: records of what happened in a run. The terminal, the log, the pictures and TensorBoard all read these.

Knows nothing of who listens, nor of torch.
"""

import contextlib
import json
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform, get_args

from potluck.errors import ConfigError, PotluckError
from potluck.words import say

SCHEMA = 1
"""The version of what is below, written with each record. Raise it when a field or an event is removed, or means
something else than before; not when one is added. What is published is docs/events.md, which a test makes from here."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Event:
    """Each class below it is a frozen dataclass, whose name is what happened."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class RunStarted(Event):
    """A run begins, or resumes."""

    name: str
    """Name of the run."""
    folder: str
    """Folder where the run is kept."""
    workers: int
    """How many take part when it begins."""
    device: str
    """Device of the worker that tells this."""
    parameters: int
    """How many numbers are trained."""
    unit: str
    """Unit in which samples are counted: rows or tokens."""
    batch_size: int
    """Rows of one step, over all workers."""
    steps_total: int
    """Steps of the whole run; 0 where nobody has said how long it is."""
    from_step: int
    """Step from which a resumed run continues; 0 for a new one."""
    layout: str = ""
    """Lines that show, for a model that is cut, which layers each stage has and in what order the stages work."""
    strategy: str = ""
    """How a replica is split over its ranks: no_shard, shard_grad_op, full_shard, hybrid_shard; empty: not told."""
    policy: str = ""
    """When replicas agree: sync, cadence, async or auto; empty: not told."""
    wire: str = ""
    """Form in which replicas send each other their numbers: fp32, bf16, int8, int4 or auto; empty: not told."""
    device_name: str = ""
    """Name of the first worker's device, such as NVIDIA H200; empty: not told."""
    flops_per_sample: float = 0.0
    """Floating-point operations that a sample costs, forward and backward; 0: not known."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the optimizer and of each step by name, and `arguments`: the script's, with secrets left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStep:
    """One worker's part of one step."""

    rank: int
    """Number of the worker, from 0; under a host, its id."""
    rows: int
    """Rows that it computed."""
    samples: float
    """Samples that it counted in them, in the run's unit."""
    busy_s: float
    """Seconds of computing: data, forward and backward, and the optimizer of the step before."""
    wait_s: float
    """Seconds of waiting for the others' gradients after its own were done."""
    name: str = ""
    """Name of a worker that joined a host, or of a stage."""
    send_s: float = 0.0
    """Seconds spent sending to other stages."""


class StepDone(Event):
    """A step of the run was applied, on every worker alike."""

    step: int
    """Number of the step, from 1."""
    epoch: int
    """Number of the epoch, from 0."""
    rows_seen: int
    """Rows of all epochs so far."""
    samples: float
    """Samples that this step's mean was over, in the run's unit."""
    loss: float
    """The mean over its samples, but for those of plain peers that send parts, which report none."""
    lr: float
    """The learning rate of the first group of the optimizer."""
    grad_norm: float
    """Norm of the whole gradient, before clipping."""
    seconds: float
    """Seconds since the step before."""
    workers: tuple[WorkerStep, ...]
    """Each worker's part."""


class Decided(Event):
    """How the work is shared from here on, and why."""

    step: int
    """Steps of the run so far."""
    rows: tuple[int, ...]
    """Each worker's part of the next step, or of the window until the next agreement."""
    reason: str
    """The reason, as a sentence."""
    version: int = 0
    """Agreements so far, where workers step by themselves."""
    anchor: int = 1
    """Batches of the slowest until the next agreement."""
    divergence: float = 0.0
    """How far the workers had drifted apart, as a part of the mean: the farthest, as they reported with their last
    work."""


class StepSkipped(Event):
    """A step whose loss or gradient was not finite; all workers left it out together."""

    step: int
    """Steps of the run so far."""
    loss: float
    """Loss of the step, which may be not finite."""
    in_a_row: int
    """Skipped steps since the last that was applied; 0 where a host tells it."""
    reason: str
    """The reason, as a sentence without its end."""


LOSS = "loss"
"""Name of the figure that is the loss: the lower the better."""


def loss_among(figures: float | dict[str, float]) -> float | None:
    """The loss of a validation, if it is told."""
    return figures.get(LOSS) if isinstance(figures, dict) else figures


class Validated(Event):
    """The mean loss over the validation rows, and figures by name, if there are any."""

    step: int
    """Steps of the run so far."""
    loss: float | None
    """None where there are figures by name, and no loss among them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures by the names that the function for validation gave them."""

    @property
    def in_words(self) -> str:
        """Write the figures, such as "validation loss 0.3100, accuracy 0.9000", or "validation accuracy 0.9000"."""
        loss = {LOSS: self.loss} if self.loss is not None else {}
        return f"validation {', '.join(f'{name} {value:.4f}' for name, value in (loss | self.metrics).items())}"


class EpochDone(Event):
    """An epoch has ended, with the proof that each of its samples was used exactly once."""

    epoch: int
    """Number of the epoch, from 0."""
    used: int
    """Samples that were used."""
    total: int
    """Samples that the epoch has."""
    same_weights: bool
    """Whether the workers that were compared have the same weights."""
    sentence: str
    """The proof, for a person."""
    not_compared: tuple[str, ...] = ()
    """Names of workers of which nobody knows whether they hold the same: there was no other of their kind, or they are
    plain peers."""


class CheckpointSaved(Event):
    """A checkpoint is whole on the disk."""

    step: int
    """Step of which it is."""
    folder: str
    """Folder where it is."""
    stall_s: float
    """How long training stood still for it: the copy to host memory."""
    bytes: int
    """Bytes that it takes on the disk."""


class CheckpointFailed(Event):
    """The host could not write a checkpoint. Training continues, and the host tries again."""

    step: int
    """Step of which it would have been."""
    reason: str
    """The reason, as a sentence."""


class CheckpointPassedOver(Event):
    """A checkpoint that cannot be loaded, so that an older one is."""

    folder: str
    """Folder where it is."""
    reason: str
    """The reason, as a sentence."""


class Noticed(Event):
    """Something that is allowed, and that a person may not have meant; it is also said in the terminal."""

    sentence: str
    """The sentence that was said."""


class WorkerCame(Event):
    """A worker takes part from the next step on."""

    worker: int
    """Number of the worker among all that ever came."""
    name: str
    """Name that it gives itself."""
    kind: str
    """Device that it computes with."""
    step: int
    """Steps of the run so far."""
    workers: int
    """How many take part now."""


class WorkerWent(Event):
    """A worker has left, or was lost."""

    worker: int
    """Number of the worker among all that ever came."""
    name: str
    """Name that it gives itself."""
    reason: str
    """The reason, as a sentence."""
    polite: bool
    """Whether it said so before it went, and nothing was computed again."""
    workers: int
    """How many are left."""
    owed: bool = False
    """Whether it had a part of the step under way, which the others compute again."""
    stack: str = ""
    """Where it was stuck, if it told: a line for each call, the innermost first."""
    took_part: bool = True
    """Whether it had come; else it went while it was building its model, or getting the weights."""
    refused: bool = False
    """Whether the host has turned it away, for this reason."""


class Recovered(Event):
    """Workers were lost, and the others continued from copies in memory. Only files of earlier versions hold it."""

    step: int
    """The last one that was kept; those after it are done again."""
    lost: tuple[int, ...]
    """Ranks of the workers that were lost."""
    workers: int
    """How many are left."""


class WentBack(Event):
    """Nobody has the newest weights any more: the run resumes from its newest checkpoint, or begins anew."""

    from_step: int
    """The last that was done."""
    step: int
    """Step of the checkpoint; 0: there is none."""


class Stalled(Event):
    """The others wait for a worker, or cannot use what it sent."""

    worker: int
    """Number of the worker among all that ever came."""
    name: str
    """Name that it gives itself."""
    doing: str
    """Phase that it was in when it was last heard."""
    seconds: float
    """Seconds since then."""
    then: str = ""
    """Action that the host takes."""
    stack: str = ""
    """Where it is stuck, if it told: a line for each call, the innermost first."""


class Sampled(Event):
    """A text that the model writes from a fixed beginning: shown beside its loss."""

    step: int
    """Step after which it wrote this."""
    prompt: str
    """Text that it was given to continue."""
    text: str
    """Text that it wrote after that."""


class Ordered(Event):
    """A person asked for something on the live page, which allowed it (`--control`), and it was done or refused."""

    action: str
    """pause, resume, save or let_go."""
    step: int
    """The last that was done."""
    done: bool
    """Whether it was carried out."""
    sentence: str
    """The result, as a sentence."""
    worker: int | None = None
    """The id of the worker that it was about; None: all of them."""


class RunEnded(Event):
    """A run has finished, was interrupted, or failed."""

    reason: str
    """finished, interrupted, or the sentence of the error that ended it."""
    step: int
    """Steps of the run."""
    rows_seen: int
    """Rows of all epochs."""
    seconds: float
    """Seconds since it began, or resumed."""
    loss: float | None
    """Loss of the last step; None: there was none."""
    validation_loss: float | None
    """Loss of the last validation; None: there was none."""
    skipped: int
    """Steps that were skipped."""


Listener = Callable[[Event], None]
Heard = TypeVar("Heard", bound=Event)


def name_of(kind: type) -> str:
    """StepDone -> step_done."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


class EventLog:
    """Hands each event to every listener, one at a time, from whatever thread it comes."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        """Ours: one that fails ends the run."""
        self.last_step: StepDone | None = None
        """Of all workers together, also where this one had no part in it."""
        self._guests: list[_Guest] = []
        # Events come from several threads, and listeners are not made for two at once. Reentrant: a listener may emit.
        self._lock = threading.RLock()

    def emit(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, StepDone):
                self.last_step = event
            for listener in self.listeners:
                listener(event)
            for guest in tuple(self._guests):  # one may stop to listen while it is told
                if isinstance(event, guest.kind) and guest in self._guests and not guest.hear(event):
                    self._guests.remove(guest)

    def on(self, kind: type[Heard], callback: Callable[[Heard], None]) -> Callable[[], None]:
        """Calls back for each event of this kind, or of every kind where it is Event; until what it returns is called.

        A callback that fails is said once and not called again, and the run continues. One of our own errors, such as
        Interrupted, ends the run.
        """
        if not (isinstance(kind, type) and issubclass(kind, Event)):
            known = ", ".join(found.__name__ for found in Event.__subclasses__())
            raise ConfigError(f"on() takes a kind of event, Event for all or one of {known}; not {kind!r}.")
        guest = _Guest(kind, callback)
        with self._lock:
            self._guests.append(guest)

        def stop() -> None:
            with self._lock, contextlib.suppress(ValueError):  # stopped twice, or left out since it failed
                self._guests.remove(guest)

        return stop


@dataclass(frozen=True, eq=False)
class _Guest:
    """A callback of somebody else's, which must not end the run by a mistake."""

    kind: type[Event]
    callback: Callable[[Any], None]

    def hear(self, event: Event) -> bool:
        """Whether it may be called again."""
        try:
            self.callback(event)
        except PotluckError:
            raise
        except Exception as error:
            name = getattr(self.callback, "__qualname__", type(self.callback).__name__)
            frames = traceback.extract_tb(error.__traceback__)
            say(
                f"The callback {name} failed when it heard of {type(event).__name__}, and is not called again:"
                f" {type(error).__name__}: {error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})."
                " The run continues."
            )
            return False
        return True


def record_of(event: Event, at: float | None = None) -> dict[str, Any]:
    """An event as docs/events.md has it; `at`: when it happened, if not now. JSON has no NaN: a reader of another
    language would stumble over it."""
    told: dict[str, Any] = _finite(asdict(event))
    return {"event": name_of(type(event)), "time": round(time.time() if at is None else at, 3), "schema": SCHEMA} | told


def _as_plain(value: Any) -> Any:
    """Convert a figure of one's own, such as a number of numpy's or torch's."""
    return _finite(float(value)) if hasattr(value, "__float__") else str(value)


class EventFile:
    """A listener that appends each event to a file as one JSON line, written through at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+", encoding="utf-8")
        self._end_torn_line(path)

    def __call__(self, event: Event, at: float | None = None) -> None:
        if self._file.closed:  # its owner is done with it: because a disk is full, say, which was told already
            return
        try:
            self._file.write(json.dumps(record_of(event, at), allow_nan=False, default=_as_plain) + "\n")
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
    return read_records(path.read_text(encoding="utf-8").splitlines(), str(path))


def read_records(lines: Iterable[str], source: str) -> Iterator[dict[str, Any]]:
    """Read the events in these lines. Those of a newer schema are passed over, which is said: what they hold may mean
    something else here."""
    is_said = False
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a line that a crash cut short
            continue
        if (schema := record.get("schema", 1)) <= SCHEMA:
            found: dict[str, Any] = _as_numbers(record)
            yield found
        elif not is_said:
            is_said = True
            say(
                f"{source} was written by a newer Potluck: its events have schema {schema}, and this one reads {SCHEMA}"
                " at most. They are passed over; update Potluck here to see them."
            )


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
