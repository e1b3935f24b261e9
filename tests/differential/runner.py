"""A case on real ranks: what each of them did with which rows, and what the checkpoint at the end holds.

What a rank reports are the run's own decisions (who did which rows, when all agreed) and what it told of each step; the
weights are read from the files that it saved, as `potluck export` gives them.
"""

import functools
import json
import math
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import potluck
from potluck.engine.eval_weights import WeightAverage
from potluck.errors import PotluckError
from potluck.events import Decided, EpochDone, StepDone, StepSkipped
from potluck.save import checkpoint_folder
from potluck.save.checkpoint_folder import MODEL
from potluck.save.export import write_plain
from potluck.sharding.passes import UNEQUAL
from potluck.sharding.ranges import Ranges
from potluck.stages import stage_planner
from tests.differential.cases import Case, Leg
from tests.differential.data import given_data
from tests.differential.habits import KEPT, Loop, other_model, whole
from tests.differential.hosted import run_hosted
from tests.differential.models import HAS_PEFT, build, loss_of, make_data
from tests.differential.optimizers import make_optimizer, make_scheduler, make_two
from tests.differential.outcomes import Failed, Refused
from tests.ranks import PRELOADED, Outcome, _server, run_ranks, try_ranks

Told = dict[str, Any]
TIMEOUT_S = 90.0
GRACE_S = 4.0
"""After one rank has failed: others may have the better reason."""
CONSEQUENCES = ("WorkerLost", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Aborted")


def run_case(case: Case, timeout_s: float = TIMEOUT_S) -> tuple[list[list[Told]], dict[str, Tensor]]:
    """What the ranks of each leg told, and the last checkpoint's tensors. Raises Refused or Failed."""
    _start_server()
    if case.host:
        return run_hosted(case, timeout_s)
    with tempfile.TemporaryDirectory(prefix="potluck-differential-") as folder:
        told = []
        for number, leg in enumerate(case.legs):
            outcomes = try_ranks(
                leg.world, train, case, number, folder, timeout_s=_patience(leg, timeout_s), grace_s=GRACE_S
            )
            try:
                told.append(_results(outcomes, number))
            except Refused as refusal:
                refusal.told = [*told, _told_so_far(folder, number, leg)] if refusal.told is not None else None
                raise
        return told, _saved(case, Path(folder))


def _saved(case: Case, folder: Path) -> dict[str, Tensor]:
    """As `potluck export` gives it, which has no form for complex128."""
    newest = checkpoint_folder.found(folder / "saved")[0]
    if "complex" in case.model:
        with Ranges(checkpoint_folder.files_of(newest, checkpoint_folder.check(newest), MODEL)) as saved:
            saved.check_whole(str(newest))
            return {name: saved[name] for name in saved.tensors}
    write_plain(newest, folder / "plain.safetensors")
    return load_file(folder / "plain.safetensors")


def begin() -> None:
    """Prepare a process that judges many cases. Ranks are forked from one that has peft: each of them would load it for
    ten seconds."""
    torch.set_num_threads(1)
    if HAS_PEFT:
        _server.set_forkserver_preload(["peft", *PRELOADED])


@functools.cache
def _start_server() -> None:
    """Once: on a busy machine it takes longer to load torch than a case may take."""
    run_ranks(1, int, timeout_s=600)


def _patience(leg: Leg, timeout_s: float) -> float:
    return timeout_s * (4 if "compile" in leg.switches else 1)


def _results(outcomes: list[Outcome], leg: int) -> list[Told]:
    if all(outcome.kind == "fine" for outcome in outcomes):
        return [outcome.data for outcome in outcomes]
    where = f"leg {leg}, " if leg else ""
    refusals = [o.data.rsplit("Refused: ", 1)[1] for o in outcomes if o.kind == "failed" and "Refused: " in o.data]
    failures = [
        (f"{where}rank {rank}", outcome)
        for rank, outcome in enumerate(outcomes)
        if outcome.kind in ("failed", "died") and "Refused: " not in outcome.data
    ]
    causes = [(who, o) for who, o in failures if not any(word in o.data for word in CONSEQUENCES)]
    spoken = [sentence.split("|", 2) for sentence in refusals if "|WorkerLost|" not in sentence]
    if spoken and not causes:
        phase, kind, sentence = spoken[0]
        is_early = phase == "start" or sentence.strip().startswith(
            UNEQUAL[:60]
        )  # which a short last batch may be first
        if is_early and kind != "Diverged":
            raise Refused(sentence.strip())
        if phase == "acted":
            raise Refused(sentence.strip(), told=[])
        raise Failed("LATE", f"{where}{kind} while it {phase}: {sentence.strip()}")
    if causes or failures:
        who, outcome = (causes or failures)[0]
        raise Failed("CRASH", f"{who}: {outcome.data}")
    late = "\n".join(f"{where}rank {rank}: {o.data}" for rank, o in enumerate(outcomes) if o.kind != "fine")
    raise Failed("HANG", late)


def _told_so_far(folder: str, number: int, leg: Leg) -> list[Told]:
    files = [_file_so_far(folder, number, rank) for rank in range(leg.world)]
    if not all(file.exists() for file in files):
        raise Failed("LATE", "some ranks were refused what their loops did, where others had not come so far")
    return [json.loads(file.read_text()) for file in files]


def _file_so_far(folder: str, number: int, rank: int) -> Path:
    return Path(folder) / f"told-{number}-{rank}.json"


def train(case: Case, number: int, folder: str) -> Told:
    """One rank of one leg."""
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    multiprocessing.set_start_method("fork", force=True)  # as it is where no fork server started us: for fetchers
    phase = ["start"]
    try:
        return _train(case, case.legs[number], number, folder, phase)
    except PotluckError as error:
        raise Refused(f"{phase[0]}|{type(error).__name__}|{error}") from error
    except ValueError as error:  # what a dataclass of settings says, which a recipe would show as a sentence
        if phase[0] != "settings":
            raise
        raise Refused(f"start|ValueError|{error}") from error


def _train(case: Case, leg: Leg, number: int, folder: str, phase: list[str]) -> Told:
    dtype = getattr(torch, case.dtype)
    phase[0] = "settings"
    policy, strategy = _read(leg.policy), _read(leg.strategy)
    stages = _read(leg.stages, STORE=f"file://{folder}/store-{number}") if leg.stages else None
    step = _read(f"StepConfig({leg.switches + ', ' if leg.switches else ''}nonfinite_limit=1000)")
    phase[0] = "start"
    with potluck.init(
        policy, strategy, stages=stages, step=step, wire=leg.wire, patience_s=_patience(leg, 30)
    ) as fleet:
        model = build(case.model, dtype, case.seed)
        make = make_two if "turns" in case.habits else make_optimizer
        optimizer: Any = make(model, case.optimizer)
        data = make_data(case.model, case.rows, case.seed, dtype, case.samples, case.faults)

        loop = Loop(tuple(habit for habit in case.habits if habit != "ema"), model, optimizer)
        loop.before_prepare()
        delay = Delay(leg.slow, case.seed)

        def loss(model: Any, batch: Any) -> Any:
            mean, samples = loss_of(model, batch, case.scale, case.habits)
            delay.hook(mean)
            return mean if case.samples == "rows" else (mean, samples)

        options: dict[str, Any] = {"loss": loss} if stages is not None else {"micro_batch_size": leg.micro}
        options |= {"fetchers": leg.fetchers, "scheduler": make_scheduler(optimizer, case.scheduler)}
        if case.data in ("", "stream"):
            options |= {"batch_size": case.batch}
        model, optimizer, loader = fleet.prepare(model, optimizer, given_data(case, data), seed=case.seed, **options)
        fleet.loop.rows_limit = case.epochs * loader.rows if leg.until is None else None
        delay.rank = fleet.link.rank
        loop.after_prepare(model, lambda: other_model(case.model, dtype, case.seed))
        if "ema" in case.habits:  # as Trainer has it
            WeightAverage(fleet.run, KEPT)
        log = Log(fleet, loader)
        if number:
            assert fleet.load(Path(folder) / "saved"), "there is nothing to load"
        some = data[0][:3]
        while loader.position.epoch < case.epochs and not log.is_over(leg):
            for batch in loader:
                if not log.in_step:
                    loop.begin_step()
                for part, is_last in _parts(case, fleet, batch):
                    log.note(part, is_last=is_last)
                    delay("before-forward")
                    if is_last and not _is_parted(case):
                        fleet.train(loss, part)
                    else:
                        found = loss(model, part)
                        mean, samples = found if isinstance(found, tuple) else (found, len(part[0]))
                        fleet.backward(mean, samples=float(samples), last=None if is_last else False)
                delay("before-step")
                loop.before_step()
                if fleet.step() is not None:
                    if loop.begins_after(fleet.step_number):  # what can be refused only when a loop does it
                        phase[0] = "acted"
                        _file_so_far(folder, number, fleet.link.rank).write_text(json.dumps(log.told()))
                    loop.after_step(fleet.step_number, some)
                    phase[0] = "trained"
                    delay("after-step")
                if log.is_over(leg):
                    if isinstance(policy, potluck.Sync):
                        break
                    fleet.interrupt()
            log.ends.append(len(log.windows) - 1)
        first = phase[0]
        phase[0] = "saved"
        fleet.save(Path(folder) / "saved")
        fleet.wait_for_saves()
        phase[0] = "start" if first == "start" else "evaluated"  # a leg without a step uses the loss here first
        average = whole(loop.average)
        return log.told() | {"evaluated": fleet.evaluate(loss, data, case.batch), "average": average}


def _is_parted(case: Case) -> bool:
    return bool({"halves", "uneven"} & set(case.habits))


def _parts(case: Case, fleet: Any, batch: Any) -> list[tuple[Any, bool]]:
    """A batch, or parts of it where the loop accumulates by itself; and whether it is the last one."""
    count = 1
    if "halves" in case.habits:
        count = 2
    elif "uneven" in case.habits:
        count = 1 + fleet.link.rank % 3
    size = -(-len(batch[0]) // count)
    parts = [tuple(tensor[at : at + size] for tensor in batch) for at in range(0, len(batch[0]), size)]
    return [(part, number == len(parts) - 1) for number, part in enumerate(parts)]


class Delay:
    """Slows this rank by a random time, at random steps, if it is the one: only so do races show."""

    def __init__(self, word: str, seed: int) -> None:
        self.slow, self.place, most = word.split("/") if word else ("-1", "", "0")
        self.most_s, self.rank, self._draw = float(most), -2, random.Random(seed)

    def __call__(self, place: str) -> None:
        if self.place == place and self.rank == int(self.slow) and self._draw.random() < 0.6:
            time.sleep(self._draw.uniform(0.02, self.most_s))

    def hook(self, loss: Any) -> None:
        if self.place == "hook" and loss.requires_grad:
            loss.register_hook(lambda gradient: self("hook"))


def _read(word: str, **names: Any) -> Any:
    """Of Cadence and Async what a case does not name is as published: a judge cannot ask for their defaults."""
    known = {name: getattr(potluck, name) for name in potluck.__all__}
    published = {name: known[name].published for name in ("Cadence", "Async")}
    return eval(word, known | published | names)


class Log:
    """What this rank did, window by window; where all step together, a window is a step."""

    def __init__(self, fleet: Any, loader: Any) -> None:
        self.fleet, self.loader = fleet, loader
        self.windows: list[list[list[list[int]]]] = [[]]
        """Windows of steps of micro-batches of rows."""
        self.epochs: list[list[int]] = []
        """Each row that counted, with its epoch."""
        self.ends: list[int] = []
        """Windows that were done when a pass over the loader ended."""
        self.events: list[list[Any]] = []
        self.proofs: list[list[Any]] = []
        self.anchors: list[int] = []
        """Of each window; 0: all took one step."""
        self._step: list[list[int]] = []
        fleet.after_agreement.append(lambda: self.windows.append([]))
        fleet.events.listeners.append(self._hear)

    @property
    def in_step(self) -> bool:
        return bool(self._step)

    def note(self, batch: Any, *, is_last: bool) -> None:
        """`is_last`: of the parts of a micro-batch."""
        micro = self.loader.current
        rows = batch[-1].tolist() if micro.weighs else []
        if self.fleet.turn == 0:  # where optimizers take turns, each batch comes once for each of them
            self.epochs += [[self.loader.position.epoch, row] for row in rows]
        self._step.append(rows)
        if micro.last and is_last:
            self.windows[-1].append(self._step)
            self._step = []

    def is_over(self, leg: Leg) -> bool:
        return leg.until is not None and self.fleet.step_number >= leg.until

    def _hear(self, event: Any) -> None:
        if isinstance(event, StepDone):
            self.events.append([event.loss, event.grad_norm, event.samples])
        elif isinstance(event, StepSkipped):
            self.events.append([math.nan, math.nan, 0.0])
        elif isinstance(event, Decided):
            self.anchors.append(event.anchor)
        elif isinstance(event, EpochDone):
            self.proofs.append([event.used, event.total, event.same_weights])

    def _buckets(self) -> list[list[str]]:
        """What travels together."""
        replica = self.fleet.run.prepared()
        found = replica._buckets.buckets if replica._buckets is not None else []
        return [[replica.names[id(parameter)] for parameter in bucket.parameters] for bucket in found]

    def told(self) -> Told:
        made = self.fleet.run.composition
        ranks = made.stages * made.node_size
        return {
            "replica": self.fleet.link.rank // ranks if made.window is not None else 0,
            "lane": self.fleet.run.grid.pipeline,
            "windows": self.windows[:-1],
            "epochs": self.epochs,
            "ends": self.ends,
            "events": self.events,
            "proofs": self.proofs,
            "anchors": self.anchors,
            "buckets": self._buckets(),
        }
