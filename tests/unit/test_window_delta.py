"""What a window changed in a model: it travels as parts, and the model goes back and forth to the bit."""

import copy

import pytest
import torch
from torch import nn

from potluck.coded_numbers import CODINGS, Coding
from potluck.coded_tensors import round_
from potluck.errors import ConfigError
from potluck.link.link import Alone
from potluck.replica.replica import Replica, StepConfig
from potluck.sums import slices
from potluck.sums.means import HostMean
from potluck.sums.window_delta import AT_ONCE, WindowDelta, difference_


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

    def __init__(self, model: nn.Module | None = None, coding: Coding | None = None) -> None:
        self.model = model or make_model()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sent: list[torch.Tensor] = []
        self.mean = HostMean(lambda part, numbers: self.sent.append(numbers.clone()), self.sent.clear, coding=coding)
        replica = Replica(self.model, optimizer, Alone(), torch.device("cpu"), StepConfig())
        self.delta = WindowDelta(replica, self.mean)

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
    assert changes.is_agreed


def test_parameters_that_cannot_travel_are_refused() -> None:
    with pytest.raises(ConfigError, match="is float64, and what is trained travels to a host as float32"):
        Worker(nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match=r"is complex64, and .*Keep it as pairs of real numbers"):
        Worker(nn.Linear(2, 2, dtype=torch.complex64))


def test_a_part_that_is_begun_and_never_sent_leaves_no_trace() -> None:
    """Another part begins instead, or the window is agreed on without it."""
    worker = Worker()
    agreed = state(worker.model)
    worker.delta.begin()
    train(worker.model, 1)
    worker.delta.begin()
    assert_same(state(worker.model), agreed)
    train(worker.model, 2)
    found = worker.delta.agreed()
    assert all(torch.equal(found[id(p)], agreed[n]) for n, p in worker.model.named_parameters() if p.requires_grad)
    worker.apply([torch.ones(part.floats) for part in worker.mean.described])
    assert torch.equal(worker.model[0].weight, agreed["0.weight"] - 1)


def test_what_coding_leaves_out_is_sent_with_the_next_change() -> None:
    plain, coded = Worker(), Worker(coding=CODINGS["int4"])
    left = [torch.zeros(part.floats) for part in coded.mean.described[:-1]]
    for seed in range(3):
        for worker in (plain, coded):
            worker.delta.begin()
            train(worker.model, seed)
            worker.delta.end(0.25)
        for numbers, sent, kept in zip(plain.sent, coded.sent, left, strict=False):
            whole = numbers + kept
            assert torch.equal(sent, round_(CODINGS["int4"], whole.clone())) and sent.isfinite().all()
            kept.copy_(whole - sent)
        assert torch.equal(plain.sent[-1], coded.sent[-1])  # buffers are not coded
        means = [numbers * 4 for numbers in plain.sent]
        plain.apply(means)
        coded.apply(means)
    assert any(kept.any() for kept in left)


@pytest.mark.parametrize("how", ["lost", "replaced", "not sent"])
def test_nothing_is_left_of_a_change_that_was_lost(how: str) -> None:
    worker = Worker(coding=CODINGS["int4"])
    worker.delta.begin()
    train(worker.model, 1)
    worker.delta.end(0.25)
    if how == "not sent":
        worker.apply([numbers * 4 for numbers in worker.sent])
        worker.delta.begin()
        train(worker.model, 2)
        worker.delta.forget()
    elif how == "lost":
        worker.delta.forget()
    else:
        worker.delta.start_anew()
    feedback = worker.mean._feedback
    assert feedback is not None
    assert any(left.any() for left in feedback._left.values()) == (how == "not sent")


@pytest.mark.parametrize("special", [[], [-torch.inf], [torch.inf, torch.nan], [3e38, -3e38]])
def test_of_what_is_equal_the_difference_is_0_to_the_bit(special: list[float]) -> None:
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randn(2 * AT_ONCE + 7, generator=draw)
    numbers[: len(special)] = torch.tensor(special)
    numbers[10:20], numbers[20:30] = 0.0, -0.0
    other = numbers.clone()
    other[15:25] *= -1
    other[100:] -= torch.randn(len(other) - 100, generator=draw) / 8
    expected = torch.where(numbers == other, 0.0, numbers - other)
    assert torch.equal(difference_(numbers, other).view(torch.int32), expected.view(torch.int32))
