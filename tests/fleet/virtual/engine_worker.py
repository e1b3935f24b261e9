"""A worker of a virtual fleet with the real engine: Round, HostTable, HostHolder, their works, Listener and Loader.

Its script is an ordinary training loop, in a thread. One thread of a fleet runs at a time: a worker's runs from one of
its waits to the next, and the fleet's meanwhile stands still. What a thread takes for the time is its process' clock.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from potluck.agree.policy import ApplyPolicy
from potluck.coded_numbers import Floats
from potluck.composition import Wanted
from potluck.engine import engine as engine_module
from potluck.engine import host_table, state_transfer
from potluck.engine.engine import Engine
from potluck.engine.engine_parts import under_host
from potluck.errors import Interrupted
from potluck.fleet import phases
from potluck.fleet.client import Average as ClientAverage
from potluck.fleet.description import Description
from potluck.fleet.holder import ConnectionLost
from potluck.fleet.listener import Listener
from potluck.replica.precision import StepConfig
from potluck.wire.messages import Message, Welcome
from tests.fleet.virtual.client import Client
from tests.fleet.virtual.group import fresh_generators, generators, set_generators
from tests.fleet.virtual.group_run import hash_of
from tests.fleet.virtual.group_task import Rows, loss_of, make_model, make_optimizers, make_rows
from tests.fleet.virtual.line import Average, Line, Lost, Payload
from tests.fleet.virtual.process import Life, Receive, Sleep
from tests.fleet.virtual.toy import BATCH, ROWS, SLICES

if TYPE_CHECKING:
    from tests.fleet.virtual.engine_run import EngineFleet

LOOKS = 7
"""Held-out rows."""
OF_PHASE = {"backward": "part", "committed": "applied", "evaluating": "told", "parcel": "sent", "half": "sent"}
"""Phases of a toy worker that the engine has no name for, and the nearest that it has."""


class Killed(BaseException):
    """The worker's process is gone: nothing that it still does reaches anybody."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all workers of a run train alike."""

    policy: ApplyPolicy
    model: str
    optimizer: str
    epochs: int
    seed: int
    clip: float | None = None
    save_every: int = 0
    evaluate_every: int = 0
    gather_every: int = 0
    keeps_best: bool = False
    """Each epoch is its best so far."""
    is_in_loop: bool = False
    """Whether the loop itself evaluates and saves, in the middle of a step or a window, and not a callback."""


