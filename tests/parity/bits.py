"""Some 60 small runs of groups, of which tests/vectors/bits.json keeps the losses and a hash of the final state.

`python -m tests.parity.bits --write` trains all of them twice and writes the file; it refuses one that is not the same
both times. Each process has a clock of its own that only loss functions advance, by a fixed time for each row. So what
follows from measured speeds (shares, windows, their ends) is the same in every run, however busy the machine is.
"""

import argparse
import hashlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import potluck
from potluck import (
    Async,
    Auto,
    Cadence,
    CheckpointConfig,
    DataStore,
    Direct,
    FitConfig,
    FullShard,
    HybridShard,
    NoShard,
    Pipeline,
    ScheduleConfig,
    ShardGradOp,
    Stages,
    StepConfig,
    Sync,
)
from potluck.devices import kind_of
from potluck.errors import Interrupted
from potluck.events import StepDone
from potluck.save import checkpoint_folder
from potluck.save.checkpoint_folder import MODEL, OPTIMIZER
from potluck.sharding.ranges import Ranges
from tests import ranks

FILE = Path(__file__).parents[1] / "vectors" / "bits.json"
ROWS = 44
STILL = Sync(balance=False)
EVEN, UNEVEN, FAR = (4, 4, 4, 4), (4, 5, 4, 5), (4, 12, 6, 10)
"""A rank's time for a row, in 1024ths of a second: whole powers of two, so that differences of times are exact."""
STEEP = 4.0
"""A factor of a loss with which the first steps of fp16 overflow."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-6, "rounded": 2e-2}
"""By how much losses may differ on another kind of machine; `rounded`: where numbers are made shorter on the way."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    world: int = 2
    policy: Any = STILL
    strategy: Any = NoShard()
    optimizer: str = "adamw"
    model: str = "net"
    digits: str = "float64"
    step: StepConfig = StepConfig()
    wire: Any = "fp32"
    stages: Any = None
    batch: int = 12
    micro: int | None = None
    epochs: int = 2
    pace: tuple[int, ...] = UNEVEN
    stop_at: int | None = None
    """The step after which it is stopped; it is resumed in new processes, `world_after` of them."""
    world_after: int | None = None
    fit: FitConfig | None = None
    """By a Trainer instead of a loop."""
    is_stream: bool = False
    is_slow: bool = True


def quick(**settings: Any) -> Case:
    return Case(**settings, is_slow=False)


HALF = {"fp16": StepConfig(precision="fp16", clip=1.0), "bf16": StepConfig(precision="bf16", clip=1.0)}
CLIP = StepConfig(clip=0.5)
FIT = FitConfig(
    epochs=2,
    ema=0.9,
    schedule=ScheduleConfig(),
    validate_every=3,
    checkpoint=CheckpointConfig(every=3),
    progress=False,
)
SHORT, BRIEF = Cadence.published(anchor=1, max_anchor=2), Async.published(anchor=1, max_anchor=2)
PIPELINE = Stages(protocol=Pipeline(micro_batch_size=3), cuts=(2,))
STORE = DataStore(url="file://FOLDER", micro_batch_size=4)
THIRDS = FullShard(weights=(3.0, 1.0))

