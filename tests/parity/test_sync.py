"""Sync against plain PyTorch in one process: the same batches must give the same weights."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import potluck
from potluck import StepConfig, Sync
from potluck.errors import ConfigError, WorkerLost
from potluck.events import Decided
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, FEATURES = 37, 5
STILL = Sync(balance=False)
"""Parts do not follow the noise of this machine, so that runs can be compared to the bit."""


def make_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 3))


def make_data(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(rows, FEATURES, generator=generator), torch.randn(rows, 3, generator=generator)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def plain(optimizer_name: str, batch_size: int, epochs: int, clip: float | None = None) -> tuple[Tensor, list[float]]:
    """One process, plain PyTorch, over the same order of rows."""
    model = make_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    x, y = make_data()
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(batch_size):
            loss = F.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return flat(model), losses


def ours(
    optimizer_name: str,
    batch_size: int,
    epochs: int,
    micro_batch_size: int | None = None,
    shares: tuple[float, ...] = (),
    clip: float | None = None,
    delay_s: float = 0.0,
) -> dict[str, Any]:
    with potluck.init(Sync(balance=False, shares=shares), step=StepConfig(clip=clip)) as fleet:
        if delay_s:
            slow_down(fleet.link, delay_s)
        model = make_model(seed=3 + fleet.rank)  # every rank starts from rank 0's weights
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        model, optimizer, loader = fleet.prepare(
            model, optimizer, make_data(), batch_size=batch_size, micro_batch_size=micro_batch_size
        )
        losses: list[float] = []
        sentences: list[str] = []
        rows = 0

        def listen(event: Any) -> None:
            if type(event).__name__ == "StepDone":
                losses.append(event.loss)
            elif type(event).__name__ == "EpochDone":
                sentences.append(event.sentence)

        fleet.events.listeners.append(listen)
        for _ in range(epochs):
            for x, y in loader:
                rows += len(x) * loader.current.counts
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
        return {"weights": flat(model), "losses": losses, "rows": rows, "sentences": sentences}


def slow_down(link: Any, delay_s: float) -> None:
    """Collectives that come late on one rank must change nothing."""
    start = link.start_sum

    def late(tensor: Tensor) -> Any:
        time.sleep(delay_s * link.rank)
        return start(tensor)

    link.start_sum = late


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    error = (found - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("optimizer_name", first_of(OPTIMIZERS))
def test_any_optimizer_ends_where_one_process_ends(optimizer_name: str) -> None:
    expected, losses = plain(optimizer_name, batch_size=8, epochs=2)
    found = run_ranks(2, ours, optimizer_name, 8, 2)
    # Optimizers that divide by a root of squares turn the last bit of a small gradient into a larger one.
    assert_close(found[0]["weights"], expected, 1e-6 if optimizer_name == "sgd" else 1e-5)
    torch.testing.assert_close(torch.tensor(found[0]["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    assert torch.equal(found[0]["weights"], found[1]["weights"])


@pytest.mark.parametrize("world", first_of([1, 2, 3, 4]))
@pytest.mark.parametrize("micro_batch_size", first_of([None, 2]))
def test_any_number_of_workers_and_micro_batches_gives_the_same_weights(
    world: int, micro_batch_size: int | None
) -> None:
    # 37 rows in batches of 12: the last step of an epoch has one row, so all workers but one have none.
    expected, losses = plain("sgd", batch_size=12, epochs=2)
    found = run_ranks(world, ours, "sgd", 12, 2, micro_batch_size)
    for result in found:
        assert torch.equal(result["weights"], found[0]["weights"])
        assert len(result["losses"]) == len(losses) == 8
        assert all("each of its 37 samples was used exactly once" in sentence for sentence in result["sentences"])
        assert len(result["sentences"]) == 2
    assert_close(found[0]["weights"], expected)
    assert sum(result["rows"] for result in found) == 2 * ROWS


def test_one_worker_is_plain_pytorch_to_the_bit() -> None:
    def train(step: Any) -> Tensor:
        model = make_model()
        step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), *make_data(32))
        return flat(model)

    def bare(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        for _ in range(5):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def engine(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        fleet = potluck.Engine()
        fleet.prepare(model, optimizer)
        for _ in range(5):
            fleet.backward(F.mse_loss(model(x), y), samples=32)
            fleet.step()

    # 32 is a power of two, so weighing by it and dividing by it again changes no digit.
    assert torch.equal(train(engine), train(bare))


def test_ten_rows_beside_two_give_the_gradient_of_twelve() -> None:
    expected, _ = plain("sgd", batch_size=12, epochs=1)
    found = run_ranks(2, ours, "sgd", 12, 1, None, (10.0, 2.0))
    assert [result["rows"] for result in found] == [31, 6]
    assert_close(found[0]["weights"], expected)


def gradient_of_unequal_rows() -> Tensor:
    with potluck.init(STILL) as fleet:
        model = make_model()
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = flat(model).clone()
        x, y = make_data(12)
        mine = slice(0, 10) if fleet.rank == 0 else slice(10, 12)
        fleet.backward(F.mse_loss(model(x[mine]), y[mine]), samples=len(x[mine]))
        fleet.step()
        return before - flat(model)


def ddp_gradient_of_unequal_rows() -> Tensor:
    import os

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{os.environ['POTLUCK_RENDEZVOUS']}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(make_model())
    x, y = make_data(12)
    mine = slice(0, 10) if rank == 0 else slice(10, 12)
    F.mse_loss(model(x[mine]), y[mine]).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def test_the_gradient_of_unequal_rows_is_that_of_the_whole_batch_where_ddps_is_not() -> None:
    model = make_model()
    x, y = make_data(12)
    F.mse_loss(model(x), y).backward()
    expected = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    assert_close(run_ranks(2, gradient_of_unequal_rows)[0], expected, 1e-6)
    ddp = run_ranks(2, ddp_gradient_of_unequal_rows)[0]
    assert (ddp - expected).norm() / expected.norm() > 0.05


def test_clipping_is_by_the_norm_of_the_whole_gradient() -> None:
    expected, _ = plain("sgd", batch_size=12, epochs=1, clip=0.05)
    unclipped, _ = plain("sgd", batch_size=12, epochs=1)
    found = run_ranks(2, ours, "sgd", 12, 1, 3, (2.0, 1.0), 0.05)
    assert_close(found[0]["weights"], expected)
    assert (unclipped - expected).norm() / expected.norm() > 0.01  # it did clip


def test_late_collectives_change_nothing() -> None:
    expected = run_ranks(3, ours, "adamw", 12, 1)
    found = run_ranks(3, ours, "adamw", 12, 1, None, (), None, 0.01)
    assert torch.equal(found[0]["weights"], expected[0]["weights"])


# Which backwards communicate


def count_sums(micro_batch_size: int) -> list[int]:
    """How many sums were started by the end of each backward of one step."""
    with potluck.init(STILL) as fleet:
        started = 0
        start = fleet.link.start_sum

        def counted(tensor: Tensor) -> Any:
            nonlocal started
            started += 1
            return start(tensor)

        fleet.link.start_sum = counted  # type: ignore[method-assign]
        model = make_model()
        model, _, loader = fleet.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), make_data(8), batch_size=8,
            micro_batch_size=micro_batch_size,
        )  # fmt: skip
        counts = []
        for x, y in loader:
            fleet.backward(F.mse_loss(model(x), y), samples=len(x))
            counts.append(started)
            fleet.step()
        return counts


def test_only_the_last_micro_batch_communicates_and_it_does_so_during_the_backward() -> None:
    for counts in run_ranks(2, count_sums, 1):
        assert counts == [0, 0, 0, 1]  # the one bucket of this small model, before step() was called


# Models that are not a plain chain


class Odd(nn.Module):
    """Tied weights, a frozen part, a part used by even rows only, one used by nobody, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.sometimes = nn.Linear(FEATURES, FEATURES)
        self.never = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.last = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor, *, extra: bool) -> Tensor:
        x = self.again(torch.tanh(self.first(x)))
        x = self.frozen(x)
        if extra:
            x = x + self.sometimes(x)
        return self.last(x)


