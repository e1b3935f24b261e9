"""HybridShard under Cadence and Async: nodes of two ranks that step by themselves, against plain replicas in turn."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import Async, Cadence, NoShard, StepConfig, Sync
from potluck.composition import Wanted, compose
from potluck.engine.checkpointing import take_position
from potluck.errors import ConfigError
from potluck.events import StepSkipped
from potluck.sharding.strategy import FullShard, HybridShard, ShardGradOp
from tests.parity import test_cadence
from tests.parity.test_cadence import POLICIES, ROWS, Net, judge, ours, whole
from tests.quick import first_of
from tests.ranks import run_ranks

PAIRS = HybridShard(intra_node_size=2)


class Deep(Net):
    """Repeated layers too, of which each row takes one; rows that two ranks cannot share evenly; and a parameter of
    which only one has anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        side = x[:, :1] > 0
        x = self.norm(self.enter(x))
        for number, layer in enumerate(self.layers):
            if (rows := side == bool(number)).any():  # a rank, and a node, may have rows of one side alone
                x = torch.where(rows, x + torch.tanh(layer(x)) * self.scale, x)
        return self.leave(torch.tanh(x)) * self.frozen


def make(seed: int = 3) -> tuple[Deep, tuple[Tensor, Tensor]]:
    data = test_cadence.make(seed)[1]
    torch.manual_seed(seed)
    return Deep(), data