CASES = [
    # All step together
    quick(name="sync, one rank", world=1, optimizer="sgd", step=CLIP),
    quick(name="sync", optimizer="sgd", step=CLIP, micro=4),
    quick(name="sync, shares 3 1 2", world=3, policy=Sync(shares=(3, 1, 2)), step=CLIP),
    quick(name="sync, balanced", policy=Sync(), pace=FAR, batch=6, epochs=3),
    quick(name="sync, BatchNorm", model="norm", micro=3),
    quick(name="sync, dropout", model="drop", optimizer="sgd"),
    quick(name="sync, turns", model="gan", step=CLIP),
    quick(name="sync, Muon and AdamW", optimizer="muon", digits="rounded"),
    quick(name="sync, fp16", digits="rounded", step=HALF["fp16"], model="steep"),
    quick(name="sync, bf16", digits="rounded", step=HALF["bf16"]),
    quick(name="sync, wire int8", wire="int8", digits="rounded"),
    quick(name="sync, stopped in an epoch", stop_at=2, model="drop"),
    Case(name="sync, one rank, AdamW", world=1, micro=5),
    Case(name="sync, one rank, turns", world=1, model="gan"),
    Case(name="sync, 3 ranks", world=3, optimizer="sgd"),
    Case(name="sync, 4 ranks", world=4, micro=2, step=CLIP),
    Case(name="sync, 4 ranks, balanced", world=4, policy=Sync(), pace=FAR, batch=6, epochs=3, optimizer="sgd"),
    Case(name="sync, float32", digits="float32", step=CLIP),
    Case(name="sync, wire bf16", wire="bf16", digits="rounded", optimizer="sgd"),
    Case(name="sync, wire int4", world=3, wire="int4", digits="rounded"),
    Case(name="sync, stream", is_stream=True),
    Case(name="sync, stream, stopped in an epoch", is_stream=True, stop_at=2),
    Case(name="sync, turns, stopped between two", model="gan", stop_at=5),
    Case(name="sync, stopped on 2 ranks and resumed on 3", stop_at=5, world_after=3, optimizer="sgd"),
    quick(name="sync, trainer with EMA", fit=FIT),
    Case(name="sync, trainer with EMA, BatchNorm", fit=FIT, model="norm", world=3),
    Case(name="sync, trainer with EMA, stopped in an epoch", fit=FIT, stop_at=5),
    Case(name="sync, BatchNorm, stopped in an epoch", model="norm", stop_at=2),
    Case(name="sync, fp16, stopped in an epoch", digits="rounded", step=HALF["fp16"], model="steep", stop_at=4),
    Case(name="sync, wire int8, stopped in an epoch", wire="int8", digits="rounded", stop_at=2),
    Case(name="sync, Muon and AdamW, stopped in an epoch", optimizer="muon", digits="rounded", stop_at=2),
    # Replicas that are split
    quick(name="FullShard", strategy=FullShard(), step=CLIP),
    quick(name="ShardGradOp", strategy=ShardGradOp(), optimizer="sgd", micro=4),
    quick(name="FullShard, weights 3 1", strategy=THIRDS),
    Case(name="FullShard, 3 ranks", world=3, strategy=FullShard(), optimizer="sgd", micro=2),
    Case(
        name="FullShard, 4 ranks, balanced", world=4, strategy=FullShard(), policy=Sync(), pace=FAR, batch=6, epochs=3
    ),
    Case(name="FullShard, turns", strategy=FullShard(), model="gan", step=CLIP),
    Case(name="FullShard, Muon and AdamW", strategy=FullShard(), optimizer="muon", digits="rounded"),
    Case(name="FullShard, fp16", strategy=FullShard(), digits="rounded", step=HALF["fp16"], model="steep"),
    Case(name="FullShard, bf16", strategy=FullShard(), digits="rounded", step=HALF["bf16"]),
    Case(name="FullShard, BatchNorm", strategy=FullShard(), model="norm"),
    Case(name="FullShard, wire int8", strategy=FullShard(), wire="int8", digits="rounded"),
    Case(name="FullShard, stopped in an epoch", strategy=FullShard(), stop_at=2, world_after=3),
    Case(name="FullShard, trainer with EMA", strategy=FullShard(), fit=FIT),
    Case(name="FullShard, weights 3 1 2", world=3, strategy=FullShard(weights=(3.0, 1.0, 2.0)), optimizer="sgd"),
    Case(name="ShardGradOp, 4 ranks", world=4, strategy=ShardGradOp(), step=CLIP),
    Case(name="ShardGradOp, keeps gradients", strategy=ShardGradOp(keep_gradients=True), micro=4),
    Case(name="ShardGradOp, fp16", strategy=ShardGradOp(), digits="rounded", step=HALF["fp16"], model="steep"),
    Case(name="ShardGradOp, stopped in an epoch", strategy=ShardGradOp(), stop_at=5),
    Case(name="FullShard, weights 3 1, stopped in an epoch", strategy=THIRDS, stop_at=2),
    Case(name="HybridShard", world=4, strategy=HybridShard(intra_node_size=2), step=CLIP),
    # Replicas that step by themselves
    quick(name="cadence", policy=SHORT, optimizer="sgd", step=CLIP, pace=FAR),
    quick(name="cadence, from together on", policy=Cadence(anchor=2), pace=FAR),
    quick(name="async", policy=BRIEF, step=CLIP),
    quick(name="cadence, stopped in an epoch", policy=SHORT, stop_at=1, pace=FAR),
    quick(name="cadence, wire int4", policy=SHORT, wire="int4", digits="rounded"),
    Case(name="auto", policy=Auto(anchor=2), world=3, pace=FAR),
    Case(name="cadence, one rank", policy=SHORT, world=1),
    Case(name="cadence, 3 ranks, moments", policy=Cadence(anchor=2, together=0.0), world=3, pace=FAR),
    Case(name="cadence, 4 ranks, BatchNorm", policy=SHORT, world=4, model="norm"),
    Case(name="cadence, dropout", policy=SHORT, model="drop", pace=FAR),
    Case(name="cadence, turns", policy=SHORT, model="gan"),
    Case(name="cadence, Muon and AdamW", policy=SHORT, optimizer="muon", digits="rounded"),
    Case(name="cadence, fp16", policy=SHORT, digits="rounded", step=HALF["fp16"], model="steep"),
    Case(name="cadence, bf16", policy=SHORT, digits="rounded", step=HALF["bf16"]),
    Case(name="cadence, wire int8, moments", policy=Cadence(anchor=2), wire="int8", digits="rounded"),
    Case(name="cadence, stream", policy=SHORT, is_stream=True, pace=FAR),
    Case(name="cadence, trainer with EMA", policy=SHORT, fit=FIT),
    Case(name="cadence, HybridShard", world=4, policy=SHORT, strategy=HybridShard(intra_node_size=2), step=CLIP),
    Case(name="async, 3 ranks", policy=BRIEF, world=3, optimizer="sgd", micro=2),
    Case(name="async, wire bf16", policy=BRIEF, wire="bf16", digits="rounded"),
    Case(name="async, stopped in an epoch", policy=BRIEF, stop_at=1, world_after=3),
    Case(name="cadence, moments, stopped in an epoch", policy=Cadence(anchor=2, together=0.0), batch=6, stop_at=1),
    Case(name="cadence, stream, stopped in an epoch", policy=SHORT, is_stream=True, stop_at=1, pace=FAR),
    # Stages
    quick(name="stages, Pipeline", stages=PIPELINE, step=CLIP),
    quick(name="stages, Direct", stages=Stages(protocol=Direct(), cuts=(2,)), model="drop"),
    Case(
        name="stages, zero-bubble, 3 ranks",
        world=3,
        stages=Stages(protocol=Pipeline(micro_batch_size=2, schedule="zero-bubble"), cuts=(1, 3)),
    ),
    Case(
        name="stages, 2 pipelines",
        world=4,
        stages=Stages(protocol=Pipeline(micro_batch_size=3), count=2, cuts=(2,)),
        pace=EVEN,
        step=CLIP,
    ),
    quick(name="stages, DataStore", stages=Stages(protocol=STORE, cuts=(2,)), optimizer="sgd"),
    Case(name="stages, fp16", stages=PIPELINE, digits="rounded", step=HALF["fp16"], model="steep"),
    Case(name="stages, stopped in an epoch", stages=PIPELINE, stop_at=2),
    Case(
        name="cadence, stages",
        world=4,
        policy=SHORT,
        stages=Stages(protocol=Pipeline(micro_batch_size=3), count=2, cuts=(2,)),
    ),
]


