"""Every sharding strategy over real ranks, against plain PyTorch in one process, and against fully_shard used bare."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import potluck
from bench.shard_memory import held_bytes
from potluck import FullShard, HybridShard, NoShard, ShardGradOp, StepConfig, Sync
from potluck.data.rows import mix
from potluck.errors import ConfigError
from potluck.events import EpochDone, StepSkipped
from potluck.link.link import connect
from potluck.replica.replica import Replica
from potluck.sharding import collectives, runs
from tests.gathered import gathered, sharded_of
from tests.quick import first_of
from tests.ranks import run_ranks

STEPS, BATCH, ROWS = 10, 6, 58
STRATEGIES: dict[str, Any] = {
    "full": FullShard(),
    "zero2": ShardGradOp(),
    "zero1": ShardGradOp(keep_gradients=True),
    "uneven": ShardGradOp(weights=(3.0, 1.0, 2.0, 5.0)),
    "hybrid": HybridShard(intra_node_size=2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(13, 7)
        self.outer = nn.Linear(7, 13, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, statistics, and rows fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(13, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)) * self.scale.mean()


def make(kind: str = "adamw") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    if kind.endswith("sgd"):
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=kind != "sgd")
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=kind == "fused")


def data(device: Any = "cpu") -> Tensor:
    return torch.randint(0, 11, (ROWS, 2), generator=torch.Generator().manual_seed(5)).to(device)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, 0]), rows[:, 1])


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Parameters as one process has them, gathered if they are split."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = gathered(parameter)
    return found


def ours(strategy: Any, kind: str, step: StepConfig, micro: int | None = None, delayed: bool = False) -> dict[str, Any]:
    if delayed:
        _delay_collectives()
    with potluck.init(Sync(balance=False), strategy, step=step) as fleet:
        model, optimizer = make(kind)
        if fleet.rank:  # whatever another rank starts from
            with torch.no_grad():
                model.scale.mul_(2)
        events: list[Any] = []
        fleet.events.listeners.append(events.append)
        model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, micro_batch_size=micro)
        losses = []
        for batch in loader:
            loss = loss_of(model, batch)
            fleet.backward(loss, samples=len(batch))
            if (event := fleet.step()) is not None:
                losses.append(event.loss)
        held = fleet.evaluate(lambda m, b: loss_of(m, b), data()[:5], 4)
        ended = [e.sentence for e in events if isinstance(e, EpochDone)]
        return {"weights": whole(model), "losses": losses, "held": held, "ended": ended}


def one_process(kind: str, clip: float | None = None) -> dict[str, Any]:
    model, optimizer = make(kind)
    draw = torch.Generator()
    order = torch.randperm(ROWS, generator=draw.manual_seed(mix(0, 0)))
    losses = []
    for batch in data()[order].split(BATCH):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held = loss_of(model, data()[:5]).item()
    return {"weights": whole(model), "losses": losses, "held": held}


def _delay_collectives() -> None:
    """Each rank's pieces of work arrive late, and not in the order in which they began."""
    start = collectives.Collectives._start

    class Late:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            time.sleep(0.0005 * (1 + dist.get_rank()))
            self._work.wait()

    collectives.Collectives._start = lambda *given, **options: Late(start(*given, **options))  # type: ignore[method-assign]


