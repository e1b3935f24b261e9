import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from potluck.config import from_toml
from potluck.errors import ConfigError
from potluck.train import recipe as recipe_module
from potluck.train.arguments import find_recipe
from potluck.train.model import GPT, Block, ModelConfig, next_token_loss, rotary_tables, rotate
from potluck.train.recipe import RunConfig

TINY = ModelConfig(dim=16, layers=2, heads=4, context=12)
NINE = ["w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm"]


def test_a_block_has_exactly_the_nine_published_parts_in_order() -> None:
    block = Block(TINY)
    assert [name.removesuffix(".weight") for name, _ in block.named_parameters()] == NINE


def test_outside_the_blocks_are_head_norm_and_embedding() -> None:
    names = [name for name, _ in GPT(TINY).named_parameters() if not name.startswith("blocks.")]
    assert sorted(names) == ["embedding.weight", "final_norm.weight", "lm_head.weight"]


def test_a_token_sees_none_that_come_after_it() -> None:
    model = GPT(TINY)
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 0
    assert torch.allclose(model(tokens)[0, :8], model(changed)[0, :8], atol=1e-6)
    assert not torch.allclose(model(tokens)[0, 8:], model(changed)[0, 8:], atol=1e-3)


def test_rotary_positions_depend_on_distance_alone() -> None:
    cos, sin = rotary_tables(12, 4)
    q, k = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4)
    q, k = q.expand(1, 1, 12, 4), k.expand(1, 1, 12, 4)
    products = rotate(q, cos, sin)[0, 0] @ rotate(k, cos, sin)[0, 0].T
    assert torch.allclose(products[0, 3], products[5, 8], atol=1e-5)
    assert not torch.allclose(products[0, 3], products[0, 4], atol=1e-3)


def test_grouped_keys_and_values_equal_repeated_ones() -> None:
    grouped = Block(ModelConfig(dim=16, layers=1, heads=4, kv_heads=2, context=12))
    whole = Block(ModelConfig(dim=16, layers=1, heads=4, context=12))
    state = grouped.state_dict()
    for name in ("w_k.weight", "w_v.weight"):
        state[name] = state[name].view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    whole.load_state_dict(state)
    x, (cos, sin) = torch.randn(2, 12, 16), rotary_tables(12, 4)
    assert torch.allclose(grouped(x, cos, sin), whole(x, cos, sin), atol=1e-5)


def test_the_loss_is_the_mean_over_every_next_token() -> None:
    model = GPT(TINY)
    rows = torch.randint(0, 256, (3, 13), dtype=torch.uint8)
    loss, tokens = next_token_loss(model, rows)
    logits = model(rows[:, :-1].long())
    assert tokens == 36
    assert torch.allclose(loss, F.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1).long()))


def test_it_writes_more_than_its_context_and_the_same_each_time() -> None:
    model = GPT(TINY)
    start = torch.tensor([1, 2, 3])
    written = model.write(start, 20)
    assert len(written) == 23 and torch.equal(written[:3], start)
    assert torch.equal(written, model.write(start, 20))
    assert model.training


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [("demo", 0.8e6, 2e6), ("small", 15e6, 30e6), ("medium", 100e6, 150e6), ("large", 0.85e9, 1.1e9)],
)  # fmt: skip
def test_recipes_size_the_model_from_a_million_to_a_billion(recipe: str, least: float, most: float) -> None:
    text, source = find_recipe(recipe)
    with torch.device("meta"):
        model = GPT(from_toml(RunConfig, text, source=source).model)
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most


@pytest.mark.parametrize(
    "config", [TINY, ModelConfig(), ModelConfig(dim=24, heads=6, kv_heads=2, layers=3, vocab=300, hidden=56)]
)
def test_parameters_are_counted_without_building_the_model(config: ModelConfig) -> None:
    with torch.device("meta"):
        assert config.parameters == sum(parameter.numel() for parameter in GPT(config).parameters())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.layers=16384", "model.dim=12288"), r"A model of 29\.7T parameters needs 950 TB of memory .* has 8 GB"),
        (("batch.size=1000000",), r"500,000 rows of 256 tokens at once on a worker \(batch.size is 1,000,000\) need at"
                                  r" least \S+ TB .* has 8 GB\. .* or batch\.micro_size to fewer rows"),
        (("batch.size=1000000", "batch.micro_size=4"), None),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_figures(
    overrides: tuple[str, ...], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "machine_bytes", lambda: 8 * 10**9)
    config = from_toml(RunConfig, 'name = "x"', source="here", overrides=overrides)
    engine = SimpleNamespace(world=2, ranks=2, pipelines=2, device=torch.device("cpu"), is_led=False)
    if said is None:
        recipe_module._check_memory(config, engine, rows=10**6)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError) as error:
        recipe_module._check_memory(config, engine, rows=10**6)  # type: ignore[arg-type]
    assert re.search(said, str(error.value)), str(error.value)


@pytest.mark.parametrize("config", [ModelConfig(), ModelConfig(dim=96, layers=2, vocab=512, context=64)])
def test_what_rows_need_is_what_a_backward_keeps(config: ModelConfig) -> None:
    model, kept = GPT(config), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        next_token_loss(model, torch.zeros(2, config.context + 1, dtype=torch.long))
    measured = sum(storage.nbytes() for storage in kept.values()) / 4
    assert 0.85 * measured < config.activations(2) <= measured
    assert config.activations(2, checkpointed=True) < config.activations(2, compiled=True) < config.activations(2)
