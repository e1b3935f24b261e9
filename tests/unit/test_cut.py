"""A model cut into stages gives the losses and the gradients of the whole one. The whole model is the judge."""

import copy
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.errors import ConfigError
from potluck.replica.precision import StepConfig, switch_on
from potluck.sharding.blocks import find_blocks
from potluck.stages.chain import chain_of, find_chain, parameters_of
from potluck.stages.cut import CutStage, cut, used_by
from potluck.stages.plan import Device, Plan, balance
from potluck.stages.profile import measure, survey
from potluck.stages.seats import seed_of
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


class Attention(nn.Module):
    """Gives two things, of which the model takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.heads(x, x, x, attn_mask=mask)  # type: ignore[no-any-return]


class Flat(nn.Module):
    """As many write it: lists of parts, residuals in the model's own forward, a mask made once, learnt scales."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 8), nn.Embedding(8, 8)
        self.norms_1 = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.attentions = nn.ModuleList(Attention() for _ in range(3))
        self.norms_2 = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.steps = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.Dropout(0.2), nn.Linear(40, 8)) for _ in range(3)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(3))
        self.last = nn.LayerNorm(8)
        self.register_buffer("hidden", torch.full((7, 7), -torch.inf).triu(1))

    def forward(self, rows: Tensor) -> Tensor:
        length = rows.shape[1]
        mask = self.hidden[:length, :length]
        x = self.tokens(rows) + self.places(torch.arange(length))
        for norm_1, attention, norm_2, step, scale in zip(
            self.norms_1, self.attentions, self.norms_2, self.steps, self.scales, strict=True
        ):
            x = x + attention(norm_1(x), mask)[0]
            x = x + scale * step(norm_2(x))
        return self.last(x) @ self.tokens.weight.T


def flat() -> Case:
    return Flat(), squares, tokens