def assert_same(found: dict[str, Any], judge: dict[str, Any], what: str, atol: float = 2e-6) -> None:
    """Sums over ranks round differently from one sum over the batch, by about 1e-7 of a gradient; AdamW turns that
    into at most as much of its step of 1e-2, in each of ten steps."""
    assert found["losses"] == pytest.approx(judge["losses"], abs=1e-5), what
    assert found["held"] == pytest.approx(judge["held"], abs=1e-5), what
    assert found["weights"].keys() == judge["weights"].keys()
    for name, value in judge["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, atol=atol, rtol=1e-4, msg=f"{what}: {name} differs")


@pytest.mark.parametrize(
    ("name", "world", "kind"),
    first_of(
        [
            ("full", 1, "adamw"),
            ("full", 2, "fused"),
            ("full", 3, "adamw"),
            ("full", 4, "sgd"),
            ("zero2", 1, "fused"),
            ("zero2", 2, "adamw"),
            ("zero2", 4, "fused"),
            ("zero1", 3, "fused"),
            ("uneven", 4, "adamw"),
            ("hybrid", 4, "fused"),
            ("hybrid", 2, "sgd"),
        ]
    ),
)
def test_ten_steps_are_those_of_one_process(name: str, world: int, kind: str) -> None:
    """58 rows in batches of 6: the last step has 4, so that under FullShard no rank is without rows; see below."""
    for found in run_ranks(world, ours, STRATEGIES[name], kind, StepConfig(clip=0.5)):
        assert_same(found, one_process(kind, clip=0.5), f"{name} on {world}", atol=5e-5 if kind != "sgd" else 2e-6)
        assert "all workers hold the same weights" in found["ended"][0] or world == 1


@pytest.mark.parametrize("name", first_of(["full", "zero2", "zero1", "hybrid"]))
def test_micro_batches_and_late_collectives_change_nothing(name: str) -> None:
    """Two rows to a micro-batch: parts of 2, 2, 1 and 1 rows on 4 ranks, so that some take part with a row that does
    not count."""
    judge = one_process("sgd")
    for found in run_ranks(4, ours, STRATEGIES[name], "sgd", StepConfig(), 1, True):
        assert_same(found, judge, name)


def bare(intra: int | None) -> dict[str, Any]:
    """fully_shard as one writes it, on the same shares of each batch."""
    connect(torch.device("cpu"), 60)
    world, rank = dist.get_world_size(), dist.get_rank()
    shape = (world,) if intra is None else (world // intra, intra)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "ranks")[-len(shape) :])
    model, _ = make()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for batch in data()[:48].split(8):
        loss_of(model, batch.chunk(world)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def sharded(strategy: Any) -> dict[str, Any]:
    connect(torch.device("cpu"), 60)
    world, rank = dist.get_world_size(), dist.get_rank()
    model, _ = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    split = potluck.shard(model, optimizer, strategy)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(strategy, ShardGradOp):
        model.to(device)
    for batch in data(device)[:48].split(8):
        split.arm(last=True)
        loss_of(model, batch.chunk(world)[rank]).backward()
        split.step()
        split.share()
    return whole(model)


@pytest.mark.parametrize(("strategy", "intra"), first_of([(FullShard(), None), (HybridShard(intra_node_size=2), 2)]))
def test_fully_shard_used_bare_gives_the_same(strategy: Any, intra: int | None) -> None:
    judge = run_ranks(4, bare, intra)[0]
    for found in run_ranks(4, sharded, strategy):
        for name, value in judge.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


def skipping(strategy: Any) -> dict[str, Any]:
    with potluck.init(strategy=strategy) as fleet:
        model, optimizer = make("sgd")
        fleet.prepare(model, optimizer)
        before = whole(model)
        bad = loss_of(model, data(fleet.device)[:3]) * (float("nan") if fleet.rank == 1 else 1.0)
        fleet.backward(bad, samples=3)
        event = fleet.step()
        same = all(torch.equal(value, before[name]) for name, value in whole(model).items())
        fleet.backward(loss_of(model, data(fleet.device)[:3]), samples=3)
        fleet.step()
        return {"skipped": isinstance(event, StepSkipped), "same": same, "weights": whole(model)}


@pytest.mark.parametrize("name", first_of(["full", "zero2", "zero1"]))
def test_a_step_that_is_not_finite_is_skipped_by_all_and_leaves_no_trace(name: str) -> None:
    model, optimizer = make("sgd")
    loss_of(model, data()[:3]).backward()
    optimizer.step()
    for found in run_ranks(2, skipping, STRATEGIES[name]):
        assert found["skipped"] and found["same"]
        for key, value in whole(model).items():
            torch.testing.assert_close(found["weights"][key], value, atol=1e-6, rtol=1e-5)


def stepped_ahead(strategy: Any, kind: str) -> dict[str, Any]:
    """As one rank on a GPU steps: what decides whether to step stays where the gradient is. Step 1 and 4 are bad."""

    def begun(replica: Replica) -> bool:
        return all(runs._has_begun(replica.optimizer, group) for group in replica.optimizer.param_groups)

    Replica.runs_ahead = property(begun)  # type: ignore[assignment,method-assign]
    with potluck.init(Sync(balance=False), strategy, step=StepConfig(clip=0.5)) as fleet:
        model, optimizer = make(kind)
        model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH)
        told = []
        for number, batch in enumerate(loader):
            loss = loss_of(model, batch) * (float("nan") if number in (0, 3) else 1.0)
            fleet.backward(loss, samples=len(batch))
            told.append(type(fleet.step()).__name__)
        return {"weights": whole(model), "told": told}


@pytest.mark.parametrize("kind", first_of(["fused", "fused sgd"]))
@pytest.mark.parametrize("name", first_of(["none", "full", "zero2"]))
def test_a_verdict_that_is_reached_where_the_gradient_is_is_the_same(name: str, kind: str) -> None:
    model, optimizer = make(kind)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, 0)))
    for number, batch in enumerate(data()[order].split(BATCH)):
        if number not in (0, 3):
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    found = run_ranks(1, stepped_ahead, STRATEGIES.get(name, NoShard()), kind)[0]
    assert found["told"] == ["StepSkipped" if n in (0, 3) else "StepDone" for n in range(10)]
    for key, value in whole(model).items():
        torch.testing.assert_close(found["weights"][key], value, atol=1e-5, rtol=1e-4)