def odd(batch_norm: bool = False) -> dict[str, Tensor]:
    with potluck.init(STILL) as fleet:
        torch.manual_seed(5)
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
        fleet.prepare(model, optimizer)
        x, y = make_data(12)
        mine = slice(0, 8) if fleet.rank == 0 else slice(8, 12)
        for step in range(4):
            extra = step == 1 and fleet.rank == 0
            if batch_norm:
                model.norm(x[mine])
            fleet.backward(F.mse_loss(model(x[mine], extra=extra), y[mine]), samples=len(x[mine]))
            fleet.step()
        return dict(model.state_dict())


def test_tied_frozen_and_unused_parameters_are_as_in_one_process() -> None:
    torch.manual_seed(5)
    model = Odd()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    x, y = make_data(12)
    for step in range(4):
        parts = [slice(0, 8), slice(8, 12)]
        losses = [
            F.mse_loss(model(x[part], extra=step == 1 and i == 0), y[part]) * len(x[part])
            for i, part in enumerate(parts)
        ]
        (sum(losses) / 12).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    found = run_ranks(2, odd)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(
            found[0][name], expected, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
        assert torch.equal(found[0][name], found[1][name]), name
    # Weight decay would have moved these, had they got a gradient of zeros instead of none.
    assert torch.equal(found[0]["never.weight"], start["never.weight"])
    assert torch.equal(found[0]["frozen.weight"], start["frozen.weight"])
    assert not torch.equal(found[0]["sometimes.weight"], start["sometimes.weight"])


def test_running_statistics_become_one() -> None:
    found = run_ranks(2, odd, True)
    x, _ = make_data(12)
    expected = torch.zeros(FEATURES)
    for _ in range(4):  # each step adds a tenth of the ranks' means, weighted by their rows
        expected = 0.9 * expected + 0.1 * (8 * x[:8].mean(0) + 4 * x[8:].mean(0)) / 12
    torch.testing.assert_close(found[0]["norm.running_mean"], expected)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(found[0][name], found[1][name])
    assert found[0]["norm.num_batches_tracked"] == 4


# Language models count tokens


def padded_tokens() -> Tensor:
    """Each rank's mean is over its own unpadded tokens."""
    with potluck.init(STILL) as fleet:
        torch.manual_seed(1)
        model = nn.Embedding(10, 10)
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, -100, -100, -100, -100]])[fleet.rank]
        kept = tokens[tokens >= 0]
        fleet.backward(F.cross_entropy(model(kept[:-1]), kept[1:]), samples=len(kept) - 1)
        fleet.step()
        return model.weight.detach()