class Residual(nn.Module):
    """Residuals of every kind: in place, scaled, of another width, through a module, and a loss that layers add to."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Pair(), Pair(), Pair(), Pair()])
        self.wider = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.leave = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x += 1
        side, aside = torch.zeros_like(x), x.new_zeros(())
        for number, layer in enumerate(self.layers):
            given, side, loss, _ = layer(x, side=side, scale=0.5)
            aside = aside + loss
            if number == 0:
                given += x
                x = given
            elif number == 1:
                x = self.wider(x) + given.transpose(0, 1).contiguous().T
            else:
                x = self.norm(0.5 * x + given) if number == 2 else x.add(given, alpha=0.3)
        return self.leave(x) + 0.01 * aside


def residual() -> Case:
    return Residual(), squares, numbers


def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.ModuleDict({"embed": nn.Embedding(32, 8), "body": nn.TransformerEncoder(layer, 3)})

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model["body"](model["embed"](batch)).square().mean()

    return model, loss_of, tokens


CASES = [gpt, sequential, hugging_face_llama, hugging_face_gpt2, pairs, tied, from_the_start, encoder, flat, residual]


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
                # Equal to the bit, but where several stages use the embedding anew and add up in another order.
                anew = case is from_the_start and name in ties(stages)
                near = {"rtol": 1e-5, "atol": 1e-7} if anew else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(ours, gradient, **near)
            assert not gradients, gradients.keys()


def owners(model: nn.Module, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, by its first name, and the stages that the plan has use it; several: a tie."""
    chain = chain_of(model, [layer.module for layer in plan.layers if layer.module is not None])
    using: dict[int, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        for layer in plan.layers[stage.start : stage.stop]:
            for parameter in used_by(chain, layer.module, layer.parts):
                using.setdefault(id(parameter), set()).add(index)
    for name in plan.everywhere:
        for parameter in parameters_of(chain.parts[name]):
            using.setdefault(id(parameter), set()).update(range(len(plan.stages)))
    return {name: tuple(sorted(using[id(parameter)])) for name, parameter in model.named_parameters()}


def ties(stages: Sequence[CutStage]) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages hold, and which."""
    held = [dict(stage.model.named_parameters()) for stage in stages]
    names = {name for each in held for name in each}
    holders = {name: tuple(index for index, each in enumerate(held) if name in each) for name in names}
    return {name: indices for name, indices in holders.items() if len(indices) > 1}


def halves(case: Case, *cuts: int) -> tuple[nn.Module, Plan]:
    model, loss_of, rows = case
    layers = survey(model, loss_of, rows(2))
    return model, Plan.at(layers, cuts or (len(layers) // 2,))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_stage_has_the_names_and_the_parameters_of_the_whole_and_frees_the_others(case: Callable[[], Case]) -> None:
    model, plan = halves(case())
    loss_of, rows = case()[1:]
    named = dict(model.named_parameters())
    stages = [cut(model, plan, index) for index in range(len(plan.stages))]
    using = owners(model, plan)
    for stage in stages:
        own = dict(stage.model.named_parameters())
        assert own.keys() == {name for name, users in using.items() if stage.index in users}
        assert all(own[name] is named[name] for name in own)
        assert stage.model.state_dict().keys() <= model.state_dict().keys()
        assert list(own) == [name for name in named if name in own]
    assert ties(stages) == {name: users for name, users in using.items() if len(users) > 1}
    assert set().union(*(dict(stage.model.named_parameters()) for stage in stages)) == named.keys()
    first(loss_of(model, rows(2))).backward()  # the whole model works on

    model.zero_grad()
    watched = {name: weakref.ref(parameter) for name, parameter in named.items()}
    last, own = stages[-1], set(dict(stages[-1].model.named_parameters()))
    del model, named, stages, stage, loss_of
    gc.collect()
    assert {name for name, parameter in watched.items() if parameter() is not None} == own, last


def test_ties_name_the_stages_that_share_a_parameter() -> None:
    model, plan = halves(tied(), 1, 2, 3)
    assert {name: users for name, users in owners(model, plan).items() if len(users) > 1} == {
        "embedding.weight": (0, 3),  # the forward uses it again after the last block
        "blocks.0.0.weight": (1, 3),
    }
    model, plan = halves(hugging_face_gpt2(), 1, 2)
    assert ties([cut(model, plan, index) for index in range(3)]) == {"transformer.wte.weight": (0, 2)}


def test_between_stages_goes_what_the_next_layer_uses() -> None:
    model, loss_of, rows = pairs()
    layers = survey(model, loss_of, rows(2))
    assert [layer.name for layer in layers] == ["before", "layers.0", "layers.1", "layers.2", "after"]
    outputs = [layer.output for layer in layers]
    assert outputs[0] == {"dict": {"0": {"tensor": 0}}}  # not the side stream, which is zeros wherever one is
    assert outputs[1] == outputs[2] == {"tuple": [{"tensor": 0}, {"tensor": 1}, {"tensor": None}, {"value": None}]}
    assert outputs[3] == {"tuple": [{"tensor": 0}, {"tensor": None}, {"tensor": None}, {"value": None}]}
    assert layers[0].parts == ("enter", "unused", "dropout", "scale")
    assert layers[4].parts == ("leave", "dropout", "scale")


def test_the_sum_travels_where_the_model_itself_adds_a_residual() -> None:
    model, loss_of, rows = flat()
    layers = survey(model, loss_of, rows(2))
    names = ["before", "steps.0", "steps.1", "steps.2", "after"]
    assert [layer.name for layer in layers] == names
    assert [[each.split("@")[0] for each in layer.operations] for layer in layers[1:4]] == [["mul", "add"]] * 3
    assert layers[1].output == {"list": [{"tensor": None}, {"tensor": None}, {"tensor": 0}]}
    assert layers[2].parts == ("norms_1.1", "attentions.1", "norms_2.1", "scales.1")
    assert [layer.parts for layer in layers[4:]] == [("tokens", "last")]
    assert Plan.from_json(Plan.at(layers, (2,)).to_json()) == Plan.at(layers, (2,))
    stages = [cut(model, Plan.at(layers, range(1, 5)), index) for index in range(5)]
    assert [stage.receives for stage in stages] == [0, 1, 1, 1, 1]
    assert not any(2 in users for users in ties(stages).values())


class WithDropout(Tied):
    """Random numbers of the model's own, before, between and after its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.drop(self.embedding(rows))
        for block in self.blocks:
            x = x + F.dropout(block(self.drop(x)), 0.5, self.training)
        return self.drop(x)


def test_random_numbers_between_layers_do_not_depend_on_the_cut() -> None:
    model = WithDropout()
    layers = survey(model, squares, tokens(3))
    for rows in (3, 5):
        uncut = in_stages([cut(model, Plan.at(layers), 0)], squares, tokens(rows), seed=7)
        for cuts in all_cuts(len(layers), range(2, 5)):
            plan = Plan.at(layers, cuts)
            stages = [cut(model, plan, index) for index in range(len(plan.stages))]
            found = in_stages(stages, squares, tokens(rows), seed=7)
            torch.testing.assert_close(found, uncut, rtol=0, atol=0)
            for each in (model, *(stage.model for stage in stages)):
                each.eval()
            assert torch.equal(in_stages(stages, squares, tokens(rows), seed=1)[0], squares(model, tokens(rows))[0])
            model.train()


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = given
        return self.linear(x) * mask, mask


def test_layers_may_hand_on_integers_beside_the_activation() -> None:
    model = nn.Sequential(WithMask(), WithMask(), WithMask())

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model((batch, (batch > 0).long()))[0].square().mean()

    plan = Plan.at(survey(model, loss_of, numbers(3)), (1, 2))
    stages = [cut(model, plan, index) for index in range(3)]
    assert [stage.receives for stage in stages] == [0, 2, 2]
    loss, gradients = in_stages(stages, loss_of, numbers(5), seed=0)
    expected, expected_gradients = whole(model, loss_of, numbers(5), seed=0)
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected_gradients.items())


