"""Stages, each held by one rank or split over several, against plain PyTorch in float64: where numbers are not finite,
where micro-batches have no samples, where weights are tied, and in every checkpoint of it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import DataStore, Direct, Pipeline, Stages
from potluck.agree.step_report import norm_of_stages
from potluck.data.rows import mix
from potluck.errors import PotluckError
from potluck.events import StepDone, StepSkipped
from potluck.sharding.strategy import FullShard, HybridShard, NoShard, ShardGradOp
from potluck.stages import stage_planner
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, WIDE, BATCH = 18, 6, 6
"""Three steps an epoch, of three micro-batches of two rows each."""
MICRO = Pipeline(micro_batch_size=2)
TWO = Stages(protocol=MICRO, count=2, cuts=(3,))
"""After the second of four blocks."""


NOT_ENTERED = -2
"""Of rows that leave out the first layer."""


class Spoil(torch.autograd.Function):
    """The same numbers, with a gradient that is multiplied."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Block(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE) / 3)
        self.bias = nn.Parameter(torch.zeros(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, Spoil.apply(self.weight, self.factor), self.bias))


class Net(nn.Module):
    """Odd sizes; a frozen parameter and a buffer on either side of the cut."""

    def __init__(self, tied: str = "") -> None:
        super().__init__()
        self.enters = True
        self.enter = nn.Linear(WIDE, WIDE, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDE)
        self.norm.bias.requires_grad_(False)
        self.leave = nn.Linear(WIDE, WIDE, bias=False)
        self.register_buffer("shift", torch.full((WIDE,), 0.25))
        if tied == "ends":
            self.leave.weight = self.enter.weight
        if tied == "blocks":
            self.blocks[3].weight = self.blocks[1].weight
        if tied == "outside":
            self.leave.weight = self.blocks[1].weight
        if tied == "modules":
            self.blocks[2] = self.blocks[1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) if self.enters else x
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x)) + self.shift  # type: ignore[no-any-return]


def make(tied: str = "") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(tied).double()
    for layer in (*model.blocks[2:], model.norm, model.leave) if tied == "frozen" else ():
        layer.requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def order(epoch: int) -> list[int]:
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).tolist()  # type: ignore[no-any-return]


def rows(
    spoiled: dict[int, tuple[int, float]], without: tuple[int, ...], entered_not: tuple[int, ...] = ()
) -> tuple[Tensor, ...]:
    """By place in the first epoch: which rows spoil which block's gradient, and which have no samples."""
    torch.manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDE, dtype=torch.float64)
    mask, where, factor = torch.ones(ROWS).double(), torch.full((ROWS,), -1), torch.ones(ROWS).double()
    for place, (block, value) in spoiled.items():
        where[order(0)[place]], factor[order(0)[place]] = block, value
    for place in entered_not:
        where[order(0)[place]] = NOT_ENTERED
    for place in without:
        mask[order(0)[place]] = 0.0
    return x, y, mask, where, factor


