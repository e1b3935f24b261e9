"""A fleet of real processes: a coordinator in this one (or in one that can be killed), and workers that can be killed.

Workers are children of the fork server that has torch loaded already, and train one small model. A fault is a function
that a worker calls before it starts: it changes something so that the worker meets its end at a certain point, and
leaves a file to prove that it did.
"""

import itertools
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from potluck.data.plan import BatchConfig
from potluck.errors import Interrupted, WorkerLost
from potluck.events import Event
from potluck.files import write_whole
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.effects import StepRecord
from potluck.fleet.invite import INVITE, Identity, Invite
from potluck.fleet.journal import Journal
from potluck.fleet.ledger import prove
from potluck.fleet.membership import WorkerPhase
from potluck.fleet.server import Server
from potluck.link.link import loss_of_peer
from potluck.replica.replica import StepConfig
from potluck.save.checkpoint_receiver import CheckpointReceiver
from potluck.save.parts import whole_tensors
from potluck.sharding.strategy import HybridShard
from tests.gathered import gathered
from tests.odd import Odd
from tests.ranks import _main_module_unnamed, _server

ROWS, BATCH, EPOCHS, SLICES = 212, 32, 2, 8
STEPS = EPOCHS * -(-ROWS // BATCH)
PATIENCE_S = 20.0
_open: list[Any] = []
"""Fleets, workers and coordinators of the test that runs: ended with it, however it ends."""

Fault = Callable[[Path], None]


class Net(nn.Module):
    """Everything that could depend on who computes it: dropout, buffers of every kind, a parameter nobody uses."""

    def __init__(self, *, bare: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(3))
        self.norm: nn.Module = nn.BatchNorm1d(24) if not bare else nn.Identity()
        self.odd: nn.Module = Odd(24) if not bare else nn.Identity()
        self.drop = nn.Dropout(0.2 if not bare else 0.0)
        self.unused: nn.Module = nn.Linear(3, 3) if not bare else nn.Identity()
        self.leave = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(self.drop(self.odd(self.norm(x))))


def build(
    *, bare: bool = False, spoiled: int | None = None, data_seed: int = 5, lr: float = 0.01, sgd: bool = False
) -> tuple[Net, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    draw = torch.Generator().manual_seed(data_seed)
    data = torch.randn(ROWS, 6, generator=draw), torch.randint(0, 3, (ROWS,), generator=draw)
    if spoiled is not None:
        data[0][spoiled] = torch.nan
    model = Net(bare=bare)
    if sgd:
        return model, torch.optim.SGD(model.parameters(), lr=lr), data
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1), data


def train(
    engine: Any,
    *,
    epochs: int = EPOCHS,
    on_step: Callable[[Any], None] = lambda engine: None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    counts_itself: bool = False,
    by_len: bool = False,
    **what: Any,
) -> Net:
    """The loop that every worker runs. `counts_itself`: as one that does not know of fleet.epochs(). `by_len`: each
    pass takes len(loader) batches, and does not ask for more."""
    model, optimizer, data = build(**what)
    scheduler = schedule(optimizer) if schedule is not None else None
    model, optimizer, loader = engine.prepare(model, optimizer, data, batch_size=BATCH, seed=1, scheduler=scheduler)
    engine.after_agreement.append(lambda: on_step(engine))
    for _ in range(epochs) if counts_itself else engine.epochs(epochs):
        for x, y in itertools.islice(loader, len(loader)) if by_len else loader:
            loss = F.cross_entropy(model(x), y)
            engine.backward(loss, samples=len(x))
            engine.step()
    return model


def fit(engine: Any, folder: Path, settings: dict[str, Any]) -> Net:
    """The same by Trainer."""
    from potluck.train.trainer import FitConfig, Trainer

    model, optimizer, data = build()
    validation = tuple(part[:20] for part in data)
    settings = dict(settings)
    batch = BatchConfig(size=BATCH, slices=settings.pop("slices", None))
    trainer = Trainer(
        model,
        optimizer,
        data,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch,
        folder=folder,
        validation=validation,
        engine=engine,
        config=FitConfig(**settings, seed=1, progress=False),
    )
    trainer.fit()
    return model


# Workers


def _work(invite: str, folder: str, name: str, fault: Fault | None, options: dict[str, Any]) -> None:
    os.environ |= {INVITE: invite, "POTLUCK_NAME": name, "POTLUCK_QUIET": "1", **options.get("group", {})}
    torch.set_num_threads(1)

    if not options.get("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    place = Path(folder)
    try:
        import potluck
        from potluck.fleet import host_connector
        from potluck.sums import slices

        slices.SMALL_BYTES = 1024  # so that this small model, too, has several parts
        if not options.get("shared"):
            host_connector.connect_local = lambda port: None  # as a worker on another machine
        if fault is not None:
            fault(place)
        fleet = potluck.init(
            options.get("policy", potluck.Sync()),
            options.get("strategy", potluck.NoShard()),
            step=options.get("step", StepConfig()),
            wire=options.get("wire", "fp32"),
        )
        signal.signal(signal.SIGUSR1, lambda number, frame: fleet.interrupt())
        (place / f"{name}.in").touch()

        def on_step(fleet: Any) -> None:
            save_every = options.get("save_every")
            if save_every and not fleet.table.is_replaying and fleet.step_number % save_every == 0:
                fleet.save(place)
            if options.get("slow_s"):
                time.sleep(options["slow_s"])
            if "hold_at" in options and fleet.step_number >= options["hold_at"]:
                wait_until((place / options.get("hold_for", "go")).exists)

        names = ("bare", "spoiled", "data_seed", "lr", "sgd", "schedule", "counts_itself", "by_len")
        what = {name: options[name] for name in names if name in options}
        if "job" in options:  # a function of the handle, which gives the model that it has trained
            fleet.after_agreement.append(lambda: on_step(fleet))
            model = options["job"](fleet)
        elif "fit" in options:
            fleet.after_agreement.append(lambda: on_step(fleet))
            model = fit(fleet, place / name, options["fit"])
        else:
            model = train(fleet, on_step=on_step, epochs=options.get("epochs", EPOCHS), **what)
        fleet.wait_for_saves()
        write_whole(place / f"{name}.skipped", str(fleet.skipped))
        if fleet.step_number == options.get("steps", STEPS):
            weights = whole_state(model, getattr(fleet.run.replica, "sharded", None))
            if fleet.link.rank == 0:
                torch.save(weights, place / f"{name}.part")
                (place / f"{name}.part").rename(place / f"{name}.pt")  # one that is killed meanwhile leaves none
        if "stay_until" in options:
            wait_until((place / options["stay_until"]).exists)
        fleet.close()
    except Interrupted as error:
        write_whole(place / f"{name}.interrupted", str(error))
        os._exit(0)
    except BaseException as error:
        is_loss = isinstance(error, WorkerLost) or loss_of_peer(error) is not None
        kind = "lost" if is_loss and options.get("may_lose") else "error"
        write_whole(place / f"{name}.{kind}", traceback.format_exc())
        os._exit(1)
    os._exit(0)


def whole_state(model: nn.Module, sharded: Any) -> dict[str, torch.Tensor]:
    """Also where it is split over ranks: then all of those call this."""
    if sharded is None:
        return {name: gathered(tensor) for name, tensor in model.state_dict().items()}
    found = {name: tensor.detach().cpu().clone() for name, tensor in whole_tensors(sharded).items()}
    for name, spec in sharded.split.items():
        whole = torch.zeros(spec.shape, dtype=spec.dtype).view(-1)
        for run in (*sharded.runs, *sharded.rest):
            span = run.span
            if span.name == name:
                whole[span.start : span.end] = run.parameter.detach().reshape(-1)
        dist.all_reduce(whole)
        found[name] = whole.view(spec.shape)
    return found | {name: found[first] for name, first in sharded.tied().items()}


def die(place: Path, what: str) -> None:
    """The fault has fired: no Python code runs after this."""
    (place / f"fired-{what}").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)


def stop(place: Path, what: str) -> None:
    write_whole(place / f"fired-{what}", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


class Worker:
    def __init__(self, invite: Invite, folder: Path, name: str, fault: Fault | None, options: dict[str, Any]) -> None:
        self.name = name
        self.folder = folder
        with _main_module_unnamed():
            self.process = _server.Process(
                target=_work, args=(invite.line(), str(folder), name, fault, options), daemon=True
            )
            self.process.start()
        _open.append(self)

    def close(self) -> None:
        self.process.kill()

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # it may just have ended by itself
            os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 60) -> None:
        self.process.join(timeout_s)
        error = self.folder / f"{self.name}.error"
        assert not error.exists(), error.read_text()
        assert self.process.exitcode is not None, f"{self.name} still runs after {timeout_s} s"

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(torch.load(self.folder / f"{self.name}.pt", weights_only=True, map_location="cpu"))


def start_node(
    invite: Invite, folder: Path, name: str, ranks: int, faults: dict[int, Fault], options: dict[str, Any]
) -> list[Worker]:
    """Its first rank has the node's name."""
    rendezvous = folder / f"{name}.rendezvous"
    shared = {"WORLD_SIZE": str(ranks), "POTLUCK_RENDEZVOUS": str(rendezvous), "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for rank in range(ranks):
        group = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        own = {"strategy": HybridShard(intra_node_size=ranks)} | options | {"group": group}
        called = name if rank == 0 else f"{name}.{rank}"
        started.append(Worker(invite, folder, called, faults.get(rank), own))
    return started


# Coordinators


class Fleet:
    """A coordinator in this process, and its workers."""

    def __init__(
        self, folder: Path, *, encrypted: bool = False, patience_s: float = PATIENCE_S, **options: Any
    ) -> None:
        self.folder = folder
        self.closed = False
        self.events: list[Event] = []
        self.records: list[StepRecord] = []
        self.rates: list[float] = []
        """The learning rate after each record."""
        self.workers: list[Worker] = []
        self.server, self.invite, self.journal = serve(
            folder,
            encrypted=encrypted,
            patience_s=patience_s,
            on_event=self.events.append,
            on_step=self._on_step,
            **options,
        )
        self.server.start()
        _open.append(self)

    def _on_step(self, record: StepRecord, lr: float, norm: float, fault: str) -> None:
        self.records.append(record)
        self.rates.append(lr)

    def add(self, name: str, fault: Fault | None = None, **options: Any) -> Worker:
        worker = Worker(self.invite, self.folder, name, fault, options)
        self.workers.append(worker)
        return worker

    def add_node(
        self, name: str, ranks: int = 2, faults: dict[int, Fault] | None = None, **options: Any
    ) -> list[Worker]:
        """A worker that is several ranks of one machine. `faults`: by rank."""
        started = start_node(self.invite, self.folder, name, ranks, faults or {}, options)
        self.workers += started
        return started

    def let_in(self, name: str, held: str = "go") -> None:
        """Those with `hold_at` wait at that step until this one is here, and has its model and its data. `held`: those
        that are held for this."""
        members = self.server.core.membership.members

        def is_here() -> bool:
            return any(m.name == name and m.phase is not WorkerPhase.GREETED for m in list(members.values()))

        wait_until(is_here)
        (self.folder / held).touch()

    def wait_for_step(self, step: int, timeout_s: float = 40) -> None:
        wait_until(lambda: self.server.core.standing.version >= step, timeout_s)

    def finish(self, timeout_s: float = 60, epochs: int = EPOCHS) -> dict[str, torch.Tensor]:
        """Until the run is over: the weights that all workers who saw the end agree on."""
        try:
            finish = self.server.wait(timeout_s)
            errors = [path.read_text() for path in self.folder.glob("*.error")]
            assert not errors, errors[0]
            assert finish is not None, f"the run has not ended within {timeout_s} s: {self.describe()}"
            assert not finish.failed, finish.reason
            found = []
            for worker in self.workers:
                worker.process.join(10)
                if (self.folder / f"{worker.name}.pt").exists():
                    found.append(worker.weights)
            assert found, "no worker saw the end"
            for other in found[1:]:
                assert_same(found[0], other)
            self.check_ledger(epochs)
            return found[0]
        finally:
            self.close()

    def check_ledger(self, epochs: int = EPOCHS) -> None:
        check_journal(self.journal, self.server.core.standing.version, epochs)

    def describe(self) -> str:
        core = self.server.core
        members = [
            f"{m.name} {m.phase.name} {m.doing(core.standing)} {m.nodes}" for m in core.membership.members.values()
        ]
        return f"step {core.standing.version}, under way {core.now}, members {members}, refused {dict(core.refused)}"

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for worker in self.workers:
                worker.close()
            self.server.stop()
            self.journal.close()


def serve(
    folder: Path,
    *,
    encrypted: bool = False,
    patience_s: float = PATIENCE_S,
    address: str = "127.0.0.1",
    port: int = 0,
    on_event: Callable[[Event], None] = lambda event: None,
    on_step: Callable[[StepRecord, float, float, str], None] = lambda *told: None,
    **options: Any,
) -> tuple[Server, Invite, Journal]:
    identity = Identity.load_or_make(folder / "identity")
    journal = Journal(folder / "journal.sqlite")
    coordinator = Coordinator(
        patience_s=patience_s,
        secret=identity.secret if encrypted else "",
        resumed=journal.resumed(),
        **options,
    )

    def hear(event: Event) -> None:
        journal.keep("workers", str(len(coordinator.membership.ready)))
        journal.keep("next worker", str(coordinator.membership.next_id))
        on_event(event)

    server = Server(
        coordinator,
        host=address,
        port=port,
        tls=identity.server_context() if encrypted else None,
        journal=journal,
        saver=CheckpointReceiver(folder / "checkpoints", lambda path, reason: None),
        on_event=hear,
    )
    server.on_step = on_step
    return server, identity.invite(address, server.port, encrypted=encrypted), journal


def _coordinate(
    folder: str, port: int, ready: Any, fault: Fault | None, returning: int, options: dict[str, Any]
) -> None:
    try:
        if fault is not None:
            fault(Path(folder))
        place = Path(folder)
        server, invite, _ = serve(place, port=port, on_step=lambda record, *told: _tell_step(place, record), **options)
        if returning:
            server.order("pause", None)
        server.start()
        ready.send(invite.line())
        if returning:
            wait_until(lambda: len(server.core.membership.ready) >= returning, 60)
            server.order("resume", None)
        server.wait()
        server.stop()
    except BaseException:
        (Path(folder) / "coordinator.error").write_text(traceback.format_exc())
    os._exit(0)


def _tell_step(folder: Path, record: StepRecord) -> None:
    (folder / "step.new").write_text(str(record.step))
    (folder / "step.new").rename(folder / "step")


def step_of(folder: Path) -> int:
    """The last step that a coordinator in a process of its own has seen applied."""
    told = folder / "step"
    return int(told.read_text()) if told.exists() else 0


def start_coordinator(
    folder: Path, port: int = 0, fault: Fault | None = None, returning: int = 0, **options: Any
) -> tuple[Any, Invite]:
    """A coordinator in a process of its own, which can be killed and stopped. `options`: those of serve(). `returning`:
    no step begins before so many workers are back. On a busy machine the first would end the run before the second
    has come, which then looks for a host that has ended, for 20 times its patience."""
    ours, theirs = _server.Pipe(duplex=False)
    with _main_module_unnamed():
        process = _server.Process(
            target=_coordinate, args=(str(folder), port, theirs, fault, returning, options), daemon=True
        )
        process.start()
    _open.append(process)
    theirs.close()
    assert ours.poll(20), "the coordinator did not start"
    return process, Invite.parse(ours.recv())


def close_all() -> None:
    while _open:
        found = _open.pop()
        found.kill() if isinstance(found, BaseProcess) else found.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 40, tell: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about in time: {tell()}"
        time.sleep(0.01)


def check_journal(journal: Journal, steps: int, epochs: int) -> None:
    """It knows each step, and each row of each epoch was used once."""
    assert journal.steps() == list(range(1, steps + 1))
    for epoch in range(epochs):
        assert prove(journal.ranges(epoch), ROWS).holds, prove(journal.ranges(epoch), ROWS)


def check_journal_in(folder: Path, steps: int | None = None, epochs: int = EPOCHS) -> None:
    """`steps`: as many as it knows, if it is not given: windows are as many as there are."""
    journal = Journal(folder / "journal.sqlite")
    try:
        check_journal(journal, max(journal.steps()) if steps is None else steps, epochs)
    finally:
        journal.close()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """To the bit."""
    assert a.keys() == b.keys()
    for name in a:
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a[name], b[name])]
        assert a[name].dtype == b[name].dtype and torch.equal(*bits), f"{name} differs: {a[name]} and {b[name]}"