def test_a_padded_batch_of_another_length_runs_through_the_same_stages() -> None:
    model, _, _ = hugging_face_llama()

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    def padded(rows: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    plan = Plan.at(survey(model, loss_of, padded(2, 5)), (1, 2, 4))
    stages = [cut(copy.deepcopy(model), plan, index) for index in range(4)]
    loss, gradients = in_stages(stages, loss_of, padded(3, 9), seed=3)
    expected, expected_gradients = whole(model, loss_of, padded(3, 9), seed=3)
    assert torch.equal(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-6, atol=1e-8)


def test_without_a_seed_the_generators_run_on_and_with_one_they_are_left_alone() -> None:
    model, plan = halves(sequential(), 4)
    stage = cut(model, plan, 0)
    before = torch.get_rng_state()
    one, other = (stage.run(squares, numbers(3), seed=seed)[0] for seed in (1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(stage.run(squares, numbers(3), seed=1)[0], one) and not torch.equal(one, other)
    stage.run(squares, numbers(3))
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("switch", ["recompute", "compile", "bf16", "their own recomputing"])
def test_blocks_of_a_stage_can_be_recomputed_and_compiled(switch: str) -> None:
    torch.manual_seed(1)
    model, loss_of, rows = hugging_face_gpt2()
    plan = Plan.at(survey(model, loss_of, rows(2)), (2,))
    judge = copy.deepcopy(model)
    if switch == "their own recomputing":
        model.train().gradient_checkpointing_enable()
        plan = Plan.at(survey(model, loss_of, rows(2)), (2,))
    stages = [cut(copy.deepcopy(model), plan, index) for index in range(2)]
    for stage in stages:
        assert len(stage.blocks) == 1 and stage.blocks == find_blocks(stage.model)
        if switch == "recompute":
            switch_on(stage.model, torch.device("cpu"), StepConfig(checkpoint_activations=True))
        elif switch == "bf16":
            switch_on(stage.model, torch.device("cpu"), StepConfig(precision="bf16"))
        elif switch == "compile":
            for block in stage.blocks:
                block.compile(backend="eager")
    if switch == "bf16":
        loss_of = torch.autocast("cpu", torch.bfloat16)(loss_of)
    loss, gradients = in_stages(stages, loss_of, rows(3), seed=5)
    expected, expected_gradients = whole(judge, loss_of, rows(3), seed=5)
    assert torch.equal(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-7)


def test_a_model_without_memory_is_cut_and_only_the_stage_gets_some() -> None:
    model, plan = halves(gpt())
    with torch.device("meta"):
        shapes = GPT(model.config)
    stage = cut(shapes, plan, 1)
    stage.model.to_empty(device="cpu")
    stage.model.cos, stage.model.sin = model.cos, model.sin
    wanted = stage.model.state_dict().keys()
    stage.model.load_state_dict({name: one for name, one in model.state_dict().items() if name in wanted})
    activation = cut(model, plan, 0).run(next_token_loss, tokens(2))
    assert torch.equal(stage.run(next_token_loss, tokens(2), activation)[0], next_token_loss(model, tokens(2))[0])


def test_a_profile_measures_every_layer_and_changes_nothing() -> None:
    torch.manual_seed(1)
    model, loss_of, rows = sequential()
    model[0].weight.requires_grad_(False)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    generator = torch.get_rng_state()
    layers = measure(model, loss_of, rows(4))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 7
    assert all(0 < layer.seconds < 1 for layer in layers)
    linear, relu, *_, last = layers
    assert (linear.parameters, linear.trained, linear.sent_bytes) == (6 * 8 + 8, 8, 8 * 4)
    assert (relu.parameters, relu.kept_bytes) == (0, 8 * 4)  # its output
    assert last.parameters == 8 * 3 + 3


def test_kept_bytes_are_what_autograd_keeps() -> None:
    model, loss_of, rows = gpt()
    layers = measure(model, loss_of, rows(8), repeats=1)
    batch = rows(8)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), batch)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, batch)
    total = sum(layer.kept_bytes for layer in layers) * 8
    assert loss and sum(kept.values()) <= total <= 1.1 * sum(kept.values())