def loss_of(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """A mean over the samples, written by hand: of none it is 0 / 0."""
    x, y, mask, where, factor = batch
    model.enters = not (where == NOT_ENTERED).all()  # type: ignore[assignment]
    for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
        block.factor = float(factor[where == index].prod())
    error = (model(x) - y).square().mean(1)
    return (error * mask).sum() / mask.sum(), float(mask.sum())


def plain(steps: int, case: dict[str, Any]) -> dict[str, Any]:
    """One process. A step that is not finite, or has no samples, is left out."""
    model, optimizer = make(case.get("tied", ""))
    data = rows(case.get("spoiled", {}), case.get("without", ()), case.get("entered_not", ()))
    told: list[Any] = []
    for step in range(steps):
        epoch, at = divmod(step * BATCH, ROWS)
        batch = tuple(part[order(epoch)[at : at + BATCH]] for part in data)
        loss, samples = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        trained = [p for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        if samples and norm.isfinite():
            if case.get("clip") is not None:
                torch.nn.utils.clip_grad_norm_(trained, case["clip"])
            optimizer.step()
            told.append(loss.item())
        else:
            told.append("skipped")
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = loss_of(model, data)[0].item()
    return {"told": told, "weights": dict(model.named_parameters()), "evaluated": evaluated}


def train(case: dict[str, Any], upto: int, folder: str = "") -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    policy, strategy = case.get("policy", potluck.Sync(balance=False)), case.get("strategy", NoShard())
    step = potluck.StepConfig(clip=case.get("clip"), nonfinite_limit=case.get("limit", 10))
    with potluck.init(policy, strategy, stages=case.get("stages"), step=step, patience_s=20) as fleet:
        model, optimizer = make(case.get("tied", ""))
        data = rows(case.get("spoiled", {}), case.get("without", ()), case.get("entered_not", ()))
        model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, loss=loss_of)
        told: list[Any] = []
        fleet.events.listeners.append(lambda e: told.append(e.loss) if isinstance(e, StepDone) else None)
        fleet.events.listeners.append(lambda e: told.append("skipped") if isinstance(e, StepSkipped) else None)
        if folder:
            fleet.load(folder)
        said = ""
        try:
            while fleet.step_number < upto:
                for batch in loader:
                    fleet.train(loss_of, batch)
                    fleet.step()
                    if fleet.step_number == upto and loader.current.last:
                        break
        except PotluckError as error:
            said = str(error)
        if folder:
            fleet.save(folder)
            fleet.wait_for_saves()
        return {
            "told": told,
            "said": said,
            "parts": parts_of(fleet),
            "evaluated": fleet.evaluate(loss_of, data, BATCH) if case.get("evaluates") else None,
        }


def parts_of(fleet: potluck.Engine) -> list[Any]:
    """What this worker has of each parameter, whoever else has it: [name, first number, numbers]."""
    replica = fleet.run.replica
    assert replica is not None
    part: Any = replica.part or getattr(replica, "sharded", None)
    named = replica.model.named_parameters() if replica.part is None else ()
    split = part.split if part is not None else ()  # which may have no numbers in the model
    whole = [[name, 0, p.detach().clone().view(-1)] for name, p in named if name not in split]
    if part is None:
        return whole
    return whole + [
        [run.span.name, run.span.start, run.parameter.detach().view(-1).clone()]
        for run in (*part.runs, *part.mirrors, *part.rest)
    ]


def assert_same(found: list[dict[str, Any]], judge: dict[str, Any], case: dict[str, Any]) -> None:
    """Losses, and all numbers of all parameters; whoever has the same has it to the bit."""
    for each in found:
        assert not each["said"], each["said"]
        known = judge["told"][len(judge["told"]) - len(each["told"]) :]
        for ours, theirs in zip(each["told"], known, strict=True):
            assert ours == theirs or ours == pytest.approx(theirs, rel=1e-6), (each["told"], judge["told"])
        if case.get("evaluates"):
            assert each["evaluated"] == pytest.approx(judge["evaluated"], rel=1e-6)
    for name, parameter in judge["weights"].items():
        whole = torch.full((parameter.numel(),), torch.nan, dtype=torch.float64)
        for part_name, start, numbers in (part for each in found for part in each["parts"]):
            if part_name == name:
                known = whole[start : start + len(numbers)]
                assert (known.isnan() | (known == numbers)).all(), name
                known.copy_(numbers)
        off = 1e-7 if case.get("clip") else 1e-12
        torch.testing.assert_close(whole, parameter.detach().view(-1), rtol=off, atol=off, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize(
    ("workers", "strategy"),
    first_of(
        [
            (2, ShardGradOp()),
            (2, FullShard(weights=(1, 2))),
            (2, FullShard()),
            (4, ShardGradOp(keep_gradients=True)),
            (4, FullShard(weights=(3, 1, 1, 2))),
        ],
        2,
    ),
)
def test_a_stage_of_which_all_is_frozen_is_split_as_any(workers: int, strategy: Any) -> None:
    """As adapters leave the last one, though the optimizer was given all parameters."""
    case = {"stages": TWO, "strategy": strategy, "tied": "frozen", "evaluates": True}
    assert_same(run_ranks(workers, train, case, 4), plain(4, case), case)


NAN, INF = float("nan"), float("inf")
SPOILED = {2: (3, NAN), 7: (0, NAN), 17: (1, -INF)}
"""Rows of the first epoch's first, second and last step; of the second epoch's, wherever they fall."""


@pytest.mark.parametrize(
    ("workers", "strategy", "stages"),
    first_of(
        [
            (2, NoShard(), TWO),
            (4, HybridShard(intra_node_size=2), TWO),
            (4, FullShard(), TWO),
            (4, FullShard(weights=(3, 1, 1, 2)), Stages(protocol=Direct(), count=2, cuts=(2,))),
        ]
    ),
)
def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is(workers: int, strategy: Any, stages: Any) -> None:
    """On one stage's parameters alone, in one micro-batch alone."""
    case = {"stages": stages, "strategy": strategy, "spoiled": SPOILED, "evaluates": True}
    judge = plain(6, case)
    assert judge["told"][0] == judge["told"][2] == "skipped" and judge["told"].count("skipped") < 6
    assert_same(run_ranks(workers, train, case, 6), judge, case)


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (4, NoShard()),
        pytest.param(4, HybridShard(intra_node_size=1), marks=pytest.mark.slow),
        pytest.param(8, HybridShard(intra_node_size=2), marks=pytest.mark.slow),
    ],
)
def test_replicas_of_stages_that_step_by_themselves_skip_it_too(workers: int, strategy: Any) -> None:
    spoiled = {2: (3, NAN), 9: (0, INF)}
    case = {"stages": TWO, "strategy": strategy, "policy": potluck.Cadence.published(anchor=1), "spoiled": spoiled}
    found = run_ranks(workers, train, case, 6)
    assert any("skipped" in each["told"] for each in found)
    for each in found:
        assert not each["said"]
        assert all(numbers.isfinite().all() for _, _, numbers in each["parts"])


