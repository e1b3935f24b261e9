"""Mistakes that are easily made: each is a sentence that says what to do, under every link and door, and early."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import Cadence, FullShard, HybridShard, NoShard, ShardGradOp, Stages, Sync
from potluck.data.plan import BatchConfig
from potluck.errors import ConfigError, Diverged, PotluckError
from potluck.fleet.invite import INVITE
from tests.fleet.fleet import Fleet
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS = 12


def make() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(ROWS, 3)


class Rows(torch.utils.data.Dataset[Tensor]):
    """The seventh cannot be read."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Tensor:
        if row == 7:
            raise ValueError("the image is cut short")
        return self.rows[row]


class Together(Rows):
    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        return [self[row] for row in rows]


def tamper(model: nn.Module, mistake: str) -> None:
    """As one does between backward and step in plain PyTorch."""
    if mistake == "clip_grad_norm_":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if mistake == "clip_grad_value_":
        nn.utils.clip_grad_value_(list(model.parameters())[-1:], 1.0)
    if mistake == ".grad":
        list(model.parameters())[-1].grad = None


def loop(engine: Any, mistake: str) -> str:
    """One epoch of an own loop in which one thing is wrong. What was said, and where the script was by then."""
    model, optimizer, rows = make()
    data: Any = Together(rows) if mistake == "together" else Rows(rows) if mistake == "row" else rows
    if mistake == "ragged":
        data = [row[: 2 + number % 2] for number, row in enumerate(rows)]
    if mistake == "lazy":
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mistake == "meta":
        model = nn.Linear(3, 1, device="meta")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mistake == "expanded":
        model[0].bias = nn.Parameter(torch.ones(1).expand(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mistake == "max_norm":
        model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    try:
        _, _, loader = engine.prepare(model, optimizer, data, batch_size=6)
        if mistake == "new parameter":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
        for batch in loader:
            loss = model(batch).square().mean()
            if mistake == "detached":
                loss = loss.detach()
            if mistake == "loss.backward":
                loss.backward()
            else:
                engine.backward(loss, samples=len(batch))
            tamper(model, mistake)
            engine.step()
            done += 1
    except PotluckError as error:
        return f"{done}: {error}"
    return "nothing was said"


SENTENCES = {
    "lazy": "0.weight has no shape yet: its layer is a lazy one, such as nn.LazyLinear, which takes its shape from"
    " the first batch. Run a batch through the model before prepare().",
    "meta": "0: weight has a shape and no numbers: it is on the device meta.",
    "expanded": "0: The parameter 0.bias is expanded: several of its numbers share one place in memory",
    "new parameter": "0: add_param_group() was called after prepare() with a parameter that was not trained then",
    "detached": "0: The loss has no gradient: no parameter that is trained had a part in it.",
    "loss.backward": "0: step() was called before backward(). Call fleet.backward(loss, samples=...) first, in place of"
    " loss.backward()",
    "clip_grad_norm_": "0: A parameter's .grad was used or changed between fleet.backward() and fleet.step(). It is no"
    " gradient of the step there",
    "clip_grad_value_": "leave out clip_grad_norm_, and ask for it with potluck.init(step=StepConfig(clip=1.0))",
    ".grad": "0: A parameter's .grad was used or changed between fleet.backward() and fleet.step().",
    "row": "Row 7 of the dataset could not be read: ValueError: the image is cut short.\n  File ",
    "together": "could not be read: ValueError: the image is cut short.\n  File ",
    "ragged": "of the dataset could not be put into one batch: RuntimeError: stack expects each tensor to be equal"
    " size",
}


OF_SEVERAL = SENTENCES | {
    "max_norm": "0: 0 is an embedding with max_norm, which scales rows of its weight in each forward: on each worker",
}
"""Where more than one worker has the model, or may have."""


def check(mistake: str, said: str) -> None:
    assert OF_SEVERAL[mistake] in said, said
    if mistake in ("row", "together"):
        frames = said.splitlines()[1:]
        assert 'raise ValueError("the image is cut short")' in frames[-1].strip() or "^" in frames[-1]
        assert len(frames) <= 9 and not any("potluck/engine" in frame for frame in frames)


def in_a_group(policy: Any, strategy: Any, mistakes: list[str]) -> list[str]:
    """One after the other, in one group."""
    with potluck.init():
        return [loop(potluck.init(policy, strategy), mistake) for mistake in mistakes]


@pytest.mark.parametrize("mistake", first_of(SENTENCES))
def test_one_worker_is_told(mistake: str) -> None:
    check(mistake, loop(potluck.Engine(), mistake))


@pytest.mark.parametrize(
    ("policy", "strategy"),
    first_of(
        [(Sync(), NoShard()), (Cadence.published(anchor=2), NoShard()), (Sync(), ShardGradOp()), (Sync(), FullShard())]
    ),
    ids=["sync", "cadence", "zero", "full"],
)
def test_a_group_is_told(policy: Any, strategy: Any) -> None:
    mistakes = [mistake for mistake in OF_SEVERAL if mistake not in ("row", "together")]
    for told in run_ranks(2, in_a_group, policy, strategy, mistakes):
        for mistake, said in zip(mistakes, told, strict=True):
            check(mistake, said)


@pytest.mark.parametrize(
    "strategy",
    first_of([ShardGradOp(keep_gradients=True), FullShard(weights=(1.0, 2.0)), HybridShard(intra_node_size=1)]),
    ids=["zero1", "uneven", "hybrid"],
)
def test_gradients_are_nobodys_to_use_under_any_strategy(strategy: Any) -> None:
    mistakes = ["clip_grad_norm_", "clip_grad_value_", ".grad"]
    for told in run_ranks(2, in_a_group, Sync(), strategy, mistakes):
        for mistake, said in zip(mistakes, told, strict=True):
            check(mistake, said)


def test_of_a_group_the_one_who_has_the_row_is_told() -> None:
    told = [said for (said,) in run_ranks(2, in_a_group, Sync(balance=False), NoShard(), ["row"])]
    (other,) = [said for said in told if "Row 7" not in said]
    assert "stopped answering" in other
    told.remove(other)
    check("row", told[0])


@pytest.mark.parametrize("policy", first_of([Sync(), Cadence.published(anchor=2)]), ids=["sync", "cadence"])
@pytest.mark.parametrize("mistake", first_of(OF_SEVERAL))
def test_a_worker_of_a_host_is_told(policy: Any, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "ragged" and isinstance(policy, Sync):
        pytest.skip("a slice of one row is not ragged")
    fleet = Fleet(tmp_path)
    monkeypatch.setenv(INVITE, fleet.invite.line())
    engine = potluck.init(policy)
    try:
        check(mistake, loop(engine, mistake))
    finally:
        engine.__exit__(ConfigError, ConfigError(), None)
        fleet.close()


@pytest.mark.parametrize("fetchers", first_of([0, 1]))
def test_trainer_names_the_row_also_from_a_process_that_fetches(fetchers: int, tmp_path: Path) -> None:
    model, optimizer, rows = make()
    trainer = potluck.Trainer(
        model,
        optimizer,
        Rows(rows),
        loss=lambda model, batch: model(batch).square().mean(),
        batch_size=BatchConfig(size=4, fetchers=fetchers),
        folder=tmp_path,
        config=potluck.FitConfig(epochs=1, progress=False),
    )
    with pytest.raises(ConfigError) as caught:
        trainer.fit()
    check("row", str(caught.value))


def staged(mistake: str) -> str:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        return loss.detach() if mistake == "detached" else loss

    with potluck.init(stages=Stages(protocol=potluck.Direct())) as fleet:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LazyLinear(3) if mistake == "lazy" else nn.Linear(3, 3)) for _ in range(3)]
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            _, _, loader = fleet.prepare(model, optimizer, torch.randn(ROWS, 3), batch_size=6, loss=loss_of)
            for batch in loader:
                fleet.train(loss_of, batch)
                if mistake == "optimizer.step":
                    optimizer.step()
                tamper(model, mistake)
                fleet.step()
        except PotluckError as error:
            return f"0: {error}"
    return "nothing was said"


@pytest.mark.parametrize("mistake", first_of(["lazy", "optimizer.step", "clip_grad_norm_"]))
def test_stages_are_told(mistake: str) -> None:
    for said in run_ranks(2, staged, mistake):
        check(mistake, said)


class Poisoned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("shift", torch.tensor([0.0, torch.nan, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift)  # type: ignore[no-any-return]


@pytest.mark.parametrize("hosted", first_of([False, True]))
def test_a_buffer_of_nan_is_named_where_a_run_ends_for_it(
    hosted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path)
    if hosted:
        monkeypatch.setenv(INVITE, fleet.invite.line())
    engine = potluck.init() if hosted else potluck.Engine(step=potluck.StepConfig(nonfinite_limit=1))
    model = Poisoned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.prepare(model, optimizer, make()[2], batch_size=6)
    with pytest.raises(Diverged, match=r"the model's buffer shift holds NaN; if forward.. uses it, that is why"):
        for batch in loader:
            engine.backward(model(batch).square().mean(), samples=len(batch))
            engine.step()
    engine.__exit__(Diverged, Diverged(), None)
    fleet.close()


# What may be done after prepare()


def train(add: Callable[[torch.optim.Optimizer, nn.Module], None] | None, world: int) -> Tensor:
    """`add`: gives the head to the optimizer after the first epoch."""
    with potluck.init(Sync(balance=False)) as fleet:
        model, _, rows = make()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        _, _, loader = fleet.prepare(model, optimizer, rows, batch_size=6)
        for epoch in range(2):
            if epoch == 1 and add is not None:
                add(optimizer, model)
            for batch in loader:
                fleet.backward(F.mse_loss(model(batch), batch[:, :1]), samples=len(batch))
                fleet.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def add_head(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})


def test_a_group_of_parameters_that_had_gradients_all_along_may_come_later() -> None:
    expected = train(add_head, 1)
    assert not torch.equal(expected, train(None, 1))
    for found in run_ranks(2, train, add_head, 2):
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)


def test_a_parameter_smuggled_into_the_optimizer_is_a_sentence_at_the_save(tmp_path: Path) -> None:
    fleet = potluck.Engine()
    model, optimizer, rows = make()
    fleet.prepare(model, optimizer, rows, batch_size=4)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match=r"holds a parameter that the model did not have at prepare\(\)"):
        fleet.save(tmp_path)


def test_a_scheduler_and_batches_of_ones_own_go_on_working() -> None:
    fleet = potluck.Engine()
    model, optimizer, rows = make()
    fleet.prepare(model, optimizer)
    with pytest.raises(ConfigError, match=r"in place of loss\.backward"):
        fleet.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for part in rows.split(3):
        fleet.backward(model(part).mean(), samples=3, last=False)
        assert fleet.step() is None
        fleet.backward(model(part).mean(), samples=3)
        fleet.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 16 and fleet.step_number == 4
