"""Makes the parts of an engine from what was composed: its table and its replica.

The table of a host is imported where it is made: it brings libraries that other runs need not wait for.
"""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from potluck.coded_numbers import coding_of
from potluck.data.source import DataSource
from potluck.engine.group_table import GroupTable
from potluck.engine.run_parts import RunParts
from potluck.engine.table import Table
from potluck.link.grid import make_nodes
from potluck.replica.evaluate import LossFunction
from potluck.replica.replica import GradientForm, Replica
from potluck.save.saves import Saves
from potluck.sharding.blocks import find_blocks, fits_fully_shard
from potluck.sharding.strategy import ShardingStrategy
from potluck.sharding.whole_steps import check_can_cut, check_hooks
from potluck.stages.direct import GroupChannel
from potluck.stages.pipeline import Channel

if TYPE_CHECKING:
    from potluck.fleet.listener import Listener
    from potluck.save.store_run import StoreRun


def over_group(run: RunParts, store_run: "StoreRun | None" = None) -> Table:
    """Workers that reach each other over a link. `store_run`: where they meet in a store, of which the link is."""
    if store_run is not None:
        from potluck.engine.store_keeper import StoreKeeper
        from potluck.save.store_run import StoreSaves

        run.keeper = StoreKeeper(run, store_run)
        return GroupTable(run, StoreSaves(run.link, run.events, store_run))
    return GroupTable(run, Saves(run.link, run.events))


def under_host(run: RunParts, listener: "Listener") -> Table:
    """A worker of a host; the link is of the ranks that are this worker together."""
    from potluck.engine.host_table import HostTable

    return HostTable(run, listener)


def make_replica(
    run: RunParts,
    model: nn.Module,
    optimizer: Optimizer,
    source: DataSource | None,
    loss: LossFunction | None,
) -> Replica:
    """The replica of which this worker is or holds a part.

    `source`, `loss`: by which a model that is cut into stages is measured.
    """
    composed, grid, nodes = run.composition, run.grid, run.nodes
    split = composed.split_of(grid.place)
    options: dict[str, Any] = {
        "form": GradientForm(coding_of(composed.wire), composed.wire_is_measured),
        "turns": run.turns,
        "base": run.base,
    }
    if grid.is_cut:
        assert source is not None and loss is not None
        options |= _cut(run, model, optimizer, source, loss)
        model = options["cut"].own
    link = grid.replica_group
    if nodes is not None:
        link, options["within"] = (nodes.across, grid.shards) if grid.is_cut else (run.link, nodes.within)
    elif split is not None and grid.is_cut and not composed.splits_all:
        options["within"] = grid.shards
    if split is not None:
        # All decide alike: stages that have a weight in common must cut it in the same way.
        told = run.link.gather_bytes(b"" if fits_fully_shard(model, find_blocks(model)) else b"does not")
        options |= {
            "strategy": split,
            "own_units": any(told),
            "codes_within": nodes is None and composed.replicas == 1 and not run.wanted.has_host,
        }
        if nodes is not None:
            options["across"] = nodes.across
        elif grid.is_cut and not composed.splits_all and composed.replicas > 1:
            options["nodes"] = make_nodes(run.link, grid.size).across
    return _class_of(run, split)(model, optimizer, link, run.device, run.config, **options)


def _class_of(run: RunParts, split: ShardingStrategy | None) -> type[Replica]:
    if run.grid.is_cut:
        from potluck.replica.staged import StagedReplica, StagedShardedReplica

        return StagedReplica if split is None else StagedShardedReplica
    if split is None:
        return Replica
    from potluck.replica.sharded import ShardedReplica

    return ShardedReplica


def _cut(
    run: RunParts, model: nn.Module, optimizer: Optimizer, source: DataSource, loss: LossFunction
) -> dict[str, Any]:
    """Cuts the model into stages, by agreement of all workers. What a StagedReplica is made of beside others."""
    from potluck.stages.stage_modules import CutModel
    from potluck.stages.stage_planner import StagePlanner

    grid, stages, keeper = run.grid, run.wanted.stages, run.keeper
    assert stages is not None
    if grid.workers > 1:
        check_can_cut(optimizer)
        check_hooks(optimizer)
    planner = StagePlanner(stages, grid, run.device, source.batch_size)
    plan = planner.agree(model, loss, source.dataset, source.collate)
    run.layout = planner.describe(plan)
    run.kept.add("plan", lambda tensors: plan.to_json())

    def open_channel() -> Channel:
        if keeper is not None:
            return keeper.store_run.open_channel(grid.pipeline, grid.place, run.device)
        return GroupChannel(grid.stage_group.group, run.device, rank=grid.place, workers=grid.workers)

    return {
        "cut": CutModel.take(model, optimizer, plan, grid),
        "grid": grid,
        "schedule": stages.schedule,
        "writers": run.link.world if run.composition.splits_all else grid.size,
        "open_channel": open_channel,
    }