# What is trained


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        self.blocks = nn.ModuleList(Block(0.2 if kind == "drop" else 0.0) for _ in range(3))
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)  # type: ignore[no-any-return]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
        self.forger = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor, y: Tensor, turn: int) -> Tensor:
        found = self.judge(self.forger(x))
        return F.softplus(found).mean() + F.softplus(-self.judge(y)).mean() if turn == 0 else F.softplus(-found).mean()


def build(case: Case) -> tuple[nn.Module, Any]:
    draw = torch.Generator().manual_seed(3)
    model: nn.Module = Gan() if case.model == "gan" else Net(case.model)
    model.to(_dtype(case))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_drawn(parameter.shape, draw) * (0.75 if parameter.dim() == 1 else 0.375))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    if isinstance(model, Gan):
        judge = torch.optim.SGD(model.judge.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
        return model, [judge, torch.optim.AdamW(model.forger.parameters(), lr=0.02)]
    if case.optimizer == "muon":
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() != 2]
        muon = torch.optim.Muon(matrices, lr=0.01)
        return model, potluck.JointOptimizer(muon, torch.optim.AdamW(vectors, lr=0.01))
    if case.optimizer == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _dtype(case: Case) -> torch.dtype:
    return torch.float64 if case.digits == "float64" else torch.float32


