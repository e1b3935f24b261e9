"""Odd parameters, and odd uses of them, where they are split over ranks: against plain PyTorch in one process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import potluck
from potluck import FullShard, HybridShard, ShardGradOp, Sync
from potluck.errors import CheckpointError, ConfigError
from potluck.events import StepDone
from potluck.save import checkpoint_folder
from potluck.save.export import write_plain
from potluck.save.state import flatten
from tests.quick import first_of
from tests.ranks import run_ranks

STRATEGIES: dict[str, tuple[int, Any]] = {
    "full": (2, FullShard()),
    "weights": (2, FullShard(weights=(1.0, 2.0))),
    "hybrid": (4, HybridShard(intra_node_size=2)),
}


class Block(nn.Module):
    """Of one odd parameter, or none."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)
        if kind == "no dimension":
            self.odd = nn.Parameter(torch.tensor(0.7))
        elif kind == "channels last":
            self.odd = nn.Parameter(torch.randn(2, 2, 3, 3).to(memory_format=torch.channels_last))
        elif kind == "other type":
            self.odd = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        elif kind == "complex":
            self.odd = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128) / 3)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "no dimension":
                x = x * self.odd
            case "channels last":
                x = F.conv2d(x.view(-1, 2, 2, 2), self.odd, padding=1).flatten(1)
            case "other type":
                x = x * self.odd.double()
            case "complex":
                x = (x.to(torch.complex128) @ self.odd).real
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.out = nn.Linear(8, 1)
        self.double()
        self.logit_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        if "other type" in kinds:
            block = self.blocks[list(kinds).index("other type")]
            block.odd = nn.Parameter(block.odd.detach().float())  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.logit_scale.exp()