def test_tokens_weigh_alike_however_the_padding_falls() -> None:
    torch.manual_seed(1)
    model = nn.Embedding(10, 10)
    logits = torch.cat([model(torch.tensor([1, 2, 3, 4, 5])), model(torch.tensor([7]))])
    F.cross_entropy(logits, torch.tensor([2, 3, 4, 5, 6, 8])).backward()
    expected = model.weight.detach() - model.weight.grad
    assert_close(run_ranks(2, padded_tokens)[0], expected, 1e-6)


# What is refused


def forget_step() -> str:
    with potluck.init(STILL) as fleet:
        model = make_model()
        _, _, loader = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), make_data(), batch_size=4)
        try:
            for x, y in loader:
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
        except ConfigError as error:
            return str(error)
        return ""


def test_a_forgotten_step_is_said() -> None:
    assert all("step() was not called" in said for said in run_ranks(2, forget_step))


def different_models() -> str:
    with potluck.init(STILL) as fleet:
        model = nn.Linear(4, 4 + fleet.rank)
        try:
            fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ConfigError as error:
            return str(error)
        return ""


def test_different_models_are_told_apart_by_the_first_parameter_that_differs() -> None:
    said = run_ranks(2, different_models)
    assert "on worker 0 it has weight (4, 4) torch.float32 where worker 1 has weight (5, 4)" in said[0]


