"""What a step changed in a model's buffers: what has a mean is averaged, all else is one worker's to the bit."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck.errors import ConfigError, PotluckError
from potluck.replica.buffers import MOST_EXACT_BYTES, SavedBuffers
from tests.ranks import run_ranks

INF, NAN = math.inf, math.nan


def holder(**buffers: Tensor) -> nn.Module:
    model = nn.Module()
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


def one_by_one(models: list[nn.Module], weights: list[float]) -> None:
    """As a host does it: one change after the other, added up in float32."""
    saved = [SavedBuffers(model) for model in models]
    start = [torch.zeros_like(buffer) for buffer in saved[0].now()]
    told = [each.for_host(start, weight) for each, weight in zip(saved, weights, strict=True)]
    mean = sum(numbers for numbers, _ in told) / sum(weights)
    for each in saved:
        each.apply_from_host(start, mean, told[0][1])


KINDS = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64,
    torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_type_comes_back_as_itself(kind: torch.dtype) -> None:
    first, second = torch.tensor([[0, 1], [1, 0]]).to(kind), torch.tensor([[0, 1], [0, 1]]).to(kind)
    models = [holder(b=first.clone()), holder(b=second.clone())]
    one_by_one(models, [1.0, 1.0])
    has_mean = kind.is_floating_point or kind.is_complex
    expected = torch.tensor([[0, 1], [0.5, 0.5]]).to(kind) if has_mean else first
    for model in models:
        assert model.b.dtype == kind and model.b.shape == (2, 2)
        assert torch.equal(model.b.to(torch.complex128), expected.to(torch.complex128))


def test_integers_keep_every_digit() -> None:
    numbers = torch.tensor([200_000_010, (1 << 53) + 1, -(1 << 63), (1 << 63) - 1])
    models = [holder(b=numbers.clone()), holder(b=numbers.clone())]
    one_by_one(models, [3.0, 5.0])
    assert all(torch.equal(model.b, numbers) for model in models)


def changed(before: list[Any], after: list[list[Any]], weights: list[float]) -> list[Any]:
    """What the worker has after a step that began with `before`, and in which each of them had `after`."""
    models = [holder(b=torch.tensor(before)) for _ in after]
    saved = [SavedBuffers(model) for model in models]
    start = [each.copy() for each in saved]
    for model, values in zip(models, after, strict=True):
        model.b.copy_(torch.tensor(values))
    told = [each.for_host(was, w) for each, was, w in zip(saved, start, weights, strict=True)]
    mean = sum(numbers for numbers, _ in told) / sum(weights)
    for each, was in zip(saved, start, strict=True):
        each.apply_from_host(was, mean, told[0][1])
    assert all(torch.equal(model.b.view(torch.int32), models[0].b.view(torch.int32)) for model in models[1:])
    return list(models[0].b.tolist())


def test_what_nobody_changed_is_not_touched() -> None:
    constants = torch.tensor([-INF, INF, 0.1, -0.0, 1e-45]).tolist()
    assert changed(constants, [constants, constants, constants], [0.3, 0.3, 0.4]) == constants
    assert math.copysign(1, changed([-0.0], [[-0.0], [-0.0]], [1.0, 2.0])[0]) == -1
    assert math.isnan(changed([NAN], [[NAN], [NAN]], [1.0, 1.0])[0])


def test_what_is_or_becomes_infinite_is_the_firsts() -> None:
    # A maximum that begins at -inf, an average that begins at NaN, a mask that is filled, one that is lifted.
    before = [-INF, NAN, 0.0, -INF, 1.0]
    found = changed(before, [[3.0, 2.0, -INF, 0.0, 2.0], [5.0, 4.0, -INF, -INF, 4.0]], [1.0, 3.0])
    assert found == [3.0, 2.0, -INF, 0.0, 3.5]


def test_what_only_another_changed_to_infinity_is_left_out() -> None:
    assert changed([1.0, -INF], [[2.0, -INF], [INF, 7.0]], [1.0, 1.0]) == [1.5, -INF]


def test_a_change_too_large_for_float32_is_the_firsts() -> None:
    models = [holder(b=torch.tensor(value, dtype=torch.float64)) for value in (1e300, 1e299)]
    one_by_one(models, [1.0, 1.0])
    assert [model.b.item() for model in models] == [1e300, 1e300]


def test_a_buffer_that_forward_replaces_is_still_seen() -> None:
    model = holder(mean=torch.zeros(2))
    saved = SavedBuffers(model)
    before = saved.copy()
    model.mean = 0.5 * model.mean + 1.0
    moved, exact = saved.changes(before)
    assert moved[0].tolist() == [1.0, 1.0] and not exact
    saved.put(before)
    assert model.mean.tolist() == [0.0, 0.0] and model.state_dict()["mean"].tolist() == [0.0, 0.0]
    model.mean = torch.ones(2, dtype=torch.bfloat16)  # as autocast would
    saved.apply(before, [torch.tensor([0.25, 0.0])], b"")
    assert model.mean.dtype == torch.float32 and model.mean.tolist() == [0.25, 0.0]


def test_a_buffer_that_changes_its_shape_is_named() -> None:
    model = holder(cache=torch.zeros(2))
    saved = SavedBuffers(model)
    model.cache = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"buffer cache had the shape \(2,\) at prepare\(\), and is of shape \(3,\)"):
        saved.copy()


def test_an_expanded_buffer_gets_memory_of_its_own() -> None:
    model = holder(places=torch.arange(3).expand(2, 3))
    saved = SavedBuffers(model)
    saved.put([torch.zeros(2, 3, dtype=torch.int64)])
    assert model.places.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_buffers_that_are_not_saved_and_those_of_two_names_are_told_apart() -> None:
    model = nn.Sequential(holder(own=torch.zeros(1)), holder())
    model[1].register_buffer("same", model[0].own)
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    model.register_buffer("nothing", None)
    assert SavedBuffers(model).names == ["0.own"]


def test_more_than_a_message_takes_is_said() -> None:
    model = holder(mask=torch.zeros(MOST_EXACT_BYTES + 1, dtype=torch.bool))
    saved = SavedBuffers(model)
    before = saved.copy()
    saved.for_host(before, 1.0)
    model.mask[5] = True
    with pytest.raises(ConfigError, match="bytes changed in buffers that have no mean"):
        saved.for_host(before, 1.0)


def test_damaged_words_of_a_host_are_refused_and_change_nothing() -> None:
    model = holder(a=torch.tensor([1, 2]), b=torch.tensor([1.0, -INF]))
    saved = SavedBuffers(model)
    before = saved.copy()
    model.a.add_(1)
    model.b.fill_(0.0)
    told = saved.changes(before).exact
    for cut in range(1, len(told)):
        with pytest.raises(PotluckError, match="damaged"):
            saved.apply(before, [None], told[:cut])
    other = SavedBuffers(holder(a=torch.zeros(1, dtype=torch.int8), b=torch.zeros(4)))
    for strange in (other, SavedBuffers(holder(b=torch.zeros(2)))):
        with pytest.raises(PotluckError, match="damaged"):
            strange.apply(strange.copy(), [None], told)
        assert all(not buffer.any() for buffer in strange.now())


def test_the_one_with_a_nan_is_named() -> None:
    assert SavedBuffers(holder(mask=torch.tensor([-INF]), n=torch.tensor(1))).with_nan() is None
    assert SavedBuffers(holder(mask=torch.tensor([-INF]), mean=torch.tensor([0.0, NAN]))).with_nan() == "mean"


# Over a process group


def average() -> list[Any]:
    import potluck

    link = potluck.init().link
    model = holder(
        mask=torch.tensor([-INF, 0.0]), third=torch.tensor(0.1), steps=torch.tensor(0.0), count=torch.tensor(1 << 60),
        short=torch.tensor(7, dtype=torch.int16), mean=torch.zeros(1, dtype=torch.float64),
    )  # fmt: skip
    saved = SavedBuffers(model)
    sums = []
    start_sum = link.start_sum
    link.start_sum = lambda tensor: (sums.append(tensor.numel()), start_sum(tensor))[1]
    weight = (0.0, 1 / 3, 2 / 3)[link.rank]  # the first has no rows of this step
    for step in range(1, 4):
        before = saved.copy()
        if weight:
            model.steps += 1
            model.count += 1
            model.short += link.rank
            model.mean += link.rank
        saved.average(link, weight, before)
        assert model.steps.item() == step, model.steps.item()
    assert sums == [2, 2, 2], "what nobody changed does not travel"
    link.broadcast(model.short)
    return [model.mask, model.third, model.count, model.short, model.mean]


def test_ranks_agree_and_the_first_with_rows_speaks_for_what_has_no_mean() -> None:
    for mask, third, count, short, mean in run_ranks(3, average):
        assert mask.tolist() == [-INF, 0.0] and third.item() == torch.tensor(0.1).item()
        assert count.item() == (1 << 60) + 3 and short.item() == 10
        assert mean.item() == pytest.approx(3 * (1 / 3 + 4 / 3), rel=1e-15)