def odd() -> Net:
    """Beside odd parameters: rows that a hook keeps as they are, of a layer and in a block; and scaled gradients."""
    model = Net(("", "no dimension", "channels last", "other type", "complex"))
    mask = torch.ones(8, 1, dtype=torch.float64)
    mask[:4] = 0

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 0.5

    model.inp.weight.register_hook(lambda gradient: gradient * mask)
    model.blocks[0].linear.weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[union-attr, operator]
    model.blocks[4].linear.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[union-attr, operator]
    return model


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(24, 4, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def plain(model: nn.Module, loss_of: Callable[..., Tensor]) -> dict[str, Tensor]:
    x, y = rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for a, b in zip(x.split(8), y.split(8), strict=True):
            optimizer.zero_grad()
            loss_of(model, a, b).backward()
            optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = (model(x) - y).square().mean()
    return found


def split(build: Callable[[], nn.Module], loss_of: Callable[..., Tensor], strategy: Any) -> dict[str, Tensor]:
    """What the model is after the same steps, on rank 0."""
    model = build()
    with potluck.init(strategy=strategy, policy=Sync(balance=False)) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        train(fleet, model, loss_of)
        return fleet.state_dict()


def train(fleet: Any, model: nn.Module, loss_of: Callable[..., Tensor]) -> None:
    """Each rank has some rows of each batch, in two parts."""
    for _ in range(2):
        for batch in zip(*(part.split(8) for part in rows()), strict=True):
            mine = [part[fleet.rank :: fleet.world] for part in batch]
            half = len(mine[0]) // 2
            for part, last in ((slice(0, half), False), (slice(half, None), True)):
                x, y = (each[part] for each in mine)
                fleet.backward(loss_of(model, x, y), samples=len(x), last=last)
            fleet.step()


def check(build: Callable[[], nn.Module], loss_of: Callable[..., Tensor], kind: str, rtol: float = 1e-9) -> None:
    world, strategy = STRATEGIES[kind]
    state = run_ranks(world, split, build, loss_of, strategy)[0]
    for name, expected in plain(build(), loss_of).items():
        torch.testing.assert_close(
            state[name], expected, rtol=rtol, atol=rtol, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize("kind", first_of(STRATEGIES))
def test_parameters_of_every_kind_train_as_in_one_process(kind: str) -> None:
    check(odd, mean_square, kind, rtol=1e-6)  # one of them has 32 bits


# Uses of parameters outside of a forward

REFUSED: dict[str, Callable[..., Any]] = {
    "its product with rows": lambda model, x: x @ model.inp.weight.T,
    "a loss with L2": lambda model, x: model(x).sum() + sum(each.square().sum() for each in model.parameters()),
    "a loss with a block's weight": lambda model, x: model(x).sum() + model.blocks[1].linear.weight.square().sum(),
    "functional_call": lambda model, x: torch.func.functional_call(
        model.blocks[0], {"linear.weight": torch.zeros(8, 8, dtype=torch.float64)}, (x.repeat(1, 2),)
    ),
    "a late hook": lambda model, x: model.blocks[1].linear.weight.register_post_accumulate_grad_hook(
        lambda parameter: None
    ),
    "nn.init": lambda model, x: nn.init.normal_(model.blocks[0].linear.weight),
    "a copy": lambda model, x: torch.optim.swa_utils.AveragedModel(model),
}
ONLY_BY_WEIGHT: dict[str, Callable[..., Any]] = {  # torch's DTensor takes these, and is right
    "an average": lambda model, x: [each.detach().clone() for each in model.parameters()],
    "zeros": lambda model, x: nn.init.zeros_(model.blocks[0].linear.weight),
    "clamped": lambda model, x: model.blocks[0].linear.weight.data.clamp_(-1, 1),
    "its state": lambda model, x: model.state_dict(),
}


def usual() -> Net:
    model = Net(("", ""))
    del model.logit_scale
    model.logit_scale = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
    return model


def uses(strategy: Any) -> dict[str, Any]:
    """What is said of each; then weights are loaded, and trained."""
    model, x = usual(), rows()[0]
    with potluck.init(strategy=strategy, policy=Sync(balance=False)) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        model.to("cpu").requires_grad_(True).train()
        said = {}
        for name, use in (REFUSED | (ONLY_BY_WEIGHT if strategy.weights else {})).items():
            try:
                use(model, x)
                said[name] = "nothing"
            except ConfigError as refusal:
                said[name] = str(refusal)
        whole = {name: torch.full_like(tensor, 0.25) for name, tensor in usual().state_dict().items()}
        model.load_state_dict(whole)
        train(fleet, model, mean_square)
        return {"said": said, "state": fleet.state_dict()}


@pytest.mark.parametrize("kind", first_of(["weights", "full"]))
def test_uses_outside_of_a_forward_are_right_or_a_sentence_and_whole_weights_are_loaded(kind: str) -> None:
    found = run_ranks(2, uses, STRATEGIES[kind][1])
    for name, sentence in found[0]["said"].items():
        assert "NoShard" in sentence or "before prepare()" in sentence, name
    model = usual()
    model.load_state_dict({name: torch.full_like(tensor, 0.25) for name, tensor in model.state_dict().items()})
    for name, expected in plain(model, mean_square).items():
        torch.testing.assert_close(found[0]["state"][name], expected, rtol=1e-9, atol=1e-9)


def with_its_weights(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return mean_square(model, x, y) + 0.1 * model.out.weight.square().sum() + 0.1 * model.inp.bias.exp().sum()


def looked_at(build: Callable[[], Net], strategy: Any) -> Any:
    """Its weights after training with such a loss, and what evaluate() gives then."""
    model: nn.Module = build()
    with potluck.init(strategy=strategy, policy=Sync(balance=False)) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        train(fleet, model, with_its_weights)
        with torch.no_grad():
            model(rows()[0][:4])
        data = torch.utils.data.TensorDataset(*rows())
        found = fleet.evaluate(lambda model, batch: with_its_weights(model, *batch), data, batch_size=8)
        return fleet.state_dict(), found


@pytest.mark.parametrize("build", first_of([usual, odd]))
@pytest.mark.parametrize("kind", first_of(["weights", "full"]))
def test_a_loss_with_weights_of_no_block_is_trained_and_evaluated_as_in_one_process(
    kind: str, build: Callable[[], Net]
) -> None:
    state, found = run_ranks(2, looked_at, build, STRATEGIES[kind][1])[0]
    model = build()
    for name, expected in plain(model, with_its_weights).items():
        torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-9)
    assert found == pytest.approx(with_its_weights(model, *rows()).item(), rel=1e-6)


def written(strategy: Any, by_data: bool) -> str:
    model = usual()
    with potluck.init(strategy=strategy, policy=Sync(balance=False)) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = rows()
        loss = mean_square(model, x, y)
        (model.out.bias.data if by_data else model.out.bias).detach().clamp_(-0.1, 0.1)
        with pytest.raises(ConfigError) as refusal:
            fleet.backward(loss, samples=len(x))
        return str(refusal.value)


@pytest.mark.parametrize("by_data", first_of([True, False]))
@pytest.mark.parametrize("kind", first_of(["weights", "full"]))
def test_a_write_between_a_forward_and_its_backward_is_a_sentence(kind: str, by_data: bool) -> None:
    for said in run_ranks(2, written, STRATEGIES[kind][1], by_data):
        assert said.startswith("out.bias was written after a forward, before its backward.")


def zeroed() -> dict[str, Tensor]:
    model = usual()
    with potluck.init(strategy=FullShard(), policy=Sync(balance=False)) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            model(rows()[0])
        nn.init.zeros_(model.out.weight)
        return fleet.state_dict()


def test_a_write_after_a_forward_without_a_backward_is_kept() -> None:
    assert not run_ranks(2, zeroed)[0]["out.weight"].any()


# Blocks and losses out of the ordinary


class HandsOn(nn.Module):
    """A block that gives its own input too, which is what the block before it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.full((8,), 0.9))

    def forward(self, x: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x) * self.gain) + (0 if skip is None else 0.1 * skip), x


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(HandsOn() for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Any:
        x, skip = self.inp(x), None
        for block in self.blocks:
            x, skip = block(x, skip)
        return self.out(x + skip)


def gradient_penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    given = model(x)
    (slope,) = torch.autograd.grad(given.sum(), x, create_graph=True)
    found: Tensor = (given - y).square().mean() + 0.1 * slope.square().sum(1).mean()
    return found


@pytest.mark.parametrize("kind", first_of(["weights", "full", "hybrid"]))
def test_second_derivatives_and_blocks_that_hand_on_their_input_train_as_in_one_process(kind: str) -> None:
    check(Skipping, gradient_penalty, kind)


def test_second_derivatives_are_taken_where_one_rank_has_all_parts() -> None:
    state = run_ranks(1, split, Skipping, gradient_penalty, FullShard())[0]
    for name, expected in plain(Skipping(), gradient_penalty).items():
        torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-9)


def forward_first(strategy: Any) -> dict[str, Tensor]:
    """Two forwards, and then their backwards, as in the schedules of stages."""
    model: Any = usual()
    with potluck.init(strategy=strategy, policy=Sync(balance=False)) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        x, y = (part[fleet.rank : 8 : fleet.world] for part in rows())
        half = len(x) // 2
        losses = [with_its_weights(model, x[part], y[part]) for part in (slice(0, half), slice(half, None))]
        fleet.backward(losses[0], samples=half, last=False)
        fleet.backward(losses[1], samples=len(x) - half)
        fleet.step()
        return fleet.state_dict()


@pytest.mark.parametrize(
    ("world", "strategy"), first_of([(1, FullShard()), (2, FullShard()), (2, FullShard(weights=(1.0, 2.0)))]), ids=str
)
def test_weights_in_a_loss_are_there_in_its_backward_also_after_that_of_another(world: int, strategy: Any) -> None:
    model = usual()
    x, y = (part[:8] for part in rows())
    with_its_weights(model, x, y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = run_ranks(world, forward_first, strategy)[0]
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-9)


def unequal(strategy: Any) -> str:
    model = usual()
    with potluck.init(strategy=strategy, policy=Sync(balance=False)) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = rows()[0][:4]
        try:
            for part in x.split(2 + 2 * fleet.rank):
                fleet.backward(model(part).square().mean(), samples=len(part), last=fleet.rank == 1)
        except ConfigError as refusal:
            return str(refusal)
    return "nothing"


@pytest.mark.parametrize(
    "strategy", first_of([FullShard(), FullShard(weights=(1.0, 2.0)), ShardGradOp(), ShardGradOp(weights=(1.0, 2.0))])
)
def test_another_number_of_backwards_on_one_rank_is_a_sentence(strategy: Any) -> None:
    for said in run_ranks(2, unequal, strategy):
        assert said.startswith("Some workers called backward() with last=False where others")


def saved_and_loaded(folder: str, strategy: Any) -> list[dict[str, Tensor]]:
    found = []
    with potluck.init():
        for _ in range(2):
            model = odd()
            fleet = potluck.init(strategy=strategy, policy=Sync(balance=False))
            model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            if not fleet.load(folder):
                train(fleet, model, mean_square)
                fleet.save(folder)
                fleet.wait_for_saves()
            found.append(fleet.state_dict())
    return found


@pytest.mark.parametrize(
    ("world", "strategy"), first_of([(2, FullShard()), (1, potluck.NoShard())]), ids=["full", "whole"]
)
def test_parameters_of_every_kind_are_saved(world: int, strategy: Any, tmp_path: Path) -> None:
    saved, loaded = run_ranks(world, saved_and_loaded, str(tmp_path), strategy)[0]
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
    path = checkpoint_folder.found(tmp_path)[0]
    read = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    pairs = [read[name] for name in sorted(read) if name.startswith("blocks.4.odd") and "/" not in name]
    whole = torch.view_as_complex(torch.cat([each.reshape(-1, 2) for each in pairs]))
    assert torch.equal(whole, saved["blocks.4.odd"].flatten()), "others read complex128 as pairs"
    with pytest.raises(
        CheckpointError, match=r"blocks\.4\.odd is complex128, which safetensors files for other programs"
    ):
        write_plain(path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def normed(strategy: Any) -> list[Tensor]:
    """Beside a loss and in it: each spectral_norm of torch's computes with parameters and buffers, and what makes
    weights orthogonal gives NaN in bf16."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        spectral_norm(nn.Linear(4, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 1)),
    )
    step = potluck.StepConfig(precision="bf16")
    with potluck.init(strategy=strategy, policy=Sync(balance=False), step=step) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = (part.float() for part in rows())
        fleet.backward(mean_square(model, x, y), samples=len(x))
        assert isinstance(fleet.step(), StepDone)
        model.eval()
        data = torch.utils.data.TensorDataset(x, y)
        found = fleet.evaluate(lambda model, batch: mean_square(model, *batch), data, batch_size=24)
        return [model(x).detach(), torch.tensor(found)]


@pytest.mark.parametrize("kind", first_of(["full", "weights"]))
def test_weights_that_are_computed_from_others_train_in_bf16_as_under_no_shard(kind: str) -> None:
    expected = run_ranks(2, normed, potluck.NoShard())[0]
    for given, wanted in zip(run_ranks(2, normed, STRATEGIES[kind][1])[0], expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=0.02, atol=0.01)  # bf16 has 8 bits


class Called(nn.Module):
    """Its first block runs with parameters that are made of its own for the time of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = usual()

    def forward(self, x: Tensor) -> Any:
        inner, (block, other) = self.inner, self.inner.blocks
        changed = {name: 1.5 * parameter for name, parameter in block.named_parameters()}
        return inner.out(other(torch.func.functional_call(block, changed, (inner.inp(x),))))


def test_what_functional_call_puts_there_is_there_when_a_block_is_computed_again() -> None:
    expected = plain(Called(), mean_square)
    model = Called()
    fleet = potluck.Engine(step=potluck.StepConfig(checkpoint_activations=True))
    model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train(fleet, model, mean_square)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


class Given(nn.Module):
    """Its first block runs with parameters of the model's own, as one does whose weights a net makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = usual()
        self.weight = nn.Parameter(torch.eye(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        inner, (block, other) = self.inner, self.inner.blocks
        return inner.out(other(torch.func.functional_call(block, {"linear.weight": self.weight}, (inner.inp(x),))))


def refused(build: Callable[[], nn.Module], strategy: Any) -> str:
    try:
        split(build, mean_square, strategy)
    except ConfigError as refusal:
        return str(refusal)
    return "nothing"


@pytest.mark.parametrize("build", [Given, Called])
@pytest.mark.parametrize("kind", first_of(["full", "weights"]))
def test_a_functional_call_in_a_forward_of_split_parameters_is_a_sentence(
    kind: str, build: Callable[[], nn.Module]
) -> None:
    """What it puts there would be written over by those that are gathered."""
    for said in run_ranks(2, refused, build, STRATEGIES[kind][1]):
        assert said.startswith("inner.blocks.0.linear.weight ") and "NoShard" in said, said


def test_a_part_of_a_split_tensor_in_a_loops_own_state_is_a_sentence() -> None:
    (said,) = run_ranks(1, kept_part)
    assert said.startswith("fleet.state/average is a part of a tensor that is split over ranks. Keep whole tensors")


def kept_part() -> str:
    model = usual()
    with potluck.init(strategy=FullShard()) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            flatten(model.inp.weight.detach().clone(), "fleet.state/average", None, "")
        except CheckpointError as refusal:
            return str(refusal)
    return "nothing"


def test_complex_numbers_in_fewer_bits_are_a_sentence_and_travel_as_they_are_where_that_is_measured() -> None:
    for said in run_ranks(2, coded_complex, "int8"):
        assert said == "A trained parameter is complex, and wire = int8 codes real numbers. Leave out wire."
    expected = plain(Net(("complex",)), mean_square)
    for found in run_ranks(2, coded_complex, "auto"):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


def coded_complex(wire: Any) -> Any:
    model = Net(("complex",))
    with potluck.init(policy=Sync(balance=False), wire=wire) as fleet:
        try:
            model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        except ConfigError as refusal:
            return str(refusal)
        assert not fleet.run.composition.wire_is_measured
        train(fleet, model, mean_square)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}