def test_a_run_that_diverged_leaves_the_weights_of_the_last_good_step(tmp_path: Path) -> None:
    case = {"stages": TWO, "spoiled": {7: (0, NAN)}, "limit": 1}
    found = run_ranks(2, train, case, 6, str(tmp_path))
    for each in found:
        assert "The weights are those of the last good step." in each["said"]
        each |= {"said": "", "told": []}
    assert_same(found, plain(1, case), case)


def test_norms_of_stages_are_one_norm() -> None:
    assert norm_of_stages([3.0, 4.0], [0.0, 0.0]) == 5.0
    assert norm_of_stages([3.0, 5.0], [0.0, 3.0]) == pytest.approx(5.0)
    assert norm_of_stages([0.0, 0.0], [0.0, 0.0]) == 0.0
    assert norm_of_stages([3e200, 4e200], [0.0, 0.0]) == pytest.approx(5e200)
    for bad in ([NAN, 1.0], [INF, 1.0], [NAN, INF]):
        assert not math.isfinite(norm_of_stages(bad, [0.0, 0.0]))
        assert not math.isfinite(norm_of_stages(bad, bad))


SETUPS: list[tuple[int, Any, Any]] = [
    (4, TWO, FullShard()),
    (4, TWO, FullShard(weights=(3, 1, 1, 2))),
    (4, TWO, ShardGradOp()),
    (1, None, NoShard()),
    (4, TWO, HybridShard(intra_node_size=2)),
]
FURTHER: list[tuple[int, Any, Any]] = [
    (4, TWO, HybridShard(intra_node_size=1)),
    (2, None, FullShard()),
    (4, Stages(protocol=Direct(), count=2, cuts=(4,)), ShardGradOp(weights=(1, 2, 3, 1))),
    (6, TWO, FullShard()),
    (2, TWO, FullShard(weights=(1, 1))),
    (4, TWO, ShardGradOp(keep_gradients=True)),
    (3, None, ShardGradOp()),
    (4, Stages(protocol=MICRO, count=2, cuts=(2,)), FullShard()),
]