def too_small_a_batch() -> str:
    with potluck.init(STILL) as fleet:
        model = make_model()
        try:
            fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), make_data(), batch_size=2)
        except ConfigError as error:
            return str(error)
        return ""


def test_a_batch_smaller_than_the_fleet_is_refused() -> None:
    assert "A batch of 2 does not fit 3 workers" in run_ranks(3, too_small_a_batch)[0]


def other_rows(what: str, policy: Any) -> str:
    """The second worker has as many rows, but not the same; or another learning rate."""
    with potluck.init(policy) as fleet:
        model, is_other = make_model(), fleet.rank == 1
        x, y = make_data()
        if what == "one number" and is_other:
            y = y.clone()
            y[-1] += 1
        lr = 0.2 if what == "lr" and is_other else 0.1
        try:
            fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), (x, y), batch_size=8)
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("policy", first_of([STILL, potluck.Cadence.published()]), ids=["sync", "cadence"])
def test_workers_with_other_data_of_as_many_rows_do_not_begin(policy: Any) -> None:
    assert run_ranks(2, other_rows, "nothing", policy) == ["", ""]
    first, second = run_ranks(2, other_rows, "one number", policy)
    assert first.startswith("Worker 0 and worker 1 have as many rows, but what is in them is not the same. Give every")
    assert second.startswith("Worker 1 and worker 0 have as many rows")


def test_workers_with_another_learning_rate_do_not_begin() -> None:
    said = run_ranks(2, other_rows, "lr", STILL)
    assert said[0] == (
        "Worker 0 has optimizer.lr = 0.1, and worker 1 has 0.2. Give every worker the same optimizer and settings."
    )
    assert said[1].startswith("Worker 1 has optimizer.lr = 0.2, and worker 0 has 0.1")


def sparse() -> str:
    with potluck.init(STILL) as fleet:
        model = nn.Embedding(10, 4)
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            found = nn.functional.embedding(torch.tensor([1, 2]), model.weight, sparse=True)
            fleet.backward(found.sum(), samples=2)
        except ConfigError as error:
            return str(error)
        return ""


def test_sparse_gradients_are_refused_by_name() -> None:
    assert "The gradient of weight is sparse" in run_ranks(2, sparse)[0]


def another_models_optimizer() -> str:
    with potluck.init(STILL) as fleet:
        try:
            fleet.prepare(make_model(), torch.optim.SGD(make_model().parameters(), lr=0.1))
        except ConfigError as error:
            return str(error)
        return ""


def test_an_optimizer_of_another_model_is_refused() -> None:
    assert "not one of the model's" in another_models_optimizer()


def twice(last: bool | None) -> str:
    with potluck.init(STILL) as fleet:
        model = make_model()
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = make_data(8)
        try:
            fleet.backward(F.mse_loss(model(x[:4]), y[:4]), samples=4, last=last)
            fleet.backward(F.mse_loss(model(x[4:]), y[4:]), samples=4)
        except ConfigError as error:
            return str(error)
        fleet.step()
        return "stepped"


@pytest.mark.parametrize("world", first_of([1, 2]))
def test_a_second_backward_after_the_last_is_refused_and_one_before_it_is_not(world: int) -> None:
    assert all("pass last=False" in said for said in run_ranks(world, twice, None))
    assert run_ranks(world, twice, False) == ["stepped"] * world


