"""fleet.mean() and fleet.gather(): everybody's values on every worker, to the bit."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import potluck
from potluck.engine.engine import Engine
from potluck.engine.own_values import _read
from potluck.errors import ConfigError, PotluckError
from tests.quick import first_of
from tests.ranks import run_ranks


def values(rank: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(rank)
    rows = torch.randn(rank + 1, 3, generator=draw)
    return {"rows": rows, "numbers": torch.arange(rank), "one": torch.tensor(rank / 3), "half": rows.bfloat16()}


def share() -> list[Any]:
    fleet = potluck.init()
    rank = fleet.rank
    own = values(rank)
    weighed = fleet.mean({"loss": 0.1 * (rank + 1), "vector": torch.full((2,), float(rank))}, weight=rank + 1)
    nobody = fleet.mean(math.nan, weight=0.0)
    some = fleet.mean(math.nan if rank else 3.0, weight=0.0 if rank else 1.0)
    found = [fleet.gather(own), fleet.gather(rank), fleet.gather(torch.empty(0) if rank else own["rows"])]
    refused = []
    for attempt in (
        lambda: fleet.gather("text"),
        lambda: fleet.mean(1.0, weight=-1.0),
        lambda: fleet.gather(1.0 if rank else torch.ones(1)),
        lambda: fleet.mean(torch.ones(rank + 1)),
        lambda: fleet.gather(torch.ones(1, rank + 1)),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        refused.append(str(error.value))
    fleet.close()
    return [found, weighed["loss"], weighed["vector"], nobody, some, refused]


def test_every_worker_gets_the_values_of_all() -> None:
    ranks = range(3)
    every = [values(rank) for rank in ranks]
    weight = sum(rank + 1 for rank in ranks)
    for found, loss, vector, nobody, some, refused in run_ranks(3, share):
        gathered, numbers, mostly = found
        for name, own in every[0].items():
            expected = torch.cat([each[name].reshape(-1, *own.shape[1:]) for each in every])
            assert torch.equal(gathered[name], expected) and gathered[name].dtype == own.dtype
        assert numbers == list(ranks) and torch.equal(mostly, every[0]["rows"])
        assert loss == math.fsum(0.1 * (rank + 1) * (rank + 1) for rank in ranks) / weight
        assert torch.equal(vector, torch.full((2,), sum(rank * (rank + 1) for rank in ranks) / weight))
        assert math.isnan(nobody) and some == 3.0
        assert "takes a number, a tensor, or a dictionary" in refused[0] and "weight of at least 0" in refused[1]
        assert "a tensor on one worker and a number on another" in refused[2]
        assert "shapes (1,) and (2,) and (3,)" in refused[3] and "only the first dimension may differ" in refused[4]


def accuracy_of_a_loop(policy: potluck.ApplyPolicy, strategy: potluck.ShardingStrategy) -> list[Any]:
    """Counts what each worker gets right, and asks for all of it after the epoch; in the middle it is refused."""
    fleet = potluck.init(policy, strategy)
    torch.manual_seed(1)
    x = torch.randn(50, 4)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model, _, loader = fleet.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), batch_size=12, micro_batch_size=2
    )
    told, refused = [], ""
    fleet.after_step.append(lambda: told.append(fleet.mean(float(fleet.step_number))))
    for _ in fleet.epochs(2):
        right = rows = 0
        for inputs, labels in loader:
            output = model(inputs)
            if loader.current.counts:
                right, rows = right + int((output.argmax(1) == labels).sum()), rows + len(labels)
            fleet.backward(F.cross_entropy(output, labels), samples=len(labels))
            if not loader.current.last:
                try:
                    fleet.mean(1.0)
                except ConfigError as error:
                    refused = str(error)
            fleet.step()
        told.append(fleet.mean(right / max(1, rows), weight=rows))
        told.append(sum(fleet.gather(rows)))
    fleet.close()
    return [told, refused]


@pytest.mark.parametrize(
    ("policy", "strategy"),
    first_of(
        [
            (potluck.Sync(), potluck.NoShard()),
            (potluck.Sync(), potluck.FullShard()),
            (potluck.Cadence.published(anchor=2, max_anchor=2), potluck.NoShard()),
        ]
    ),
    ids=["sync", "full", "cadence"],
)
def test_a_loop_has_one_accuracy(policy: potluck.ApplyPolicy, strategy: potluck.ShardingStrategy) -> None:
    (first, refused), (other, _) = run_ranks(2, accuracy_of_a_loop, policy, strategy)
    assert first == other and "at the same place" in refused
    assert first[:5] == [1.0, 2.0, 3.0, 4.0, 5.0] and first[6] == 50 and 0 < first[5] <= 1


def test_bytes_that_are_no_value_are_a_sentence() -> None:
    for data in (b"", b"\xff\xff\xff\xff", b"\x02\0\0\0{}", b"\x01\0\0\0[" + bytes(9), bytes(40)):
        with pytest.raises(PotluckError, match="cannot be read"):
            _read(data, 0)


def test_alone_the_mean_is_ones_own() -> None:
    with Engine() as fleet:
        assert fleet.mean(2.5, weight=3) == 2.5 and fleet.gather(7) == [7]
        assert fleet.mean(torch.tensor([1, 2])).tolist() == [1.0, 2.0]


# Evaluation with figures of one's own


def figures_of(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    output = model(x)
    right = (output.argmax(1) == y).float().mean()
    return {"accuracy": right, "loss": F.cross_entropy(output, y), "rows": len(y)}, 2 * len(y)


def look(strategy: str) -> list[Any]:
    x, y, model = rows_and_model()
    if strategy == "stages":
        fleet = potluck.init(stages=potluck.Stages(protocol=potluck.Pipeline(micro_batch_size=4), count=2))
    else:
        fleet = potluck.init(strategy=potluck.FullShard() if strategy == "full" else potluck.NoShard())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    fleet.prepare(model, optimizer, (x, y), batch_size=8, loss=loss)
    found = [
        fleet.evaluate(figures_of, (x, y), 6),
        fleet.evaluate(figures_of, (x[:1], y[:1]), 6),
        fleet.evaluate(loss, (x, y), 6),
        fleet.mean(fleet.rank),
    ]
    fleet.close()
    return found


def rows_and_model() -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    torch.manual_seed(4)
    x = torch.randn(21, 5)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)]
    return x, torch.randint(0, 3, (21,)), nn.Sequential(*blocks, nn.Linear(5, 3))


@pytest.mark.parametrize("strategy", first_of(["none", "full", "stages"]))
def test_an_evaluation_gives_each_figures_mean(strategy: str) -> None:
    x, y, model = rows_and_model()
    with torch.no_grad():
        output = model(x)
    expected = {"loss": F.cross_entropy(output, y).item(), "accuracy": (output.argmax(1) == y).float().mean().item()}
    first, other = run_ranks(2, look, strategy)
    assert first == other
    every, one, plain, mean = first
    assert list(every) == ["loss", "accuracy", "rows"], "the loss is the first"
    assert {name: every[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert one["rows"] == 1.0 and plain == pytest.approx(expected["loss"], rel=1e-5) and mean == 0.5


def test_names_that_change_and_figures_that_are_none_are_refused() -> None:
    x, y, model = rows_and_model()
    with Engine() as fleet:
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), batch_size=8)
        names = iter(["a", "b"])
        with pytest.raises(ConfigError, match="same names for every batch"):
            fleet.evaluate(lambda model, batch: {next(names): 1.0}, (x, y), 11)
        with pytest.raises(ConfigError, match="one number for each name, and 'a' is none"):
            fleet.evaluate(lambda model, batch: {"a": torch.ones(2)}, (x, y), 11)
        with pytest.raises(ConfigError, match="its dictionary is empty"):
            fleet.evaluate(lambda model, batch: {}, (x, y), 11)


# A loss that compares rows


def contrastive(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    logits = scale.exp() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    own = torch.arange(len(a))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.left(a), self.right(b), self.scale * 1.0


def pairs() -> Any:
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(25, 4, generator=draw), torch.randn(25, 5, generator=draw))


def compare_all(strategy: str, shares: tuple[float, ...]) -> dict[str, Any]:
    with potluck.init(policy=potluck.Sync(shares=shares), strategy=getattr(potluck, strategy)()) as fleet:
        model = Towers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = DataLoader(pairs(), batch_size=8)  # the last step has one row
        model, optimizer, loader = fleet.prepare(model, optimizer, data)  # type: ignore[assignment]
        losses = []
        for _ in fleet.epochs(2):
            for a, b in loader:
                left, right, scale = model(a, b)
                loss = contrastive(fleet.all_gather(left), fleet.all_gather(right), scale)
                fleet.backward(loss, samples=len(a))
                fleet.step()
                losses.append(fleet.last_step.loss)  # type: ignore[union-attr]
        return {"losses": losses, "weights": fleet.state_dict()}


def compare_alone() -> dict[str, Any]:
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for a, b in DataLoader(pairs(), batch_size=8):
            loss = contrastive(*model(a, b))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "weights": model.state_dict()}


@pytest.mark.parametrize(
    ("strategy", "shares"), first_of([("NoShard", (3.0, 1.0)), ("FullShard", ()), ("ShardGradOp", (1.0, 2.0, 1.0))])
)
def test_a_contrastive_loss_is_that_of_one_process_where_rows_are_gathered(
    strategy: str, shares: tuple[float, ...]
) -> None:
    expected = compare_alone()
    for rank, found in enumerate(run_ranks(len(shares) or 2, compare_all, strategy, shares)):
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=2e-6)
        if rank == 0:
            for name, value in expected["weights"].items():
                torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "options", "samples", "said"),
    first_of(
        [
            (potluck.Cadence.published(), {}, 8, "Use the Sync policy in a process group"),
            (potluck.Sync(), {"micro_batch_size": 2}, 2, "Leave out micro_batch_size"),
            (potluck.Sync(), {}, 3, "takes samples=8, the rows that this worker gave to it, and not 3"),
        ]
    ),
    ids=["windows", "micro-batches", "other samples"],
)
def test_rows_are_gathered_where_all_have_them_at_once_or_it_is_said(
    policy: Any, options: dict[str, Any], samples: int, said: str
) -> None:
    with potluck.init(policy=policy) as fleet:
        model = Towers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _, loader = fleet.prepare(model, optimizer, pairs(), batch_size=8, **options)  # type: ignore[assignment]
        left, right, scale = model(*next(iter(loader)))
        with pytest.raises(ConfigError, match=said):
            fleet.backward(contrastive(fleet.all_gather(left), fleet.all_gather(right), scale), samples=samples)
