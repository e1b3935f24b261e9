"""A run of a group from a seed: what is trained, who is slow, who is stopped and killed, and what must hold of it.

A run has several lives, each over a group of its own (group.py): one ends because somebody stops it or a rank is
killed, and the next resumes from the checkpoint, perhaps with more or fewer ranks. Round, GroupTable, their plans and
works, Loader, Replica and the checkpoints are real.
"""

import hashlib
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from potluck.agree.records import Position
from potluck.composition import Wanted
from potluck.engine.engine import Engine
from potluck.errors import Interrupted, WorkerLost
from potluck.events import EpochDone
from potluck.replica.precision import StepConfig
from tests.fleet.virtual.group import Faults, Group, Pace, Rank
from tests.fleet.virtual.group_case import Case, draw_case, draw_pace, own_rows
from tests.fleet.virtual.group_link import LOST
from tests.fleet.virtual.group_task import (
    DATA,
    PlainReplica,
    Rows,
    average_plainly,
    loss_of,
    make_model,
    make_optimizers,
    make_rows,
    rate_of,
)

MEMORY = Path("/dev/shm")
"""Where checkpoints are written, if there is such a place: a disk that syncs takes longer than all the rest."""
TOLERANCE = 1e-9
"""How far float64 may be off that is added up in another order."""


# What ranks do


@dataclass
class Done:
    """A micro-batch that was trained."""

    life: int
    rank: int
    epoch: int
    turn: int
    rows: tuple[int, ...]
    is_last: bool = True
    """Whether its batch ends with it."""


@dataclass
class Record:
    """What all lives of a run have done and agreed on. Each rank tells it; what two ranks tell must not differ."""

    done: dict[int, list[Done]] = field(default_factory=dict)
    """By the agreement that it led to."""
    agreed: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """By agreement: the weights and where the run stands."""
    resumed: list[Position] = field(default_factory=list)
    """Where each later life began."""
    proofs: list[EpochDone] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    """What evaluate(), mean() and the like gave, by life and place."""

    def train(self, version: int, done: Done) -> None:
        self.done.setdefault(version, []).append(done)

    def agree(self, who: str, version: int, state: tuple[Any, ...]) -> None:
        before = self.agreed.setdefault(version, state)
        assert before == state, f"{who} stands otherwise than another after agreement {version}: {state}, not {before}"

    def tell(self, who: str, where: str, value: Any) -> None:
        before = self.told.setdefault(where, value)
        assert before == value, f"{who} got {value} of {where}, and another {before}"

    def go_back(self, version: int) -> None:
        """The run resumes there: what came later is lost."""
        for kept in (self.done, self.agreed):
            for later in [each for each in kept if each > version]:
                del kept[later]


