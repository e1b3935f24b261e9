"""What a window changed in a model: it travels as parts, and the model goes back and forth to the bit."""

import copy

import pytest
import torch
from torch import nn

from potluck.engine import slices
from potluck.engine.changes import Changes
from potluck.engine.replica import find_blocks
from potluck.errors import ConfigError


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(*layers), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[3].bias.requires_grad_(False)
    model[1][0][0].bias.data[0] = -torch.inf  # a unit that is switched off for good
    return model


def train(model: nn.Module, seed: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_mean_of_changes_is_the_mean_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SMALL_BYTES", 64)
    models = [make_model() for _ in range(2)]
    start = state(models[0])
    every = [Changes(model, find_blocks(model)) for model in models]
    ends, sent, exact, weights = [], [], [], [3.0, 1.0]
    for number, (model, changes) in enumerate(zip(models, every, strict=True)):
        changes.begin()
        for step in range(2):
            train(model, 10 * number + step)
        ends.append(state(model))
        exact.append(changes.exact())
        sent.append([value.clone() for _, value in changes.finish(weights[number])])
        assert_same(state(model), start)  # whoever asks for the state gets what was agreed on
    assert [len(value) for value in sent[0]] == [part.floats for part in every[0].described] and len(sent[0]) > 2
    means = [(a + b) / sum(weights) for a, b in zip(*sent, strict=True)]
    told = [changes.apply(means, exact[0]) for changes in every]
    assert_same(state(models[0]), state(models[1]))
    expected = {name: (3 * ends[0][name] + ends[1][name]) / 4 for name in start}
    for name, found in state(models[0]).items():
        torch.testing.assert_close(found.float(), expected[name].float().round(decimals=6), rtol=1e-5, atol=1e-6)
    trained = [name for name, p in models[0].named_parameters() if p.requires_grad]
    flat = [torch.cat([s[name].reshape(-1) for name in trained]).nan_to_num(0.0, 0.0, 0.0) for s in (*ends, expected)]
    for own, distance in zip(flat[:2], told, strict=True):
        assert distance == pytest.approx(float((own - flat[2]).norm() / flat[2].norm()), rel=1e-4)
    assert all(distance > 0 for distance in told)


def test_whoever_replays_subtracts_and_was_nowhere_else() -> None:
    model = make_model()
    changes = Changes(model, find_blocks(model))
    before = state(model)
    means = [torch.ones(part.floats) for part in changes.described]
    assert changes.apply(means) == 0.0
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] - 1 if p.requires_grad else before[name])


def test_a_window_that_is_lost_leaves_no_trace() -> None:
    model = make_model()
    changes = Changes(model, find_blocks(model))
    before = state(model)
    changes.begin()
    train(model, 1)
    changes.forget()
    assert_same(state(model), before)
    changes.forget()
    assert_same(state(model), before)


def test_in_the_middle_of_a_window_others_see_what_was_agreed_on() -> None:
    model = make_model()
    changes = Changes(model, find_blocks(model))
    agreed = state(model)
    changes.begin()
    train(model, 1)
    own = state(model)
    with changes.as_agreed():
        assert_same(state(model), agreed)
    assert_same(state(model), own)
    with changes.as_agreed():  # the connection is lost meanwhile, and other weights come
        changes.forget()
        model.load_state_dict(copy.deepcopy(make_model(seed=7).state_dict()))
        changes.start_anew()
    assert_same(state(model), make_model(seed=7).state_dict())
    assert not changes.is_open


def test_parameters_that_cannot_travel_are_refused() -> None:
    with pytest.raises(ConfigError, match="travel to a host as float32"):
        Changes(nn.Linear(2, 2).double(), [])
