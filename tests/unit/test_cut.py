"""A model cut into stages gives the losses and the gradients of the whole one. The whole model is the judge."""

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.stages.chain import find_chain
from potluck.stages.cut import cut
from potluck.stages.plan import Plan
from potluck.stages.seats import seed_of
from potluck.stages.survey import survey
from potluck.train.model import GPT, ModelConfig, next_token_loss

Case = tuple[nn.Module, Callable[[nn.Module, Any], Any], Callable[[int], Any]]


def tokens(rows: int) -> Tensor:
    return torch.randint(0, 32, (rows, 7), generator=torch.Generator().manual_seed(rows))


def numbers(rows: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().mean(), len(batch)


def hugging_face_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch, labels=batch).loss


def gpt() -> Case:
    return GPT(ModelConfig(vocab=32, dim=16, layers=3, heads=2, context=8)), next_token_loss, tokens


def sequential() -> Case:
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return model, squares, numbers


def hugging_face_llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config), hugging_face_loss, tokens


def hugging_face_gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=1, use_cache=False
    )
    return GPT2LMHeadModel(config), hugging_face_loss, tokens


class Pair(nn.Module):
    """Hands on two streams, one of which the last norm does not use, and what nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, side: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, None]:
        mixed = self.dropout(torch.tanh(self.one(x) + side))
        return x + mixed, side + scale * self.other(mixed), mixed.sum(), None


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.enter = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Pair() for _ in range(3))
        self.unused = nn.Linear(6, 6)
        self.leave = nn.Linear(6, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.enter(x) * self.scale)
        side = torch.zeros_like(x)
        for layer in self.layers:
            x, side, _, _ = layer(x, side=side, scale=0.5)
        return self.leave(self.dropout(x)) + self.scale.sum()


def pairs() -> Case:
    return Pairs(), squares, numbers


class Tied(nn.Module):
    """Blocks that share a part with each other, an embedding whose weight the forward itself uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


def tied() -> Case:
    return Tied(), lambda model, batch: F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()), tokens


class FromTheStart(nn.Module):
    """Every block gets what the embedding gave, and a learnt table, beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.table = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, rows: Tensor) -> Tensor:
        start = x = self.embedding(rows)
        for block in self.blocks:
            x = block(x, start * self.table)
        return self.head(x)


def from_the_start() -> Case:
    return FromTheStart(), squares, tokens


def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.ModuleDict({"embed": nn.Embedding(32, 8), "body": nn.TransformerEncoder(layer, 3)})

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model["body"](model["embed"](batch)).square().mean()

    return model, loss_of, tokens


CASES = [gpt, sequential, hugging_face_llama, hugging_face_gpt2, pairs, tied, from_the_start, encoder]


@contextmanager
def sown(model: nn.Module, seed: int) -> Iterator[None]:
    """The whole model, each layer of which draws the random numbers that it would draw in a stage."""
    links = list(find_chain(model).modules.values())

    def sow(place: int) -> Callable[..., None]:
        return lambda *_: torch.default_generator.manual_seed(seed_of(seed, place)) and None

    handles = [link.register_forward_pre_hook(sow(place)) for place, link in enumerate(links, start=1)]
    handles.append(links[-1].register_forward_hook(sow(len(links) + 1)))
    sow(0)()
    yield
    for handle in handles:
        handle.remove()


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def whole(model: nn.Module, loss_of: Any, batch: Any, seed: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    model = copy.deepcopy(model)
    with sown(model, seed):
        loss = first(loss_of(model, batch))
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return loss.detach(), dict(zip(named, gradients, strict=True))


def in_stages(stages: list[Any], loss_of: Any, batch: Any, seed: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    """By hand, each stage as if it were alone."""
    received: list[tuple[Tensor, ...]] = []
    given: list[tuple[Tensor, ...]] = []
    activation: tuple[Tensor, ...] = ()
    for stage in stages:
        received.append(tuple(one.detach().clone().requires_grad_(one.is_floating_point()) for one in activation))
        result = stage.run(loss_of, batch, received[-1], seed=seed)
        given.append((first(result),) if stage.is_last else result)
        activation = () if stage.is_last else result
    loss = given[-1][0].detach()
    total: dict[str, Tensor | None] = {}
    behind: list[Tensor | None] = [torch.ones_like(loss)]
    for stage, inputs, outputs in reversed(list(zip(stages, received, given, strict=True))):
        named = dict(stage.model.named_parameters())
        floating = [one for one in inputs if one.requires_grad]
        pairs = [(one, gradient) for one, gradient in zip(outputs, behind, strict=True) if one.requires_grad]
        gradients = torch.autograd.grad(
            [one for one, _ in pairs], [*named.values(), *floating], [g for _, g in pairs], allow_unused=True
        )
        for name, gradient in zip(named, gradients, strict=False):
            if gradient is not None:
                known = total.get(name)
                total[name] = gradient if known is None else known + gradient
        incoming = iter(gradients[len(named) :])
        behind = [next(incoming) if one.requires_grad else None for one in inputs]
    return loss, total


def all_cuts(layers: int, stages: range) -> list[tuple[int, ...]]:
    return [cuts for count in stages for cuts in itertools.combinations(range(1, layers), count - 1)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_cut_has_the_loss_and_the_gradients_of_the_whole_model(case: Callable[[], Case]) -> None:
    torch.manual_seed(1)
    model, loss_of, rows = case()
    layers = survey(model, loss_of, rows(4))
    expected = {count: whole(model, loss_of, rows(count), seed=count) for count in (4, 2, 3)}
    cuts = all_cuts(len(layers), range(1, 5))
    for number, cut_at in enumerate(cuts):
        plan = Plan.at(layers, cut_at)
        stages = [cut(copy.deepcopy(model), plan, index) for index in range(len(plan.stages))]
        gc.collect(0)
        for count in (4, 2, 3) if number % 5 == 0 else (2 + number % 3,):
            loss, gradients = in_stages(stages, loss_of, rows(count), seed=count)
            whole_loss, whole_gradients = expected[count]
            assert torch.equal(loss, whole_loss), (cut_at, count)
            for name, gradient in whole_gradients.items():
                ours = gradients.pop(name, None)
                assert (gradient is None) == (ours is None), (cut_at, name)
                # Equal to the bit, but where stages add up what one process adds up in another order.
                ties = any(name in stage.ties and len(stage.ties[name]) > 1 for stage in stages)
                near = {"rtol": 1e-5, "atol": 1e-7} if ties else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(ours, gradient, **near)
            assert not gradients, gradients.keys()