class Worker:
    """The script of one rank in one life."""

    def __init__(self, case: Case, life: int, rank: Rank, record: Record, folder: Path) -> None:
        self.case, self.life, self.rank, self.record, self.folder = case, life, rank, record, folder
        self.who = f"worker {rank.number} of life {life}"
        self.data = make_rows(case.rows, case.seed, case.dtype, bad=case.bad_row)
        self.looks = make_rows(7, case.seed + 1, case.dtype, bad=None)

    def __call__(self) -> dict[str, Tensor]:
        case, rank = self.case, self.rank
        wanted = Wanted(policy=case.lives[self.life].policy, world=rank.group.world, wire=case.wire)
        # A row of which no loss is finite may be in every step of a worker.
        fleet = self.fleet = Engine(rank.link, step=StepConfig(clip=case.clip, nonfinite_limit=1000), wanted=wanted)
        fleet.run.speak(False, lambda sentence: None)
        with fleet:
            loader = self._prepare()
            for calls in (fleet.after_step, fleet.after_agreement):  # there may be no step in an agreement, and many
                calls.append(self._note_agreement)
            if not case.calls_in_loop:
                fleet.after_step.append(self._call_what_is_due)
            fleet.on(EpochDone, self._on_epoch)
            rank.on_stop = fleet.request_stop
            if fleet.load(self.folder):
                self._resume()
            if loader is None:
                self._loop_over_own_rows()
            else:
                self._loop(loader)
            return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def _prepare(self) -> Any:
        """Each rank has weights of its own, and takes the first one's. Returns the loader, if there is one."""
        case, fleet = self.case, self.fleet
        model = make_model(case.model, case.seed + self.rank.number, case.dtype)
        optimizers = self.optimizers = make_optimizers(model, case.optimizer)
        scheduler = LambdaLR(optimizers, rate_of) if case.is_scheduled else None
        if case.brings_rows:
            self.model, _ = fleet.prepare(model, optimizers, scheduler=scheduler)
            loader = None
        else:
            sizes: dict[str, Any] = {"batch_size": case.batch, "micro_batch_size": case.micro, "seed": case.seed}
            data = DATA[case.data](self.data)
            self.model, _, loader = fleet.prepare(model, optimizers, data, **sizes, scheduler=scheduler)
        if case.ema:
            fleet.ema(0.9)
        return loader

    def _loop(self, loader: Any) -> None:
        case, fleet, rank = self.case, self.fleet, self.rank
        for epoch in fleet.epochs(case.epochs, self.folder):
            for x, y, numbers in loader:
                rank.compute(len(x))
                if loader.current.counts:
                    done = Done(self.life, rank.number, epoch, fleet.turn, tuple(numbers.tolist()), loader.current.last)
                    self.record.train(fleet.version + 1, done)
                fleet.backward(loss_of(self.model, x, y, fleet.turn), samples=len(x))
                if fleet.step() is not None and self._after_step():
                    break
            if not fleet.stopping:
                self._use_others(f"after epoch {epoch}, step {fleet.step_number}", case.calls)

    def _loop_over_own_rows(self) -> None:
        case, fleet, rank = self.case, self.fleet, self.rank
        while fleet.step_number < case.turns * case.epochs * 4:
            step = fleet.step_number
            rows = own_rows(case, step, rank.number, fleet.world)
            rank.compute(len(rows))
            self.record.train(fleet.version + 1, Done(self.life, rank.number, 0, fleet.turn, tuple(rows)))
            loss = loss_of(self.model, self.data[0][rows], self.data[1][rows], fleet.turn)
            fleet.backward(loss, samples=len(rows))
            assert fleet.step() is not None
            self._after_step()
            if fleet.stopping:
                fleet.save(self.folder)
                raise fleet.interrupted()

    def _after_step(self) -> bool:
        """Whether the loop leaves its pass over the loader."""
        if self.case.calls_in_loop:
            self._call_what_is_due()
        every = self.case.leaves_every
        return every > 0 and self.fleet.step_number % every == 0

    def _note_agreement(self) -> None:
        fleet = self.fleet
        at = fleet.run.progress.at
        stands = (at.step, at.epoch, at.row, at.rows_seen, at.skipped, at.turn)
        last = fleet.last_step
        loss = (last.loss, last.samples) if last is not None and last.step == at.step else None  # None: it was skipped
        self.record.agree(self.who, fleet.version, (self._hashes(), stands, loss))
        self.rank.group.note(self.rank, f"agreed on {fleet.version}: {self._hashes()} {stands} {loss}")

    def _hashes(self) -> tuple[str, str | None]:
        """The hash of the model; and of its optimizers, where all have the same."""
        optimizers = self.optimizers if isinstance(self.optimizers, list) else [self.optimizers]
        kept = [value for each in optimizers for state in each.state.values() for value in state.values()]
        numbers = [torch.as_tensor(value) for value in kept if value is not None]
        is_sync = self.case.lives[self.life].is_sync
        return hash_of([*self.model.parameters(), *self.model.buffers()]), hash_of(numbers) if is_sync else None

    def _call_what_is_due(self) -> None:
        step = self.fleet.step_number
        due = {call: every for call, every in self.case.calls.items() if every and step % every == 0}
        self._use_others(f"after step {step}", due)

    def _use_others(self, where: str, due: dict[str, int]) -> None:
        """The calls that need all ranks."""
        fleet, rank = self.fleet, self.rank.number
        place = f"life {self.life} {where}"

        def look(model: Any, batch: Rows) -> Tensor:
            return loss_of(model, batch[0], batch[1], 0)

        for call, every in due.items():
            if not every:
                continue
            self.rank.pause()
            match call:
                case "save":
                    fleet.save(self.folder)
                case "evaluate":
                    self.record.tell(self.who, f"evaluate {place}", repr(fleet.evaluate(look, self.looks, 3)))
                case "mean":
                    found = fleet.mean({"rank": float(rank)}, weight=rank + 1.0)["rank"]
                    each = range(fleet.world)
                    expected = sum(n * (n + 1.0) for n in each) / sum(n + 1.0 for n in each)
                    assert math.isclose(found, expected), f"the mean {place} is {found}, not {expected}"
                case "gather":
                    assert fleet.gather(rank) == list(range(fleet.world))
                case "state_dict":
                    assert bool(fleet.state_dict()) == (rank == 0)
                case "broadcast":
                    assert fleet.broadcast({"from": rank}, src=fleet.world - 1) == {"from": fleet.world - 1}
                case "wait_for_saves":
                    fleet.wait_for_saves()

    def _resume(self) -> None:
        """A checkpoint holds what all had agreed on."""
        fleet = self.fleet
        if self.rank.number == 0:
            self.record.go_back(fleet.version)
            self.record.resumed.append(fleet.run.progress.at)
        before = self.record.agreed.get(fleet.version)
        assert fleet.version == 0 or before is not None, f"{self.who} resumes at {fleet.version}, where nobody was"
        for own, agreed in zip(self._hashes(), before[0] if before is not None else (), strict=False):
            assert None in (own, agreed) or own == agreed, f"{self.who} resumes at {fleet.version} with other numbers"

    def _on_epoch(self, done: EpochDone) -> None:
        if self.rank.number == 0:
            self.record.proofs.append(done)


