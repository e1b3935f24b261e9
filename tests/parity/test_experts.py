"""Ranks that use different parameters in a step, under every strategy that splits them, against one plain process.

Rows say themselves which experts they go to, so that in most steps ranks run different ones, and some run nowhere.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import FullShard, HybridShard, ShardGradOp, StepConfig, Sync
from potluck.data.rows import mix
from potluck.engine.engine import Engine
from potluck.link.link import connect
from tests.gathered import gathered, home, sharded_of
from tests.quick import first_of
from tests.ranks import run_ranks

WIDTH, ROWS, BATCH = 6, 34, 8
CPU = torch.device("cpu")


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.wide(x)))


class Mixture(nn.Module):
    """Each row goes to the expert of its class. The last one is in nobody's way; one is frozen."""

    def __init__(self, sizes: tuple[int, ...] = (3, 5, 4, 2, 3)) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(size) for size in sizes)
        self.experts[1].back.requires_grad_(False)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        parts = torch.zeros_like(x)
        for number in self.order(kinds):
            rows = kinds == number
            parts[rows] = self.experts[number](x[rows])
        return x + parts

    def order(self, kinds: Tensor) -> list[int]:
        return sorted(set(kinds.tolist()))


class AsTheyCome(Mixture):
    """Experts run in the order in which the rows name them."""

    def order(self, kinds: Tensor) -> list[int]:
        return list(dict.fromkeys(kinds.tolist()))


class Experts(nn.Module):
    """The experts are the model's only repeated layers."""

    def __init__(self, mixture: type[Mixture] = Mixture) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = mixture()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        x = self.mixture(self.first(x), kinds)
        if 0 not in kinds:
            return x
        return x + self.bias * (kinds == 0).unsqueeze(1)  # a parameter of the root that not every rank uses


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture((3, 2, 4, 5, 1))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        return self.mixture(self.norm(x), kinds)


class Nested(nn.Module):
    """Experts within blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, (kinds + number) % 4)
        return x


class Early(nn.Module):
    """Layers are left out, used twice, and the forward returns early, as the first row says.

    What a row does depends on the rows beside it, so that one process has to compute each rank's rows apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Expert(4) for _ in range(5))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        x, first = self.first(x), int(kinds[0])
        for number, layer in enumerate(self.layers):
            if number == first:
                continue
            x = x + layer(x)
            if number == 1 and first == 3:
                x = x + layer(x)
            if number == 2 and first == 2:
                return x
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "as they come": lambda: Experts(AsTheyCome),
    "nested": Nested,
    "early": Early,
}


def make(name: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = MODELS[name]().double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "plain":
        return model, torch.optim.SGD(trained, lr=0.05)
    if kind == "sgd":
        return model, torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.1)
    return model, torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)


def data() -> Tensor:
    draw = torch.Generator().manual_seed(2)
    kinds = torch.randint(0, 4, (ROWS, 1), generator=draw).double()
    return torch.cat([torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64), kinds], 1)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    x, kinds = rows[:, :WIDTH], rows[:, WIDTH].long()
    return (model(x, kinds) - torch.roll(x, 1, 1)).square().sum(1).mean()


def judge(name: str, kind: str, parts: Callable[[int], list[int]], clip: float | None) -> dict[str, Any]:
    """`parts`: how many rows of a step each backward of each rank has."""
    model, optimizer = make(name, kind)
    losses = []
    for epoch in range(2):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch)))
        for rows in data()[order].split(BATCH):
            optimizer.zero_grad()
            pieces = [piece for piece in rows.split(parts(len(rows))) if len(piece)]
            loss = sum(loss_of(model, piece) * len(piece) for piece in pieces) / len(rows)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    stepped = {name: float(state["step"]) for name, state in states.items() if "step" in state}
    return {"losses": losses, "weights": model.state_dict(), "stepped": stepped}


def train(link: Any, strategy: Any, name: str, kind: str, step: StepConfig, micro: int | None) -> dict[str, Any]:
    engine = Engine(link, CPU, policy=Sync(balance=False), strategy=strategy, step=step)
    model, optimizer = make(name, kind)
    model, optimizer, loader = engine.prepare(model, optimizer, data(), batch_size=BATCH, micro_batch_size=micro)
    losses = []
    for _ in engine.epochs(2):
        for batch in loader:
            engine.backward(loss_of(model, batch), samples=len(batch))
            event = engine.step()
            if event is not None:
                losses.append(event.loss)
    return {"losses": losses, "weights": weights(engine), "stepped": stepped(engine)}