def rows_of(case: Case) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(11)
    return tuple(2 * _drawn((ROWS, width), draw).to(_dtype(case)) for width in (5, 3))  # type: ignore[return-value]


def _drawn(shape: Sequence[int], draw: torch.Generator) -> Tensor:
    """From -1 to 1, the same bits on every machine."""
    return torch.randint(-1024, 1025, tuple(shape), generator=draw).double() / 1024


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, rows: tuple[Tensor, Tensor]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(list(zip(*self.rows, strict=True)))


class Clock:
    """A worker's time, which only its loss functions advance."""

    def __init__(self, row_s: float) -> None:
        self.now, self.row_s = 0.0, row_s
        time.perf_counter = lambda: self.now

    def advance(self, rows: int) -> None:
        self.now += rows * self.row_s


def train(case: Case, folder: str, is_again: bool) -> list[float]:
    """The loss of each step. The state at its end is saved below folder/end; in folder/run if it was stopped."""
    clock = Clock(case.pace[int(os.environ["RANK"])] / 1024)
    losses: list[float] = []
    stages = _in_folder(case.stages, folder)
    with potluck.init(
        case.policy, case.strategy, stages=stages, step=case.step, wire=case.wire, patience_s=60
    ) as fleet:
        model, optimizer = build(case)
        fleet.on(StepDone, lambda event: losses.append(event.loss))

        def loss_of(model: Any, batch: Any) -> Tensor:
            x, y = batch
            clock.advance(len(x))
            if case.model == "gan":
                return model(x, y, fleet.turn)  # type: ignore[no-any-return]
            return F.mse_loss(model(x), y) * (STEEP if case.model == "steep" else 1.0)

        if case.fit is not None:
            data = rows_of(case)
            trainer = potluck.Trainer(
                model,
                optimizer,
                data,
                loss=loss_of,
                batch_size=case.batch,
                folder=f"{folder}/run",
                validation=data,
                engine=fleet,
                config=case.fit,
            )
            if case.stop_at is not None and not is_again:
                fleet.after_step.append(lambda: fleet.request_stop() if fleet.step_number == case.stop_at else None)
            with suppress(Interrupted):
                trainer.fit(resume=is_again)
        else:
            _loop(case, fleet, model, optimizer, loss_of, f"{folder}/run", is_again=is_again)
        fleet.save(f"{folder}/end")
        fleet.wait_for_saves()
    return losses


def _in_folder(stages: Any, folder: str) -> Any:
    if stages is None or stages.store is None:
        return stages
    url = stages.protocol.url.replace("FOLDER", f"{folder}/store")
    store = DataStore(url=url, micro_batch_size=stages.protocol.micro_batch_size)
    return Stages(protocol=store, cuts=stages.cuts)


def _loop(
    case: Case,
    fleet: Any,
    model: nn.Module,
    optimizer: Any,
    loss_of: Callable[..., Tensor],
    folder: str,
    *,
    is_again: bool,
) -> None:
    data: Any = Stream(rows_of(case)) if case.is_stream else rows_of(case)
    loss = loss_of if case.stages is not None else None
    sizes = {"batch_size": case.batch, "micro_batch_size": case.micro}
    model, _, loader = fleet.prepare(model, optimizer, data, **sizes, loss=loss)
    if is_again:
        assert fleet.load(folder)
    stop_at = None if is_again else case.stop_at
    try:
        for _ in fleet.epochs(case.epochs, folder):
            for batch in loader:
                if case.stages is not None:
                    fleet.train(loss_of, batch)
                else:
                    fleet.backward(loss_of(model, batch), samples=len(batch[0]))
                fleet.step()
                if stop_at is not None and case.model == "gan" and fleet.step_number == stop_at:
                    fleet.save(folder)  # a stop would wait for the batch's last turn
                    return
                if stop_at is not None and fleet.step_number >= stop_at:
                    fleet.request_stop()
    except Interrupted:
        assert stop_at is not None