class EngineWorker(Client):
    def __init__(
        self,
        fleet: "EngineFleet",
        name: str,
        *,
        task: Task,
        slice_s: float = 0.1,
        latency_s: float = 0.001,
        pack_s: float = 0.005,
        batch_s: float = 0.1,
    ) -> None:
        super().__init__(fleet, name, latency_s, "cpu")
        self.engines, self.task, self.pack_s = fleet, task, pack_s
        self._row_s = slice_s * SLICES / BATCH
        self.engine: Engine | None = None
        self.client: EngineClient | None = None
        self.ended_with = ""
        """The hash of the weights that its script ended with; empty if it did not."""
        self._thread = threading.Thread(target=self._live, name=f"worker {name}", daemon=True)
        self._go, self._gave = _held_lock(), _held_lock()
        self._generators = fresh_generators(len(fleet.workers))
        """Random numbers, which are a process' own."""
        self._request: Sleep | Receive | None = None
        self._answer: Any = None
        self._raised: BaseException | None = None

    @property
    def state(self) -> SimpleNamespace:
        """As a toy tells where it stands."""
        return SimpleNamespace(step=self.engine.version if self.engine is not None else 0)

    # As a process of the fleet

    def live(self) -> Life:
        """Lets the thread run from each of its waits to the next."""
        self._thread.start()
        while True:
            self._run_on()
            if self._request is None:
                if self._raised is not None:
                    raise self._raised
                return
            self._answer = yield self._request

    def _run_on(self) -> None:
        self._request = None
        set_generators(self._generators)
        self._go.release()
        self._gave.acquire()
        self._generators = generators()

    def end(self) -> None:
        """The fleet is gone: unwind what still runs."""
        self.dead = True
        if self._thread.is_alive():
            self._run_on()
        self._thread.join(10)
        assert not self._thread.is_alive(), f"{self.name} does not end"

    def ask_to_leave(self) -> None:
        if self.engine is not None:
            self.engine.interrupt()
        self.poke()

    def _keep(self, item: Average) -> None:
        """Among the messages, in their order."""
        self.inbox.append(item)

    def reach(self, phase: str) -> Life:
        self.meet(phase, 0)
        yield from ()

    # In its thread

    def _live(self) -> None:
        self._go.acquire()
        try:
            if not self.dead:
                with _as_running(self):
                    self._script()
        except (Killed, Interrupted):  # Interrupted: it was asked to leave, and has
            pass
        except BaseException as error:
            self._raised = error
        self._request = None
        self._gave.release()

    def ask(self, request: Sleep | Receive) -> Any:
        """Wait on the fleet's clock."""
        if self.dead:
            raise Killed
        self._request = request
        self._gave.release()
        self._go.acquire()
        if self.dead:
            raise Killed
        return self._answer

    def follow(self, life: Generator[Any, Any, Any]) -> Any:
        try:
            request = next(life)
            while True:
                request = life.send(self.ask(request))
        except StopIteration as end:
            return end.value

    def meet(self, phase: str, step: int) -> None:
        faults = self.fleet.faults
        for name in [phase, *(toy for toy, own in OF_PHASE.items() if own == phase)]:
            fault = faults.take(self.name, name, step)
            match fault.kind if fault is not None else None:
                case "kill":
                    self.kill()
                    raise Killed
                case "cut" if self.line is not None:
                    self.lose_connection()
                case "leave":
                    self.ask_to_leave()
                case "stall":
                    assert fault is not None
                    self.ask(Sleep(fault.seconds))
                case "silence":
                    assert fault is not None
                    self.clock.stop(fault.seconds)
                    self.ask(Sleep(0.0))

    def _script(self) -> None:
        task = self.task
        client = self.client = EngineClient(self)
        client.connect()
        engine = self.engine = Engine(
            step=StepConfig(clip=task.clip),
            wanted=Wanted(policy=task.policy, has_host=True),
            table=lambda run: under_host(run, Listener(client)),  # type: ignore[arg-type]
        )
        engine.run.speak(False, lambda sentence: None)
        rows = make_rows(ROWS, task.seed, torch.float32, bad=None)
        model = make_model(task.model, task.seed, torch.float32)
        optimizer = make_optimizers(model, task.optimizer)
        sizes: dict[str, Any] = {"batch_size": BATCH, "seed": task.seed}
        if task.policy.steps_together:
            sizes |= {"slices": SLICES}
        model, _, loader = engine.prepare(model, optimizer, rows, **sizes)
        if not task.is_in_loop:
            engine.after_step.append(lambda: self._use_others(engine, engine.step_number))
        engine.after_agreement.append(lambda: self.engines.on_agreed(self, engine, model))
        is_best = False
        for _ in engine.epochs(task.epochs):
            for number, (x, y, _) in enumerate(loader, start=1):
                self.ask(Sleep(len(x) * self._row_s))
                if task.is_in_loop:
                    self._use_others(engine, number)
                engine.backward(loss_of(model, x, y, 0), samples=len(x))
                engine.step()
            step = engine.step_number
            # It may be put elsewhere while it hears what the others have found.
            is_best = task.keeps_best and engine.keep_best(-float(step)) and engine.step_number == step
        if is_best:
            self.engines.on_best(self, engine)
        self.ended_with = hash_of([*model.parameters(), *model.buffers()])
        engine.close()

    def _use_others(self, engine: Engine, number: int) -> None:
        """The calls that need others. `number`: of the step, or of the micro-batch where the loop calls them itself."""
        task, is_agreed = self.task, not self.task.is_in_loop
        if is_agreed and task.gather_every and number % task.gather_every == 0:
            found = engine.gather(number)
            assert {*found} == {number} and len(found) <= len(self.fleet.workers), f"{self.name} was given {found}"
        if task.evaluate_every and number % task.evaluate_every == 0:
            self.engines.on_looked(self, engine, engine.evaluate(_look, _looks(task.seed), 3))
        if task.save_every and number % task.save_every == 0:
            engine.save("unused")


def _look(model: Any, batch: Rows) -> torch.Tensor:
    return loss_of(model, batch[0], batch[1], 0)


def _looks(seed: int) -> Rows:
    return make_rows(LOOKS, seed + 1, torch.float32, bad=None)