def switched(strategy: Any, step: StepConfig) -> dict[str, Any]:
    return ours(strategy, "sgd", step)


@pytest.mark.parametrize("name", first_of(["full", "zero2", "hybrid"]))
def test_activation_checkpointing_and_bf16_work_under_every_strategy(name: str) -> None:
    world = 4 if name == "hybrid" else 2
    judge = one_process("sgd")
    for found in run_ranks(world, switched, STRATEGIES[name], StepConfig(checkpoint_activations=True)):
        assert_same(found, judge, name)
    for found in run_ranks(world, switched, STRATEGIES[name], StepConfig(precision="bf16")):
        assert found["losses"] == pytest.approx(judge["losses"], abs=0.05)  # bf16 has 8 bits


def bytes_held(strategy: Any) -> dict[str, Any]:
    with potluck.init(Sync(balance=False), strategy) as fleet:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        given = list(model.parameters())
        fleet.prepare(model, torch.optim.AdamW(model.parameters()))
        replica = fleet.run.replica
        for _ in range(2):
            fleet.backward(model(torch.ones(2, 64, device=fleet.device)).square().mean(), samples=2)
            replica.unseal()  # type: ignore[union-attr]
            replica.finish()  # type: ignore[union-attr]
            held = held_bytes(sharded_of(fleet))
            fleet.step()
            held["state"] = held_bytes(sharded_of(fleet))["state"]
        left = sum(parameter.untyped_storage().nbytes() for parameter in given)
        return held | {"numbers": 8 * (64 * 64 + 64), "left": left}


@pytest.mark.parametrize(
    ("strategy", "world", "theory"),
    first_of(
        [
            (FullShard(), 2, (4 / 2, 4 / 2, 8 / 2)),
            (FullShard(), 4, (4 / 4, 4 / 4, 8 / 4)),
            (ShardGradOp(), 4, (4, 4 / 4, 8 / 4)),
            (ShardGradOp(keep_gradients=True), 2, (4, 4, 8 / 2)),
            (HybridShard(intra_node_size=2), 4, (4 / 2, 4 / 2, 8 / 2)),
        ]
    ),
)
def test_a_rank_holds_the_bytes_that_were_promised(strategy: Any, world: int, theory: tuple[float, ...]) -> None:
    for found in run_ranks(world, bytes_held, strategy):
        for kind, each in zip(("parameters", "gradients", "state"), theory, strict=True):
            assert found[kind] == pytest.approx(each * found["numbers"], rel=0.05), kind
        if not isinstance(strategy, ShardGradOp):  # what the optimizer was given keeps nothing of the whole model
            assert found["left"] < 100


def refused(strategy: Any, optimizer: str = "adamw") -> str:
    try:
        with potluck.init(strategy=strategy) as fleet:
            model, chosen = make(optimizer)
            if optimizer == "sparse":
                chosen = torch.optim.SparseAdam(model.parameters())
            fleet.prepare(model, chosen)
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("strategy", "world", "optimizer", "sentence"),
    first_of(
        [
            (
                HybridShard(intra_node_size=2),
                3,
                "adamw",
                "strategy: a world of 3 ranks is no multiple of intra_node_size, which is 2.",
            ),
            (ShardGradOp(weights=(1.0, 2.0)), 3, "adamw", "strategy: there are 2 weights, and 3 ranks."),
            (FullShard(), 2, "sparse", "its gradients are sparse"),
        ]
    ),
)
def test_bad_input_is_a_sentence(strategy: Any, world: int, optimizer: str, sentence: str) -> None:
    for found in run_ranks(world, refused, strategy, optimizer):
        assert sentence in found


def test_settings_that_make_no_sense_are_refused() -> None:
    for make_strategy, sentence in (
        (lambda: HybridShard(intra_node_size=0), "intra_node_size must be at least 1, not 0"),
        (lambda: FullShard(weights=(0.0, 0.0)), "weights must be numbers of at least 0, and not all 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_strategy()
    assert NoShard() == NoShard()


@pytest.mark.parametrize(
    "strategy", first_of([NoShard(), ShardGradOp(), ShardGradOp(keep_gradients=True), FullShard()])
)
def test_an_optimizer_in_host_memory_steps_alike(strategy: Any) -> None:
    judge = one_process("fused", clip=0.5)
    for found in run_ranks(2, ours, strategy, "fused", StepConfig(clip=0.5, offload_optimizer=True)):
        assert_same(found, judge, strategy.kind, atol=5e-5)