# What is kept of it


@dataclass(frozen=True)
class Found:
    losses: list[float | None]
    """None: of a window in which every step overflowed."""
    digest: str


def found_in(case: Case) -> Found:
    with tempfile.TemporaryDirectory(prefix="potluck-bits-") as folder:
        losses = ranks.run_ranks(case.world, train, case, folder, False)[0]
        if case.stop_at is not None:
            losses += ranks.run_ranks(case.world_after or case.world, train, case, folder, True)[0]
        return Found([None if math.isnan(loss) else loss for loss in losses], digest_of(Path(folder) / "end"))


def digest_of(folder: Path) -> str:
    """Of all numbers of the newest checkpoint, weights and optimizer state, by name: however they were split."""
    place = checkpoint_folder.found(folder)[0]
    body = checkpoint_folder.check(place)
    digest = hashlib.sha256()
    for stem in (MODEL, OPTIMIZER):
        with Ranges(checkpoint_folder.files_of(place, body, stem)) as files:
            for name in sorted(files.tensors):
                tensor = files.tensor(name)
                digest.update(f"{stem} {name} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()[:24]


def kind_of_this_machine() -> str:
    """All that decides bits: the processor, the instructions that torch uses of it, one thread, and torch's version."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kind = f"{kind_of(torch.device('cpu'))}, {torch.backends.cpu.get_cpu_capability()}"
    torch.set_num_threads(threads)
    return kind


def read() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return kept


def write(names: list[str]) -> int:
    """Trains each case twice, and keeps it if both are the same. Other kinds of machine keep their hashes if losses
    are what they were."""
    kept = read() if FILE.exists() else {"losses": {}, "bits": {}}
    kind, bad = kind_of_this_machine(), []
    known = {case.name for case in CASES}
    losses = {name: each for name, each in kept["losses"].items() if name in known}
    bits = {kind: {name: each for name, each in of.items() if name in known} for kind, of in kept["bits"].items()}
    for case in CASES:
        if names and not any(part in case.name for part in names):
            continue
        started = time.monotonic()
        try:
            found, again = found_in(case), found_in(case)
        except AssertionError as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            bad.append(case.name)
            continue
        print(f"{case.name}: {found.digest}, {len(found.losses)} losses, {(time.monotonic() - started) / 2:.1f} s")
        if found != again:
            print(f"  is not the same twice: {again.digest}\n  {found.losses}\n  {again.losses}", file=sys.stderr)
            bad.append(case.name)
            continue
        if losses.get(case.name) is None or bits.get(kind, {}).get(case.name, found.digest) != found.digest:
            losses[case.name] = found.losses
            for of in bits.values():
                of.pop(case.name, None)  # of another kind: they were of the losses before
        bits.setdefault(kind, {})[case.name] = found.digest
    FILE.write_text(_text({"losses": losses, "bits": bits}), encoding="utf-8")
    print(f"Wrote {FILE} for {kind}." + f" Not kept: {', '.join(bad)}." * bool(bad))
    return int(bool(bad))


def _text(kept: dict[str, Any]) -> str:
    """One case in a line, in the order of the cases."""
    order = {case.name: number for number, case in enumerate(CASES)}

    def lines(of: dict[str, Any], indent: str) -> str:
        each = [f"{indent}{json.dumps(name)}: {json.dumps(of[name])}" for name in sorted(of, key=order.__getitem__)]
        return ",\n".join(each)

    bits = ",\n".join(f"  {json.dumps(k)}: {{\n{lines(of, '   ')}\n  }}" for k, of in sorted(kept["bits"].items()))
    return f'{{\n "bits": {{\n{bits}\n }},\n "losses": {{\n{lines(kept["losses"], "  ")}\n }}\n}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help="train all cases, and write the file")
    parser.add_argument("names", nargs="*", help="only cases whose name contains one of these")
    return write(parser.parse_args().names)


if __name__ == "__main__":
    from tests.parity import bits  # the ranks find functions by this name

    sys.exit(bits.main())