class EngineClient:
    """In place of a fleet.Client: the same calls, over a line of the virtual fleet."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self.name = worker.name
        self.description: Description | None = None
        self.is_closed = False
        self._lost = ""

    @property
    def welcome(self) -> Welcome | None:
        return self._worker.welcome

    @property
    def worker_id(self) -> int:
        return self.welcome.worker_id if self.welcome is not None else 0

    @property
    def patience_s(self) -> float:
        return self._worker.fleet.patience_s

    def connect(self, *, again: bool = False) -> Welcome:
        self._lost = ""
        self._worker.follow(self._worker.join())
        assert self.welcome is not None
        return self.welcome

    def close(self) -> None:
        self.is_closed = True
        if self._worker.line is not None:
            self._worker.line.close()

    def say(self, sentence: str) -> None:
        """Nobody listens."""

    # Sending

    def send(self, message: Message) -> None:
        if not self._lost:
            self._worker.send(message)

    def send_part(self, step: int, part: int, gradients: Floats, before: Callable[[], None] | None = None) -> None:
        if not self._lost:
            self._worker.send(Payload(step, part, gradients.copy()))

    def flush(self) -> None:
        """All has been sent."""

    def make_room(self, floats: int) -> None:
        """There is as much as anybody wants."""

    def allocate(self, floats: int) -> Floats:
        return np.zeros(floats, np.float32)

    @property
    def session(self) -> object:
        return self._worker.line

    def send_parcel(
        self, session: object, begin: Message, transfer: int, chunks: Iterator[bytes], done: Callable[[], None]
    ) -> None:
        worker = self._worker
        if not isinstance(session, Line) or session is not worker.line or not session.is_open or worker.dead:
            done()
            return
        worker._parcels.add(transfer, begin, chunks, done)
        worker._send_parcels()

    # Receiving

    def receive(self, timeout_s: float | None = None) -> Message | ClientAverage | ConnectionLost | None:
        if self._lost:
            return ConnectionLost(self._lost)
        match item := self._worker.ask(Receive(timeout_s)):
            case Lost():
                self._lost = item.why or "it is lost"
                return ConnectionLost(self._lost)
            case Average():
                return ClientAverage(item.step, item.part, item.values)
        return item  # type: ignore[no-any-return]

    def release(self, average: ClientAverage) -> None:
        """Its memory is its own."""


class _Later:
    """In place of a thread that sends a state: it is done a while after it was begun."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._target, self._is_over = target, False
        worker = _running()
        assert worker is not None
        self._worker = worker

    def start(self) -> None:
        self._worker.fleet.clock.after(self._worker.pack_s, self._go)

    def _go(self) -> None:
        self._is_over = True
        if not self._worker.dead:
            self._target()

    def is_alive(self) -> bool:
        return not self._is_over

    def join(self, timeout: float) -> None:
        """It is of no use any more."""


_OF_THREAD: dict[int, EngineWorker] = {}


def _running() -> EngineWorker | None:
    return _OF_THREAD.get(threading.get_ident())


@contextmanager
def _as_running(worker: EngineWorker) -> Iterator[None]:
    """This thread is the worker's."""
    _OF_THREAD[threading.get_ident()] = worker
    try:
        yield
    finally:
        del _OF_THREAD[threading.get_ident()]


@contextmanager
def patched() -> Iterator[None]:
    """Clocks of workers' threads are virtual, their phases are met by faults, and nothing of theirs is left at exit."""
    real = {name: getattr(time, name) for name in ("monotonic", "perf_counter")}

    def clock(name: str) -> Callable[[], float]:
        return lambda: worker.clock.now if (worker := _running()) is not None else real[name]()

    def meet(phase: str, step: int, **what: Any) -> None:
        if (worker := _running()) is not None and not worker.dead:
            worker.meet(phase, step)

    nothing = SimpleNamespace(register=lambda *call: None, unregister=lambda *call: None)
    phases.listeners.append(meet)
    try:
        with (
            mock.patch.object(time, "monotonic", clock("monotonic")),
            mock.patch.object(time, "perf_counter", clock("perf_counter")),
            mock.patch.object(host_table, "atexit", nothing),
            mock.patch.object(engine_module, "atexit", nothing),
            mock.patch.object(host_table, "UseWatch", lambda **_: None),  # of this machine, in a thread of its own
            mock.patch.object(state_transfer, "threading", SimpleNamespace(Thread=_Later)),
        ):
            yield
    finally:
        phases.listeners.remove(meet)


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
