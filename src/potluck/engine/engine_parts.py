"""What an engine is made of, from what was composed: its layers, its rounds and its lifecycle.

Rounds of a host are imported where they are made: they bring libraries that other runs need not wait for.
"""

from typing import TYPE_CHECKING, NamedTuple

from potluck.engine.buddy_copies import BuddyCopies
from potluck.engine.layers import Layers, WholeLayers
from potluck.engine.lifecycle import GroupLifecycle, Lifecycle
from potluck.engine.replica import Replica
from potluck.engine.rounds import Rounds
from potluck.engine.run_state import RunState
from potluck.engine.steps import Steps
from potluck.engine.windows import Windows

if TYPE_CHECKING:
    from potluck.engine.host_rounds import HostWork
    from potluck.engine.node_client import NodeClient
    from potluck.engine.part_sender import PartSender
    from potluck.fleet.client import Client
    from potluck.save.store_run import StoreRun


class EngineParts(NamedTuple):
    layers: Layers
    rounds: Rounds
    lifecycle: Lifecycle


def over_group(run: RunState, layers: Layers | None = None) -> EngineParts:
    """Workers that reach each other over a link."""
    layers, copies = layers or WholeLayers(run), BuddyCopies(run)
    rounds = Steps(run, layers, copies) if run.composition.window is None else Windows(run, layers)
    return EngineParts(layers, rounds, GroupLifecycle(run, layers, rounds, copies))


def in_stages(run: RunState, store_run: "StoreRun | None") -> EngineParts:
    """`store_run`: where workers meet who have no connection to each other; the link is its."""
    from potluck.engine.staged import StagedLayers

    assert run.wanted.stages is not None
    return over_group(run, StagedLayers(run, run.wanted.stages, store_run))


def under_host(run: RunState, client: "Client | NodeClient") -> EngineParts:
    """A worker of a host; the link is of the ranks that are this worker together."""
    from potluck.engine.buffers import SavedBuffers
    from potluck.engine.host_lifecycle import HostLifecycle
    from potluck.engine.host_rounds import HostRounds
    from potluck.engine.means import HostMean
    from potluck.engine.node_mean import NodeMean
    from potluck.engine.slice_steps import SliceSteps
    from potluck.engine.slices import Gradients, WholeGradients
    from potluck.engine.split_gradients import SplitGradients
    from potluck.engine.window_steps import WindowSteps

    layers, composed = WholeLayers(run), run.composition
    lifecycle = HostLifecycle(run, layers, client)

    def make_gradients(replica: Replica, sender: "PartSender") -> Gradients:
        if composed.split is None:
            return WholeGradients(replica, sender.make_room(replica.model))
        return SplitGradients(replica, client, SavedBuffers(replica.model).parts)  # type: ignore[arg-type]

    def make_work(replica: Replica, sender: "PartSender") -> "HostWork":
        if composed.window is None:
            return SliceSteps(run, replica, lifecycle.driver, sender, make_gradients(replica, sender))
        if composed.split is None:
            mean = HostMean(sender.send, sender.begin, sender.make_room(replica.model))
        else:
            ahead = composed.window.overlap
            mean = NodeMean(sender.send, sender.begin, client, goes_ahead=ahead)  # type: ignore[arg-type]
        return WindowSteps(run, layers, lifecycle.driver, sender, mean)

    return EngineParts(layers, HostRounds(run, lifecycle, make_work), lifecycle)
