"""Models that do other things in a later batch than in the surveyed one, or are built oddly: right, or a sentence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from potluck.errors import ConfigError
from potluck.stages.cut import CutStage, cut
from potluck.stages.plan import Plan
from potluck.stages.profile import measure, survey
from potluck.stages.seats import seed_of

WIDE = 6


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def numbers(rows: int = 4, first: float = 0.0) -> Tensor:
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDE)
    x[0, 0] = first
    return x


def stages_of(model: nn.Module, loss_of: Callable[..., Any] = squares, batch: Any = None) -> list[CutStage]:
    """Cut after every layer."""
    layers = survey(model, loss_of, numbers() if batch is None else batch)
    plan = Plan.from_json(Plan.at(layers, range(1, len(layers))).to_json())
    return [cut(model, plan, number) for number in range(len(layers))]


def loss_in_stages(stages: list[CutStage], loss_of: Callable[..., Any], batch: Any, seed: int | None = None) -> Tensor:
    """Forward and backward through all of them; their parameters have their gradients afterwards."""
    kept, result = [], None
    for stage in stages:
        received = None
        if stage.index:
            received = tuple(one.detach().requires_grad_(one.is_floating_point()) for one in result)
        result = stage.run(loss_of, batch, received, seed=seed)
        kept.append((received or (), result if isinstance(result, tuple) else (result,)))
    gradients: tuple[Any, ...] = (torch.ones_like(result),)
    for received, given in reversed(kept):
        pairs = [(one, gradient) for one, gradient in zip(given, gradients, strict=True) if one.requires_grad]
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        gradients = tuple(torch.zeros_like(one) if one.grad is None else one.grad for one in received)
    return result


def check(model: nn.Module, loss_of: Callable[..., Any] = squares, batch: Any = None, later: Any = None) -> None:
    """Cut after every layer it gives the loss and the gradients of the whole; `later`: for this batch."""
    batch = numbers() if batch is None else batch
    stages = stages_of(model, loss_of, batch)
    batch = batch if later is None else later
    whole = loss_of(model, batch)
    whole.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = loss_in_stages(stages, loss_of, batch)
    torch.testing.assert_close(loss, whole)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


class Elsewhere(nn.Module):
    """What is used before the layers is used after them too, in some batches."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.scale = nn.Parameter(torch.rand(WIDE))
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        is_odd = bool((x > 5).any())
        start = h = self.enter(x) * self.scale
        for number, block in enumerate(self.blocks):
            if not (is_odd and self.what == "left out" and number == 0):
                h = block(h)
        if is_odd and self.what == "module":
            h = h + self.enter(h)
        if is_odd and self.what == "parameter":
            h = h * self.scale
        if is_odd and self.what == "value":
            h = h + start
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("module", "enter was used in another place"),
        ("parameter", "scale was used in another place"),
        ("value", "scale was used in another place"),
        ("left out", "did not run in this batch"),
    ],
)
def test_what_a_stage_does_not_have_is_refused_as_soon_as_a_batch_uses_it(what: str, sentence: str) -> None:
    stages = stages_of(Elsewhere(what))
    loss_in_stages(stages, squares, numbers())
    with pytest.raises(ConfigError, match=sentence):
        loss_in_stages(stages, squares, numbers(first=6.0))


class Rare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))
        self.rare = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.rare(x) if (x > 5).any() else x


def test_an_unused_part_with_buffers_has_one_home_and_is_refused_elsewhere() -> None:
    stages = stages_of(Rare())
    with pytest.raises(ConfigError, match="rare was used in another place"):
        loss_in_stages(stages, squares, 100 * numbers())