def test_a_measured_model_is_balanced_by_what_its_layers_take() -> None:
    light = [nn.Tanh() for _ in range(8)]
    heavy = [nn.Sequential(nn.Linear(16, 2048), nn.Linear(2048, 16)) for _ in range(4)]
    model = nn.Sequential(*light, *(Whole(layer) for layer in heavy))
    layers = measure(model, squares, torch.randn(512, 16), repeats=6)
    # All of the time is in the last four layers; on a busy machine one of them may look a little longer than another.
    (even,) = balance(layers, [Device(), Device()]).cuts
    (faster,) = balance(layers, [Device(speed=1.0), Device(speed=3.0)]).cuts
    assert even in (9, 10, 11) and faster <= even and faster in (8, 9, 10)


def test_a_worker_that_stands_still_two_thirds_of_the_time_is_three_times_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under a CPU quota: it runs for 33 ms at full speed, longer than any layer takes, then not for 67 ms."""
    model = nn.Sequential(*(Whole(nn.Linear(128, 128)) for _ in range(6)))
    profiles = []
    for period_s in (0.033, 0.1):

        def now_s(still_s: float = period_s - 0.033) -> float:
            ran_s = time.thread_time()
            return ran_s + still_s * (ran_s // 0.033)

        monkeypatch.setattr("potluck.stages.profile.time", SimpleNamespace(perf_counter=now_s))
        profiles.append(measure(model, squares, torch.randn(256, 128), at_least_s=1.0))
    free, held_back = (sum(layer.seconds for layer in layers) for layers in profiles)
    assert held_back / free > 1.7  # about 3; what else this machine does moves it, and the shortest runs say 1


class Whole(nn.Module):
    """Keeps a Sequential from being cut within."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class WithSkip(Tied):
    """As a U-Net does: what the first gave is used again by the last."""

    def forward(self, rows: Tensor) -> Tensor:
        early = self.blocks[0](self.embedding(rows))
        return self.blocks[2](self.blocks[1](early) + early) + early


class WithAllAtTheEnd(Tied):
    def forward(self, rows: Tensor) -> Tensor:
        found = [self.embedding(rows)]
        for block in self.blocks:
            found.append(block(found[-1]))
        return torch.stack(found[1:]).sum(0)