def refuse(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def test_mistakes_in_a_loop_of_ones_own_are_sentences() -> None:
    fleet = potluck.Engine()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = make_data(8)
    assert "Call prepare(model, optimizer, ...) first" in refuse(lambda: fleet.backward(torch.ones(()), samples=1))
    assert "takes a torch.nn.Module" in refuse(lambda: fleet.prepare(len, optimizer))  # type: ignore[call-overload]
    said = refuse(lambda: fleet.prepare(model, optimizer, (x, y), DataLoader(x)))  # type: ignore[call-overload]
    assert "1 argument more: DataLoader. Data for validation go to fleet.evaluate()" in said
    assert "a scheduler to scheduler=" in said
    _, _, loader = fleet.prepare(model, optimizer, (x, y), batch_size=4)
    assert "prepare() was called already" in refuse(lambda: fleet.prepare(model, optimizer))
    next(iter(loader))
    assert "step() was called before backward()" in refuse(fleet.step)
    assert "not a tensor of shape (8, 3)" in refuse(lambda: fleet.backward(model(x), samples=8))
    assert "not -8" in refuse(lambda: fleet.backward(model(x).mean(), samples=-8))
    assert "batch_size is the rows of a step" in refuse(
        lambda: potluck.Trainer(make_model(), optimizer, x, loss=len, batch_size=0, folder="x")
    )
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16, fp16, not 'fp8'"):
        StepConfig(precision="fp8")  # type: ignore[arg-type]


def with_habits(habit: bool) -> Tensor:
    """zero_grad() before every micro-batch, as in a plain loop, must not drop what earlier ones gave."""
    with potluck.init(STILL) as fleet:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = fleet.prepare(model, optimizer, make_data(24), batch_size=8, micro_batch_size=2)
        for x, y in loader:
            if habit:
                optimizer.zero_grad()
                model.zero_grad()
            fleet.backward(F.mse_loss(model(x), y), samples=len(x))
            fleet.step()
        return flat(model)


def test_a_zero_grad_out_of_habit_changes_nothing() -> None:
    assert torch.equal(run_ranks(2, with_habits, True)[0], run_ranks(2, with_habits, False)[0])


def different_data() -> str:
    with potluck.init(STILL) as fleet:
        model = make_model()
        try:
            fleet.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(10 + fleet.rank, 5), batch_size=4
            )
        except ConfigError as error:
            return str(error)
        return ""


def test_workers_with_different_data_are_told_before_they_wait_for_each_other() -> None:
    assert "worker 0 has 10 rows in batches of 4" in run_ranks(2, different_data)[0]


def unfreeze() -> str:
    with potluck.init(STILL) as fleet:
        model = make_model()
        model[0].requires_grad_(False)  # type: ignore[index, operator]
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model[0].requires_grad_(True)  # type: ignore[index, operator]
        x, y = make_data(4)
        try:
            fleet.backward(F.mse_loss(model(x), y), samples=4)
        except ConfigError as error:
            return str(error)
        return ""


def test_unfreezing_after_prepare_is_refused() -> None:
    assert "Unfreeze it before prepare()" in run_ranks(2, unfreeze)[0]


def norms() -> list[float]:
    """The optimizer holds only the last layer; the gradients of the first must not pile up."""
    with potluck.init(STILL, step=StepConfig(clip=1.0)) as fleet:
        model = make_model()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index]
        _, _, loader = fleet.prepare(model, optimizer, make_data(24), batch_size=8)
        found = []
        for x, y in loader:
            fleet.backward(F.mse_loss(model(x), y), samples=len(x))
            found.append(fleet.step().grad_norm)  # type: ignore[union-attr]
        return found


def test_an_optimizer_over_part_of_the_model_sees_the_same_norms_on_any_number_of_workers() -> None:
    torch.testing.assert_close(run_ranks(1, norms)[0], run_ranks(2, norms)[0])