@pytest.mark.slow
@pytest.mark.parametrize("setups", [SETUPS, pytest.param(FURTHER, marks=pytest.mark.slow)], ids=["some", "more"])
def test_a_stage_that_is_split_over_replicas_is_saved_and_loaded_as_any(setups: Any, tmp_path: Path) -> None:
    """One run that changes its workers, its cut and its strategy at every step; embedding and head are one weight."""
    case = {"tied": "ends", "clip": 0.3}
    for step, (workers, stages, strategy) in enumerate(setups, start=1):
        now = case | {"stages": stages, "strategy": strategy}
        found = run_ranks(workers, train, now, step, str(tmp_path))
        assert_same(found, plain(step, case), now)


@pytest.mark.parametrize(
    ("tied", "workers", "strategy", "stages"),
    first_of(
        [
            ("blocks", 2, FullShard(), None),
            ("modules", 2, FullShard(), None),
            ("outside", 4, HybridShard(intra_node_size=2), None),
            ("blocks", 4, FullShard(), TWO),
            pytest.param("outside", 2, FullShard(), None, marks=pytest.mark.slow),
            pytest.param("blocks", 4, HybridShard(intra_node_size=2), TWO, marks=pytest.mark.slow),
            pytest.param("modules", 4, HybridShard(intra_node_size=2), None, marks=pytest.mark.slow),
            pytest.param("outside", 4, FullShard(weights=(2, 1, 1, 1)), TWO, marks=pytest.mark.slow),
            pytest.param("modules", 2, FullShard(weights=(2, 1)), None, marks=pytest.mark.slow),
            pytest.param("blocks", 2, ShardGradOp(), None, marks=pytest.mark.slow),
        ]
    ),
)
def test_blocks_may_share_weights(tied: str, workers: int, strategy: Any, stages: Any) -> None:
    """With each other, with what is in no block, or be one module in two places."""
    case = {"tied": tied, "strategy": strategy, "stages": stages}
    assert_same(run_ranks(workers, train, case, 4), plain(4, case), case)


INTERLEAVED = Stages(protocol=Pipeline(micro_batch_size=2, schedule="interleaved"), count=2, cuts=(2, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "workers", "strategy"),
    [
        ("blocks", 4, FullShard()),
        ("ends", 4, FullShard(weights=(3, 1, 1, 2))),
        pytest.param("", 2, FullShard(), marks=pytest.mark.slow),
        pytest.param("blocks", 2, FullShard(weights=(1, 1)), marks=pytest.mark.slow),
        pytest.param("ends", 4, FullShard(), marks=pytest.mark.slow),
        pytest.param("blocks", 4, HybridShard(intra_node_size=2), marks=pytest.mark.slow),
        pytest.param("ends", 4, ShardGradOp(), marks=pytest.mark.slow),
    ],
)
def test_a_worker_of_several_stages_may_split_each(workers: int, strategy: Any, tied: str, tmp_path: Path) -> None:
    case = {"strategy": strategy, "stages": INTERLEAVED, "tied": tied}
    run_ranks(workers, train, case, 2, str(tmp_path))
    assert_same(run_ranks(workers, train, case, 4, str(tmp_path)), plain(4, case), case)


WITHOUT = (2, 3, 6, 7, 8, 9, 10, 11, 16, 17)
"""Rows without samples: those of one micro-batch of the first step, all of the second step, and the last ones."""