class WithFirstTwice(Tied):
    def forward(self, rows: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[1](self.blocks[0](self.embedding(rows))))


class WithHiddenWay(Tied):
    """What the graph does not show: a mask made from the embedding's numbers."""

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows)
        mask = (x > 0).float()
        for block in self.blocks:
            x = block(x * mask + 1)
        return x


class WithBufferFromTheEnd(Tied):
    """What one batch leaves behind after the layers, the next one needs before them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows) - self.center
        for block in self.blocks:
            x = x + block(x)
        self.center = x.detach().mean((0, 1))
        return x


class WithForeignParameter(Tied):
    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows)
        for block in self.blocks:
            x = block(x)
        return x * self.blocks[1][0].bias


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Linear(6, 6), "Linear cannot be cut into stages: it is not an nn.Sequential"),
        (nn.Sequential(nn.Linear(6, 6)), "a single layer"),
        (WithFirstTwice(), "runs out of turn"),
        (WithHiddenWay(), "Cut into stages the model gives another loss than whole"),
        (
            WithBufferFromTheEnd(),
            "buffer center is changed and used by before and blocks.2: cut into",
        ),
        (WithForeignParameter(), "uses blocks.1.0.bias, a parameter of layer blocks.1"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(model: nn.Module, sentence: str) -> None:
    batch = tokens(3) if isinstance(model, Tied) else numbers(3)
    frozen = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=sentence):
        survey(model, squares, batch)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert frozen == [parameter.requires_grad for parameter in model.parameters()]


class WithNoise(WithDropout):
    """Does something else in training than in evaluation."""

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows)
        for block in self.blocks:
            given = block(x)
            if self.training:
                self.drop(x)  # what nobody uses does not matter
                given = given * 2.0
            x = x + given
        return x


def test_a_model_that_does_something_else_between_its_layers_is_refused_with_what_it_does() -> None:
    model = WithNoise()
    plan = Plan.at(survey(model, squares, tokens(3)), (2,))
    stage = cut(model, plan, 0)
    assert len(stage.run(squares, tokens(3))) == 1
    stage.model.eval()
    with pytest.raises(ConfigError, match=r"After layer blocks.0 the next layer runs, without mul@forward"):
        stage.run(squares, tokens(3))


def test_a_stage_says_what_is_wrong_with_how_it_is_used() -> None:
    model, plan = halves(gpt())
    stage = cut(model, plan, 1)
    with pytest.raises(ConfigError, match="takes 1 tensor from the stage before, and got 0"):
        stage.run(next_token_loss, tokens(2))
    activation = cut(model, plan, 0).run(next_token_loss, tokens(2))
    for number in (0, 1):
        with pytest.raises(ConfigError, match="has to run the model that it gets"):
            given = activation if number else None
            cut(model, plan, number).run(lambda _, batch: next_token_loss(model, batch), tokens(2), given)
    with pytest.raises(ConfigError, match=r"only stage\.run"):
        stage.model(tokens(2))
    with pytest.raises(ConfigError, match="stages 0 to 1, and no stage 2"):
        cut(model, plan, 2)
    with pytest.raises(ConfigError, match="another model"):
        cut(GPT(ModelConfig(vocab=32, dim=16, layers=2, heads=2)), plan, 0)
    with pytest.raises(ConfigError, match="has 1,024 parameters, and in the plan 512: the plan is of another model"):
        cut(GPT(ModelConfig(vocab=64, dim=16, layers=3, heads=2)), plan, 0)
    switch_on(model, torch.device("cpu"), StepConfig(precision="bf16"))
    with pytest.raises(ConfigError, match=r"compiled or replaced\. Cut the model first"):
        cut(model, plan, 0)


def test_an_error_of_the_loss_function_leaves_the_stage_usable() -> None:
    model, plan = halves(gpt())
    stage = cut(model, plan, 0)

    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        raise KeyError("x")

    with pytest.raises(KeyError):
        stage.run(broken, tokens(2), seed=1)
    assert len(stage.run(next_token_loss, tokens(2))) == 1