def hash_of(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# A run, and what must hold of it


@dataclass
class Lived:
    record: Record
    state: dict[str, Tensor]
    """Of the model, at the end."""
    trace: list[str]
    fired: list[str]
    lives: int


def live(case: Case, pace: Pace) -> Lived:
    """All lives of a run."""
    record, trace, fired = Record(), list[str](), list[str]()
    place = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="potluck-group-", dir=place) as folder:
        for number, life in enumerate(case.lives):
            faults = life.faults()
            paced = replace(pace, delays=f"{pace.delays} life {number}")

            def script(rank: Rank, number: int = number) -> dict[str, Tensor]:
                return Worker(case, number, rank, record, Path(folder) / "run")()

            if number and not list((Path(folder) / "run").glob("step-*")):
                record.go_back(-1)  # it begins again
            group = Group(life.world, f"processes {case.seed}", paced, faults, script)
            ranks = group.run()
            trace += group.trace
            fired += faults.fired
            is_whole = check_ends(ranks, faults)
            if is_whole:
                states = [rank.result for rank in ranks]
                check_same(states)
                return Lived(record, states[0], trace, fired, number + 1)
    raise AssertionError("the last life did not end well")


def check_ends(ranks: list[Rank], faults: Faults) -> bool:
    """Whether the run is done. Else all ranks have stopped alike, or have lost one that is gone."""
    errors = {rank.number: rank.error for rank in ranks if rank.error is not None}
    gone = [fault for fault in faults.fired if not fault.startswith("stop")]
    odd = [e for e in errors.values() if not isinstance(e, Interrupted | WorkerLost | KeyboardInterrupt)]
    if odd:
        raise odd[0]
    lost = [error for error in errors.values() if isinstance(error, WorkerLost)]
    assert gone or not lost, f"nobody is gone, and {lost[0]}"
    assert all(str(error).startswith(LOST) for error in lost), lost
    stopped = [str(error) for error in errors.values() if isinstance(error, Interrupted)]
    assert bool(stopped) <= any(fault.startswith("stop") for fault in faults.fired), stopped
    assert gone or not stopped or len(stopped) == len(ranks), f"only some ranks have stopped: {errors}"
    assert len(set(stopped)) <= 1, stopped
    return not errors and all(rank.left_well for rank in ranks)


def check_same(states: list[dict[str, Tensor]]) -> None:
    for state in states[1:]:
        for name, tensor in state.items():
            assert torch.equal(tensor, states[0][name]), f"ranks end with other numbers of {name}"