def stepped(engine: Engine) -> dict[str, float]:
    """How often the optimizer has stepped what this rank owns of each parameter."""
    found = {}
    for run in sharded_of(engine).runs:
        state = sharded_of(engine).optimizer.state.get(run.parameter, {})
        found |= {run.span.name: float(state["step"])} if "step" in state else {}
    return found


def weights(engine: Engine) -> dict[str, Tensor]:
    """As one process has them, put together from all ranks' runs."""
    found = {}
    sharded = sharded_of(engine)
    for name, spec in sharded.split.items():
        whole = torch.zeros(spec.shape, dtype=torch.float64).view(-1)
        for run in (*sharded.runs, *sharded.rest):
            if run.span.name == name:
                whole[run.span.start : run.span.end] = run.parameter.detach().view(-1)
        sharded.collectives.start_sum(whole).wait()
        found[name] = whole.view(spec.shape)
    return found


def ranks_train(strategy: Any, cases: list[tuple[str, str, StepConfig, int | None]]) -> list[dict[str, Any]]:
    link = connect(CPU, 30)
    return [train(link, strategy, *case) for case in cases]


CASES: list[tuple[str, str, StepConfig, int | None]] = [
    ("experts", "sgd", StepConfig(clip=0.05), 2),
    ("experts", "adamw", StepConfig(offload_optimizer=True), None),
    ("as they come", "adamw", StepConfig(checkpoint_activations=True), None),
    ("nested", "adamw", StepConfig(checkpoint_activations=True), 2),
    ("early", "adamw", StepConfig(), None),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategy", "cases"),
    first_of(
        [(2, FullShard(weights=(3.0, 1.0)), CASES), (4, HybridShard(intra_node_size=2), CASES), (2, FullShard(), CASES)]
    ),
    ids=["uneven", "hybrid", "full"],
)
def test_ranks_that_use_different_experts_train_as_one_process(world: int, strategy: Any, cases: Any) -> None:
    told = run_ranks(world, ranks_train, strategy, cases)

    def parts(name: str, rows: int) -> list[int]:
        return (
            [rows * (rank + 1) // world - rows * rank // world for rank in range(world)] if name == "early" else [rows]
        )

    for number, (name, kind, step, _) in enumerate(cases):
        expected = judge(name, kind, partial(parts, name), step.clip)
        for rank in range(world):
            check_same(told[rank][number], expected, f"case {number} on rank {rank}", step.clip)


def check_same(got: dict[str, Any], expected: dict[str, Any], where: str, clip: float | None = None) -> None:
    torch.testing.assert_close(got["losses"], expected["losses"], rtol=1e-6, atol=0, msg=lambda m: f"{where}: {m}")
    rtol, atol = (1e-9, 1e-12) if clip is None else (1e-6, 1e-7)  # the norm is rounded to 32 bits
    for name, value in expected["weights"].items():
        told = got["weights"][name]
        assert torch.allclose(told, value, rtol, atol), f"{where}, {name}: {(told - value).abs().max()}"
    for name, count in got["stepped"].items():
        assert count == expected["stepped"].get(name), f"{where}, {name}"


def ranks_save_and_resume(folder: str) -> dict[str, Any]:
    """One epoch, saved, and the second one by another engine."""
    link = connect(CPU, 30)
    losses = []
    for epochs in (1, 2):
        engine = Engine(link, CPU, policy=Sync(balance=False), strategy=FullShard())
        model, _, loader = engine.prepare(*make("experts", "adamw"), data(), batch_size=BATCH)
        assert engine.load(folder) == (epochs == 2)
        for _ in engine.epochs(epochs):
            for batch in loader:
                engine.backward(loss_of(model, batch), samples=len(batch))
                losses.append(engine.step().loss)
        engine.save(folder)
        engine.wait_for_saves()
    return {"losses": losses, "weights": weights(engine), "stepped": stepped(engine)}


def ranks_by_hand(rows: Tensor) -> dict[str, Any]:
    """A loop of one's own, which announces no backward."""
    link = connect(CPU, 30)
    model, optimizer = make("as they come", "adamw")
    sharded = potluck.shard(model, optimizer, FullShard())
    for batch in rows.to(home()).split(4):
        loss_of(model, batch[2 * link.rank : 2 * link.rank + 2]).backward()
        sharded.step()
        sharded.share()
    return {name: gathered(parameter) for name, parameter in model.named_parameters()}


def test_a_run_of_experts_is_saved_and_resumed(tmp_path: Path) -> None:
    for told in run_ranks(2, ranks_save_and_resume, str(tmp_path)):
        check_same(told, judge("experts", "adamw", lambda rows: [rows], None), "resumed")


def test_a_loop_of_ones_own_may_lead_ranks_to_different_experts() -> None:
    rows = data()[:32]
    told = run_ranks(2, ranks_by_hand, rows)
    model, optimizer = make("as they come", "adamw")
    for batch in rows.split(4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(told[1][name], value, rtol=1e-9, atol=1e-12)


# A worker without rows, and micro-batches without samples


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - torch.roll(x, 1, 1)).square().mean()


def make_normed() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Normed().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def normed_rows(world: int) -> Tensor:
    """Two steps in which all but the last rank have two rows each, and one in which it alone has any."""
    return torch.randn(2 * 10 * world + 2, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def weighted_loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, float]:
    """A mean over the rows that count, as one writes it: over none of them it is 0 / 0."""
    counts = rows[:, WIDTH] != 1  # those of one class do not
    x, kinds = rows[:, :WIDTH], rows[:, WIDTH].long()
    each = (model(x, kinds) - torch.roll(x, 1, 1)).square().sum(1)
    return (each * counts).sum() / counts.sum(), float(counts.sum())


def ranks_without(strategy: Any) -> dict[str, Any]:
    link = connect(CPU, 30)
    shares = (1.0,) * (link.world - 1) + (4.0 * link.world + 1,)
    engine = Engine(link, CPU, policy=Sync(shares=shares), strategy=strategy)
    rows = normed_rows(link.world)
    model, _, loader = engine.prepare(*make_normed(), rows, batch_size=10 * link.world)
    parts = []
    for batch in loader:
        assert loader.current is not None
        parts.append(len(batch) if loader.current.counts else 0)
        engine.backward(squares(model, batch), samples=len(batch))
        engine.step()
    normed = weights(engine) | {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine = Engine(link, CPU, policy=Sync(balance=False), strategy=strategy)
    model, _, loader = engine.prepare(*make("experts", "plain"), data(), batch_size=BATCH, micro_batch_size=1)
    empty = 0
    for batch in loader:
        loss, samples = weighted_loss(model, batch)
        empty += bool(loss.isnan())
        engine.backward(loss, samples=samples)
        engine.step()
    return {"parts": parts, "normed": normed, "weighted": weights(engine), "empty": empty, "skipped": engine.skipped}


@pytest.mark.parametrize(
    ("world", "strategy"),
    first_of(
        [
            (2, FullShard()),
            (2, ShardGradOp()),
            (2, ShardGradOp(keep_gradients=True)),
            (2, FullShard(weights=(1.0, 3.0))),
            (4, HybridShard(intra_node_size=2)),
        ]
    ),
    ids=["full", "zero2", "zero1", "uneven", "hybrid"],
)
def test_what_has_no_samples_has_no_gradient_and_leaves_no_trace_in_buffers(world: int, strategy: Any) -> None:
    told = run_ranks(world, ranks_without, strategy)
    assert all(sum(rank["parts"]) == 4 for rank in told[:-1])  # and none in the last step
    assert all(rank["skipped"] == 0 for rank in told) and any(rank["empty"] for rank in told)
    normed = judge_normed(world)
    weighted, optimizer = make("experts", "plain")
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, 0)))
    for rows in data()[order].split(BATCH):
        optimizer.zero_grad()
        weighted_loss(weighted, rows)[0].backward()
        optimizer.step()
    for rank in told:
        for name, value in normed.items():
            torch.testing.assert_close(rank["normed"][name], value, rtol=1e-9, atol=1e-12)
        for name, value in rank["weighted"].items():
            torch.testing.assert_close(value, weighted.state_dict()[name], rtol=1e-9, atol=1e-12)


def judge_normed(world: int) -> dict[str, Tensor]:
    """Each rank normalises its own rows, and what they changed in the running statistics is averaged by rows."""
    model, optimizer = make_normed()
    order = torch.randperm(20 * world + 2, generator=torch.Generator().manual_seed(mix(0, 0)))
    running = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for rows in normed_rows(world)[order].split(10 * world):
        sizes = [2] * (world - 1) + [len(rows) - 2 * (world - 1)] if len(rows) > 2 else [2]
        before, change = [buffer.clone() for buffer in running], [torch.zeros_like(buffer) for buffer in running]
        optimizer.zero_grad()
        for part in rows.split(sizes):
            (squares(model, part) * len(part) / len(rows)).backward()
            for buffer, was, total in zip(running, before, change, strict=True):
                total.add_(buffer - was, alpha=len(part) / len(rows))
                buffer.copy_(was)
        for buffer, total in zip(running, change, strict=True):
            buffer.add_(total)
        optimizer.step()
    return {name: value for name, value in model.state_dict().items() if "num_batches" not in name}