class Checkpointed(nn.Module):
    """Checkpoints in the model's own forward: around a layer, what comes before it too, or what follows."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            if self.what == "alone":
                h = checkpoint(block, h, use_reentrant=False)
            elif self.what == "reentrant":
                h = checkpoint(block, h, use_reentrant=True)
            elif self.what == "before":
                h = h + checkpoint(lambda h, block=block, norm=norm: block(norm(h)), h, use_reentrant=False)
            elif self.what == "after":
                h = checkpoint(lambda h, block=block, norm=norm: norm(block(h)), h, use_reentrant=False)
            else:
                h = block(h)
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["alone", "before"])
def test_layers_that_the_model_itself_checkpoints_are_computed_again_with_the_same_numbers(what: str) -> None:
    torch.manual_seed(0)
    model = Checkpointed(what)
    places = {block: place for place, block in enumerate(model.blocks, start=1)}
    handles = [
        block.register_forward_pre_hook(lambda module, _: torch.manual_seed(seed_of(3, places[module])) and None)
        for block in model.blocks
    ]
    loss = squares(model, numbers())
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for handle in handles:
        handle.remove()
    model.zero_grad()
    measure(model, squares, numbers())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    torch.testing.assert_close(loss_in_stages(stages_of(model), squares, numbers(), seed=3), loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [("after", "together with operations that follow it"), ("reentrant", "use use_reentrant=False")],
)
def test_other_checkpoints_are_refused_before_the_first_step_with_what_to_do(what: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refusal:
        measure(Checkpointed(what), squares, numbers())
    assert refusal.value.__traceback__ is not None  # which is held here, and with it whatever its frames hold
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def with_a_hook(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)
    output.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return output.square().mean()  # type: ignore[no-any-return]


def with_a_gradient(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)
    weight = model.head.weight
    [gradient] = torch.autograd.grad(output.square().mean(), [weight], create_graph=True)
    return output.square().mean() + gradient.square().sum()


@pytest.mark.parametrize("loss_of", [with_a_hook, with_a_gradient])
def test_a_loss_function_may_use_the_graph(loss_of: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Checkpointed("")
    for block in model.blocks:
        block[2].p = 0.0
    check(model, loss_of)


def penalty(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.clone().requires_grad_()
    output = model(batch)
    [gradient] = torch.autograd.grad(output.sum(), [batch], create_graph=True)
    return output.square().mean() + gradient.square().mean()


def test_a_gradient_through_all_stages_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="reaches what the last stage has, and no further"):
        survey(Checkpointed(""), penalty, numbers())


class LongSkips(nn.Module):
    """What the first layers gave is used after all others, and by several of them; in operations and as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDE) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        start = self.enter(x)
        h, skips = start, []
        for number, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            if number < 3:
                h = torch.tanh(norm(block(h)))
                skips.append(h)
            else:
                h = block(h) + skips.pop()
        return self.head(h) + 0.5 * start


class Down(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.conv(x))
        return nn.functional.max_pool2d(x, 2), x