def nothing_to_count() -> dict[str, Any]:
    """Worker 1's rows are all masked: its mean is over nothing."""
    with potluck.init(STILL) as fleet:
        model = make_model()
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = make_data(8)
        mine = x[:0] if fleet.rank else x
        event = fleet_step(fleet, model, mine, y[: len(mine)])
        return {"weights": flat(model), "kind": type(event).__name__}


def fleet_step(fleet: Any, model: nn.Module, x: Tensor, y: Tensor) -> Any:
    fleet.backward(F.mse_loss(model(x), y), samples=len(x))
    return fleet.step()


def test_a_mean_over_nothing_weighs_nothing() -> None:
    found = run_ranks(2, nothing_to_count)
    assert [result["kind"] for result in found] == ["StepDone"] * 2
    assert torch.isfinite(found[0]["weights"]).all()
    assert torch.equal(found[0]["weights"], found[1]["weights"])


# The group


def vanish() -> str:
    fleet = potluck.init(STILL)
    if fleet.rank == 1:
        return "left"  # and its process ends without a goodbye
    try:
        fleet.link.start_sum(torch.ones(10)).wait()
    except WorkerLost as error:
        return f"noticed: {error}"
    return ""


def test_a_vanished_peer_is_noticed_at_once() -> None:
    found = run_ranks(2, vanish, timeout_s=20)
    assert found[0].startswith("noticed: Another worker stopped answering")


def refused_by_the_backend() -> str:
    fleet = potluck.init(STILL)
    try:
        fleet.link.start_sum(torch.ones(2, dtype=torch.int16)).wait()
    except WorkerLost:
        return "blamed a peer"
    except RuntimeError as error:
        return str(error)
    return "taken"


def test_what_the_backend_cannot_do_is_not_blamed_on_a_peer() -> None:
    assert "blamed a peer" not in run_ranks(2, refused_by_the_backend)


def several_buckets() -> dict[str, Any]:
    from potluck.replica import buckets

    buckets.BUCKET_BYTES = buckets.FIRST_BYTES = 16  # less than any parameter
    with potluck.init(STILL) as fleet:
        model = make_model()
        model, _, loader = fleet.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), make_data(), batch_size=12
        )
        assert fleet.run.replica is not None and fleet.run.replica._buckets is not None
        sizes = [len(bucket.parameters) for bucket in fleet.run.replica._buckets.buckets]
        for _ in range(2):
            for x, y in loader:
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
        return {"weights": flat(model), "sizes": sizes}


def test_many_buckets_give_what_one_gives() -> None:
    expected, _ = plain("sgd", batch_size=12, epochs=2)
    found = run_ranks(2, several_buckets)
    assert found[0]["sizes"] == [1, 1, 1, 1]
    assert_close(found[0]["weights"], expected)


def balanced(delay_s: float) -> dict[str, Any]:
    with potluck.init() as fleet:
        model = make_model()
        model, _, loader = fleet.prepare(model, OPTIMIZERS["sgd"](model.parameters()), make_data(), batch_size=12)
        parts, reasons = [], []
        fleet.events.listeners.append(
            lambda event: reasons.append(event.reason) if isinstance(event, Decided) else None
        )
        for _ in range(8):
            for x, y in loader:
                time.sleep(delay_s * len(x) * (3 if fleet.rank == 1 else 1))
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
                parts.append(len(x))
        assert fleet.last_epoch is not None and fleet.last_epoch.used == ROWS
        return {"weights": flat(model), "parts": parts, "reasons": reasons}


def test_parts_follow_speed_and_the_gradient_is_still_the_whole_batchs() -> None:
    fast, slow = run_ranks(2, balanced, 0.003)
    assert torch.equal(fast["weights"], slow["weights"])
    assert (fast["parts"][0], slow["parts"][0]) == (6, 6)
    assert fast["parts"][-2] > 2 * slow["parts"][-2]  # of the last whole step
    assert fast["reasons"] == slow["reasons"] and fast["reasons"][0].startswith("Worker 1 takes")
    torch.testing.assert_close(fast["weights"], plain("sgd", 12, 8)[0])
