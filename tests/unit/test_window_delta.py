"""What a window changed in a model: it travels as parts, and the model goes back and forth to the bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from potluck.engine import slices
from potluck.engine.means import HostMean
from potluck.engine.replica import Replica, StepConfig
from potluck.engine.window_delta import WindowDelta
from potluck.errors import ConfigError
from potluck.link.link import Alone


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


class Worker:
    """A model, and what its windows send to a host."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or make_model()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sent: list[torch.Tensor] = []
        self.mean = HostMean(lambda part, numbers: self.sent.append(numbers.clone()), self.sent.clear)
        replica = Replica(self.model, optimizer, Alone(), torch.device("cpu"), StepConfig())
        self.delta = WindowDelta(replica, self.mean, **options)

    def apply(self, means: list[torch.Tensor], exact: bytes = b"") -> float:
        self.mean.take(means, exact)
        self.delta.apply()
        return self.delta.drift


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_mean_of_changes_is_the_mean_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SMALL_BYTES", 64)
    workers = [Worker() for _ in range(2)]
    models = [worker.model for worker in workers]
    start = state(models[0])
    ends, exact, weights = [], [], [3.0, 1.0]
    for number, worker in enumerate(workers):
        worker.delta.begin()
        for step in range(2):
            train(worker.model, 10 * number + step)
        ends.append(state(worker.model))
        exact.append(worker.delta.exact())
        worker.delta.end(weights[number])
        assert_same(state(worker.model), start)  # whoever asks for the state gets what was agreed on
    sent = [worker.sent for worker in workers]
    assert [len(value) for value in sent[0]] == [part.floats for part in workers[0].mean.described]
    assert len(sent[0]) > 2
    means = [(a + b) / sum(weights) for a, b in zip(*sent, strict=True)]
    told = [worker.apply(means, exact[0]) for worker in workers]
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
    worker = Worker()
    model, before = worker.model, state(worker.model)
    assert worker.apply([torch.ones(part.floats) for part in worker.mean.described]) == 0.0
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] - 1 if p.requires_grad else before[name])


def test_a_window_that_is_lost_leaves_no_trace() -> None:
    worker = Worker()
    model, changes, before = worker.model, worker.delta, state(worker.model)
    changes.begin()
    train(model, 1)
    changes.forget()
    assert_same(state(model), before)
    changes.forget()
    assert_same(state(model), before)


def test_in_the_middle_of_a_window_others_see_what_was_agreed_on() -> None:
    worker = Worker()
    model, changes, agreed = worker.model, worker.delta, state(worker.model)
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
        Worker(nn.Linear(2, 2).double())