class Up(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = nn.functional.interpolate(x, scale_factor=2)
        return torch.relu(self.conv(torch.cat([x, skip], 1)))


class UNet(nn.Module):
    """Two lists of layers, one after the other, of several resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([Down(1, 4), Down(4, 8), Down(8, 8)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.ups = nn.ModuleList([Up(16, 8), Up(16, 4), Up(8, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x, skip = down(x)
            skips.append(skip)
        x = self.middle(x)
        for up in self.ups:
            x = up(x, skips.pop())
        return self.head(x)  # type: ignore[no-any-return]


def images(rows: int = 2, size: int = 16) -> Tensor:
    return torch.randn(rows, 1, size, size, generator=torch.Generator().manual_seed(rows))


def test_what_a_layer_gave_is_handed_on_to_whichever_layer_uses_it() -> None:
    torch.manual_seed(0)
    check(LongSkips())
    check(UNet(), batch=images(), later=images(3, 24))


@dataclass(frozen=True)
class Flow:
    x: Tensor
    notes: dict[str, Any]
    aside: Tensor | None = None


class Pair(NamedTuple):
    x: Tensor
    mask: Tensor


class Flowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, flow: Any) -> Any:
        x = torch.tanh(self.linear(flow.x))
        if isinstance(flow, Pair):
            return Pair(x * flow.mask, flow.mask)
        aside = x.sum() if flow.aside is None else flow.aside + x.sum()
        return Flow(x, flow.notes, aside)


class Flows(nn.Module):
    """Layers that give each other objects: dataclasses, named tuples."""

    def __init__(self, kind: type, *, adds: bool = False) -> None:
        super().__init__()
        self.kind, self.adds = kind, adds
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.layers = nn.ModuleList(Flowing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        start = self.enter(x)
        flow = Flow(start, {"scale": 2.0}) if self.kind is Flow else Pair(start, (x > 0).float())
        for layer in self.layers:
            found = layer(flow)
            if self.adds:
                found = replace(found, x=found.x + flow.x)
            flow = found
        return self.head(flow.x) + (0.01 * flow.aside * flow.notes["scale"] if isinstance(flow, Flow) else 0)


@pytest.mark.parametrize("model", [Flows(Flow), Flows(Pair), Flows(Flow, adds=True)])
def test_layers_may_give_each_other_dataclasses_and_named_tuples(model: nn.Module) -> None:
    check(model)


class Recurrent(nn.Module):
    """Recurrent nets as layers, and around them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.GRU(WIDE, WIDE, batch_first=True)
        self.layers = nn.ModuleList(nn.LSTM(WIDE, WIDE, batch_first=True) for _ in range(2))
        self.leave = nn.LSTM(WIDE, WIDE, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.enter(x.unsqueeze(1).expand(-1, 3, -1))
        for layer in self.layers:
            given, (state, _) = layer(x)
            x = x + given
        return self.leave(x)[0] + state.sum()  # type: ignore[no-any-return]


def test_recurrent_nets_are_layers_and_parts_like_others() -> None:
    check(Recurrent())


def test_layers_of_several_lists_are_one_chain_where_they_run_in_turn() -> None:
    layers = survey(UNet(), squares, images())
    names = [layer.name for layer in layers if layer.module is not None]
    assert names == [f"{side}.{number}" for side in ("downs", "ups") for number in range(3)]


class Interleaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ones = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))
        self.others = nn.ModuleList(nn.Bilinear(WIDE, WIDE, WIDE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for one, other in zip(self.ones, self.others, strict=True):
            x = torch.tanh(other(x, one(x)))
        return x


def test_where_lists_take_turns_the_largest_is_the_chain() -> None:
    layers = survey(Interleaved(), squares, numbers())
    assert [layer.name for layer in layers if layer.module is not None] == ["others.0", "others.1"]


class Expert(nn.Module):
    """Its own list has more parameters than any other, and not all of it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.experts[1](x))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDE, WIDE), Expert(), nn.Linear(WIDE, WIDE)])
        self.heads = nn.ModuleList([nn.Linear(WIDE, WIDE), nn.Bilinear(WIDE, WIDE, WIDE)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.heads[1](x, self.heads[0](x)) + self.heads[0](x)  # type: ignore[no-any-return]


def test_layers_of_several_classes_are_a_chain_where_they_run_in_turn() -> None:
    check(Mixed())
    names = [layer.name for layer in survey(Mixed(), squares, numbers()) if layer.module is not None]
    assert names == ["blocks.0", "blocks.1", "blocks.2"]


def shared() -> nn.Module:
    linear, activation = nn.Linear(WIDE, WIDE), nn.Tanh()
    return nn.Sequential(linear, activation, nn.Linear(WIDE, WIDE), activation, linear, activation)


def test_a_layer_may_be_in_the_chain_several_times() -> None:
    check(shared())
    model = Elsewhere("")
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh())] * 3)
    check(model)


def test_a_shared_layer_with_buffers_is_refused() -> None:
    norm = nn.BatchNorm1d(WIDE)
    with pytest.raises(ConfigError, match="is in the chain twice, and has buffers"):
        survey(nn.Sequential(nn.Linear(WIDE, WIDE), norm, nn.Linear(WIDE, WIDE), norm), squares, numbers())


def siamese(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - model(-batch)).square().mean()  # type: ignore[no-any-return]


def test_a_loss_function_that_runs_the_model_twice_is_told_to_run_it_once_on_both() -> None:
    with pytest.raises(ConfigError, match="Run it once on the rows of both"):
        survey(Elsewhere(""), siamese, numbers())


class Hooked(nn.Module):
    """Does something to a tensor itself between two layers: behind a layer or a sum, with a hook or in place."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        skip: Tensor | None = None
        for block in self.blocks:
            h = block(h) if self.what == "layer" else h + block(h)
            if self.what == "in place":
                h.mul_(0.5)
            else:
                h.register_hook(lambda gradient: gradient * 0.5)
            skip = h if skip is None else skip
        return self.head(h) + (skip if self.what == "skip" else 0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["layer", "sum", "skip", "in place"])
def test_what_is_done_to_a_tensor_between_layers_is_done_once(what: str) -> None:
    check(Hooked(what))