@pytest.mark.parametrize(
    ("workers", "strategy", "protocol", "spoiled"),
    first_of(
        [
            (2, NoShard(), "1f1b", (3, 8)),
            (2, NoShard(), "zero-bubble", (3, 8)),
            (2, NoShard(), "datastore", (3, 8)),
            (2, NoShard(), "direct", (8,)),
            (4, NoShard(), "1f1b", (2, 8)),
            (4, FullShard(), "1f1b", (3, 8)),
            (4, FullShard(weights=(3, 1, 1, 2)), "gpipe", (3, 8)),
            (4, ShardGradOp(), "interleaved", (3, 8)),
            pytest.param(4, ShardGradOp(keep_gradients=True), "1f1b", (2, 8), marks=pytest.mark.slow),
            pytest.param(4, HybridShard(intra_node_size=2), "1f1b", (3, 8), marks=pytest.mark.slow),
            pytest.param(4, HybridShard(intra_node_size=2), "direct", (8,), marks=pytest.mark.slow),
            pytest.param(4, FullShard(), "interleaved", (3, 8), marks=pytest.mark.slow),
        ]
    ),
)
def test_what_has_no_samples_has_no_gradient(
    workers: int, strategy: Any, protocol: str, spoiled: tuple[int, ...], tmp_path: Path
) -> None:
    """A mean over nothing is 0 / 0, and so would its gradient be. `spoiled`: rows of micro-batches without samples."""
    stages = Stages(protocol=named(protocol, tmp_path), count=2, cuts=(2, 3, 4) if protocol == "interleaved" else (3,))
    case = {"strategy": strategy, "stages": stages, "without": WITHOUT, "evaluates": True}
    found = run_ranks(workers, train, case | {"spoiled": {place: (place % 3, NAN) for place in spoiled}}, 3)
    assert_same(found, plain(3, case), case)


def named(protocol: str, folder: Path) -> Any:
    if protocol == "direct":
        return Direct()
    if protocol == "datastore":
        return DataStore(url=f"file://{folder}/run", micro_batch_size=2)
    return Pipeline(micro_batch_size=2, schedule=protocol)  # type: ignore[arg-type]


def refusal(options: dict[str, Any]) -> str:
    try:
        with potluck.init(stages=TWO, patience_s=20, **options) as fleet:
            model, optimizer = make()
            fleet.prepare(model, optimizer, rows({}, ()), batch_size=BATCH, loss=loss_of)
    except PotluckError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("options", "sentence"),
    first_of(
        [
            ({"strategy": FullShard(weights=(1, 2))}, "strategy.weights has 2 numbers, and the run 4 workers"),
            (
                {"strategy": ShardGradOp(weights=(1, 0, 1, 0))},
                "strategy.weights is 0 for every worker that holds stage 1",
            ),
            (
                {"strategy": FullShard(), "policy": potluck.Cadence.published()},
                "Cadence averages replicas, and there is only one: FullShard splits each stage over all workers that"
                " hold",
            ),
        ]
    ),
)
def test_what_cannot_be_split_is_refused_by_every_worker_before_the_first_step(options: Any, sentence: str) -> None:
    for told in run_ranks(4, refusal, options):
        assert sentence in told


@pytest.mark.parametrize(
    "strategy",
    first_of(
        [
            NoShard(),
            FullShard(),
            pytest.param(ShardGradOp(), marks=pytest.mark.slow),
            pytest.param(HybridShard(intra_node_size=2), marks=pytest.mark.slow),
            pytest.param(FullShard(weights=(3, 1, 1, 2)), marks=pytest.mark.slow),
        ]
    ),
)
def test_a_shared_weight_stays_one_where_a_stage_has_not_used_it(strategy: Any) -> None:
    """In the second step, the stage that enters by it leaves it out, and the one that leaves by it uses it."""
    case = {"tied": "ends", "stages": TWO, "strategy": strategy, "entered_not": tuple(range(6, 12))}
    assert_same(run_ranks(4, train, case, 3), plain(3, case), case)