def by_node(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each node its windows, in each its batches, in each what both ranks did, in micro-batches."""
    pairs = [told[first : first + 2] for first in range(0, len(told), 2)]
    return [
        {"windows": [list(zip(*both, strict=True)) for both in zip(*(rank["windows"] for rank in pair), strict=True)]}
        for pair in pairs
    ]


@torch.no_grad()
def through_node(replica: nn.Module, batch: list[list[list[int]]], x: Tensor, y: Tensor) -> int:
    """A node's batch: its ranks begin with the same running statistics, and what they change is averaged by rows."""
    size = sum(len(rows) for rank in batch for rows in rank)
    running = [buffer for buffer in replica.buffers() if buffer.is_floating_point()]
    before = [buffer.clone() for buffer in running]
    after = [buffer.clone() for buffer in running]
    for rank in batch:
        for rows in filter(None, rank):
            with torch.enable_grad():
                (F.mse_loss(replica(x[rows]), y[rows]) * (len(rows) / size)).backward()
        for buffer, was, end in zip(running, before, after, strict=True):
            end.add_(buffer - was, alpha=sum(map(len, rank)) / size)
            buffer.copy_(was)
    for buffer, end in zip(running, after, strict=True):
        buffer.copy_(end)
    return size


@pytest.mark.parametrize(
    ("policy", "optimizer", "batch", "micro", "slow"),
    first_of(
        [
            ("cadence", "adamw", 24, None, 0.0),
            ("cadence", "sgd", 25, 4, 0.0),
            ("async", "adamw_fused", 25, None, 0.02),
            ("cadence", "sgd", 15, None, 0.0),
        ]
    ),
)
def test_nodes_end_where_replicas_stepped_in_turn_end(
    policy: str, optimizer: str, batch: int, micro: int | None, slow: float
) -> None:
    told = run_ranks(4, ours, POLICIES[policy], optimizer, batch, 2, micro, slow, PAIRS, make)
    for rank in told:
        assert torch.equal(rank["weights"], told[0]["weights"])  # to the bit
        assert rank["epochs"] == [[ROWS, ROWS, True]] * 2
        assert rank["steps"] == 2 * -(-ROWS // batch) and rank["rows_seen"] == 2 * ROWS
        assert rank["reasons"] == told[0]["reasons"]
    expected = judge(POLICIES[policy], optimizer, by_node(told), make, through_node)
    # Sums of floats in another order: over ranks, over nodes, and in the norm that clips. A few dozen steps of a model
    # whose weights are around 1 carry that along.
    torch.testing.assert_close(told[0]["weights"], expected, atol=5e-5, rtol=2e-4)


def make_few(seed: int = 3) -> tuple[Deep, tuple[Tensor, Tensor]]:
    model, (x, y) = make(seed)
    return model, (x[:5], y[:5])


def test_nodes_and_ranks_that_have_no_rows_take_part() -> None:
    # A node's batch is one row, so that its second rank never has any; the fifth row leaves one node without.
    told = run_ranks(4, ours, POLICIES["cadence"], "sgd", 2, 3, None, 0.0, PAIRS, make_few)
    assert all(rank["epochs"] == [[5, 5, True]] * 3 for rank in told)
    assert any(not node for rank in told[::2] for node in rank["windows"][:-1])
    expected = judge(POLICIES["cadence"], "sgd", by_node(told), make_few, through_node)
    torch.testing.assert_close(told[3]["weights"], expected, atol=5e-5, rtol=2e-4)


@pytest.mark.slow
def test_a_slow_node_does_less_and_all_of_its_ranks_stop_with_it() -> None:
    told = run_ranks(4, ours, Cadence.published(anchor=3), "sgd", 16, 2, None, 0.05, PAIRS, make)
    done = [sum(len(rows) for window in rank["windows"] for batch in window for rows in batch) for rank in told]
    slow, fast = sum(done[:2]), sum(done[2:])
    assert slow + fast == 2 * ROWS and fast > 1.5 * slow
    by_node(told)  # both ranks of a node did equally many batches in every window
    assert any(reason.startswith("node 0 has ") and ": it does " in reason for reason in told[3]["reasons"])


def look_and_stop() -> dict[str, Any]:
    """Evaluates after every window, follows a schedule, and stops when the last rank asks for it."""
    with potluck.init(Async.published(anchor=2, max_anchor=2), PAIRS) as fleet:
        model, data = make(3 + fleet.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbered = (*data, torch.arange(ROWS))
        model, _, loader = fleet.prepare(model, optimizer, numbered, batch_size=10)
        fleet.lr_factor = lambda rows: 1 - rows / (2 * ROWS)
        losses, rates, used = [], [], []

        def evaluate() -> float:
            return fleet.evaluate(lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), data, 31)

        def look() -> None:
            losses.append([evaluate(), plain_loss(model, data)])
            if fleet.rank == 3 and fleet.version == 3:
                fleet.request_stop()

        fleet.after_agreement.append(look)
        for x, y, numbers in loader:
            if loader.current.counts:
                used.extend(numbers.tolist())
            fleet.backward(F.mse_loss(model(x), y), samples=len(x))
            fleet.step()
            rates.append(optimizer.param_groups[0]["lr"])
        for run in fleet.run.replica.owned():
            run.parameter.data.zero_()
        fleet.run.replica.on_parts_written()
        return {
            "losses": losses,
            "rates": rates,
            "used": used,
            "of_zeros": [evaluate(), float(data[1].square().mean())],
            "standing": take_position(fleet.run)[0],
            "version": fleet.version,
        }


@torch.no_grad()
def plain_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Of a plain model that holds what all ranks of the node hold together."""
    plain = make()[0].eval()
    nn.utils.vector_to_parameters(whole(model), plain.parameters())
    for mine, theirs in zip(plain.buffers(), model.buffers(), strict=True):
        mine.copy_(theirs)
    return float(F.mse_loss(plain(data[0]), data[1]))


def test_evaluation_schedule_and_a_wish_to_stop_reach_every_rank() -> None:
    told = run_ranks(4, look_and_stop)
    for rank in told:
        assert rank["version"] == 4 and rank["standing"] == told[0]["standing"]
        assert rank["losses"] == told[0]["losses"] and len(rank["losses"]) == 4
        for found, expected in [*rank["losses"], rank["of_zeros"]]:
            assert found == pytest.approx(expected, rel=1e-5)
        assert 0.1 > rank["rates"][0] > rank["rates"][-1] > 0.05
    assert told[0]["rates"] == told[1]["rates"] and told[2]["rates"] == told[3]["rates"]
    used = sorted(number for rank in told for number in rank["used"])
    assert len(used) == len(set(used)) == told[0]["standing"]["rows_seen"] < ROWS


def bad_row(limit: int) -> list[Any]:
    with potluck.init(Cadence.published(anchor=2), PAIRS, step=StepConfig(nonfinite_limit=limit)) as fleet:
        model, (x, y) = make()
        x[17] = torch.nan
        model, _, loader = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), batch_size=30)
        reasons = []
        for a, b in loader:
            fleet.backward(F.mse_loss(model(a), b), samples=len(a))
            if isinstance(event := fleet.step(), StepSkipped):
                reasons.append(event.reason)
        finite = [bool(torch.isfinite(tensor).all()) for tensor in (whole(model), model.norm.running_mean)]
        return [fleet.skipped, reasons, *finite]


def test_a_node_skips_a_bad_step_as_one_and_it_reaches_nobody() -> None:
    told = run_ranks(4, bad_row, 5)
    assert [[skipped, *finite] for skipped, _, *finite in told] == [[1, True, True]] * 4
    assert told[0][1] == told[1][1] and told[2][1] == told[3][1]
    assert told[0][1] + told[2][1] in (
        ["on node 0, the loss is not finite"],
        ["on node 1, the loss is not finite"],
    )


def node_size(policy: Any, strategy: Any, world: int) -> int:
    return compose(Wanted(policy=policy, strategy=strategy, world=world)).node_size


@pytest.mark.parametrize(
    ("strategy", "world", "sentence"),
    first_of(
        [
            (
                HybridShard(intra_node_size=3),
                4,
                r"4 ranks is no multiple of intra_node_size, which is 3\. Start a multiple",
            ),
            (
                HybridShard(intra_node_size=4),
                4,
                r"averages replicas, and there is only one: HybridShard .* of 4 makes one",
            ),
            (
                FullShard(),
                4,
                r"averages replicas, and there is only one: FullShard splits it over all 4.*Use HybridShard",
            ),
            (ShardGradOp(), 2, r"averages replicas, and there is only one: ShardGradOp splits .*Use HybridShard"),
        ]
    ),
)
def test_what_is_no_set_of_replicas_is_refused_with_a_way_out(strategy: Any, world: int, sentence: str) -> None:
    for policy in (Cadence.published(), Async.published()):
        with pytest.raises(ConfigError, match=sentence):
            node_size(policy, strategy, world)


def test_a_node_of_one_rank_is_a_whole_replica() -> None:
    assert (
        node_size(Cadence.published(), NoShard(), 3)
        == node_size(Cadence.published(), HybridShard(intra_node_size=1), 3)
        == 1
    )


def refused() -> str:
    with pytest.raises(ConfigError) as caught:
        potluck.init(Cadence.published(), HybridShard(intra_node_size=2))
    return str(caught.value)


def test_one_node_is_refused_on_every_rank_when_the_run_begins() -> None:
    assert all("Start 4 or more" in sentence for sentence in run_ranks(2, refused))


def driver(policy: Any, strategy: Any) -> Any:
    """Whether it steps by itself, and of how many ranks it is."""
    made = compose(Wanted(policy=policy, strategy=strategy, has_host=True))
    return made.window is not None, made.ranks_per_stage


def test_more_ranks_than_a_host_takes_of_one_worker_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"A worker of 32 ranks is more than a host takes.*intra_node_size"):
        driver(Cadence.published(), HybridShard(intra_node_size=32))


def test_a_host_leads_nodes_and_a_node_of_one_rank_is_a_worker_like_any_other() -> None:
    assert driver(Cadence.published(), PAIRS) == (True, 2)
    assert driver(Sync(), PAIRS) == (False, 2)
    assert (
        driver(Async.published(), HybridShard(intra_node_size=1)) == driver(Async.published(), NoShard()) == (True, 1)
    )
    assert driver(Sync(), HybridShard(intra_node_size=1)) == driver(Sync(), NoShard()) == (False, 1)