def check_rows(case: Case, lived: Lived) -> None:
    """By what loops were given, and by the run's own proofs: every row of each epoch, exactly once."""
    if case.brings_rows:
        return
    done = [each for parts in lived.record.done.values() for each in parts]
    counts = Counter((each.epoch, each.turn, row) for each in done for row in each.rows)
    places = list(itertools.product(range(case.epochs), range(case.turns), range(case.rows)))
    odd = {place: counts[place] for place in places if counts[place] != 1}
    assert not odd, f"(epoch, turn, row), and how often each was trained: {odd}"
    assert len(counts) == len(places), "rows of more epochs were trained"
    for proof in lived.record.proofs:
        assert "exactly once" in proof.sentence and proof.total == case.rows and proof.same_weights, proof.sentence
    assert lived.record.proofs[-1].epoch == case.epochs - 1, lived.record.proofs[-1].sentence


def check_numbers(case: Case, lived: Lived) -> None:
    """One process of plain PyTorch has the same weights from the same rows, and has skipped as many steps."""
    if not (case.has_judge or case.has_judge_of_windows):
        return
    rows = make_rows(case.rows, case.seed, case.dtype, bad=case.bad_row)
    model = make_model(case.model, case.seed, case.dtype)
    plain = PlainReplica(model, case.optimizer, rows, case.clip, is_scheduled=case.is_scheduled)
    done = [lived.record.done[version] for version in sorted(lived.record.done)]
    if case.has_judge:
        for parts in done:
            parts = sorted(parts, key=lambda each: each.rank)
            plain.step(parts[0].turn, [row for each in parts for row in each.rows])
        skipped = lived.record.agreed[max(lived.record.agreed)][1][4]
        assert skipped == plain.skipped, f"{skipped} steps were skipped, and one process skips {plain.skipped}"
    else:
        plain = average_plainly(plain, [(parts[0].life, _batches_of(case, parts)) for parts in done])
    off = 0.0 if case.is_exact else TOLERANCE
    for name, tensor in plain.model.state_dict().items():
        found = lived.state[name]
        assert torch.allclose(found, tensor, off, off), f"{name} is {found}, and in one process {tensor}"


def _batches_of(case: Case, done: list[Done]) -> list[list[list[int]]]:
    """The batches of each rank in a window, whatever their micro-batches."""
    batches: list[list[list[int]]] = [[] for _ in range(case.lives[done[0].life].world)]
    is_new = [True] * len(batches)
    for each in done:
        if is_new[each.rank]:
            batches[each.rank].append([])
        batches[each.rank][-1] += each.rows
        is_new[each.rank] = each.is_last
    return batches


def run_case(case: Case) -> Lived:
    """Live it, and look at all that must hold."""
    lived = live(case, draw_pace(case))
    check_rows(case, lived)
    check_numbers(case, lived)
    return lived


def simulate_group(seed: int, told: Counter[str]) -> Lived:
    """The run of a seed. What was done to it, and how much happened, is added to `told`."""
    case = draw_case(seed)
    lived = run_case(case)
    told["events"] += len(lived.trace)
    told.update(fault.split()[0] for fault in lived.fired)
    told["resume"] += lived.lives - 1
    if seed % 8 == 0:
        check_again(case, lived)
    return lived


def check_again(case: Case, lived: Lived) -> None:
    """The same seed gives the same run; and where no time is measured, other delays and no faults the same numbers."""
    again = live(case, draw_pace(case))
    odd = next((pair for pair in zip(lived.trace, again.trace, strict=False) if pair[0] != pair[1]), None)
    assert odd is None and len(lived.trace) == len(again.trace), f"the same seed gives another run: {odd}"
    check_same([lived.state, again.state])
    if case.ignores_delays:
        other = live(case, draw_pace(case, variant=1))
        assert other.record.agreed == lived.record.agreed, "numbers depend on how long things take"
        check_same([lived.state, other.state])
    if lived.lives > 1 and (whole := case.undisturbed) is not None:
        assert live(whole, draw_pace(whole)).record.agreed == lived.record.agreed, (
            "numbers depend on what befell the run"
        )
