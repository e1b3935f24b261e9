"""What an engine is made of, from what was composed: its layers, its rounds and its lifecycle.

Rounds of a host are imported where they are made: they bring libraries that other runs need not wait for.
"""

from typing import TYPE_CHECKING, NamedTuple

from potluck.coded_numbers import coding_of
from potluck.engine.layers import Layers, WholeLayers
from potluck.engine.lifecycle import GroupLifecycle, Lifecycle
from potluck.engine.replica import Replica
from potluck.engine.rounds import Rounds
from potluck.engine.run_state import RunState
from potluck.engine.steps import Steps
from potluck.engine.windows import Windows

if TYPE_CHECKING:
    from potluck.engine.buckets import Allocate
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
    layers = layers or WholeLayers(run)
    rounds = Steps(run, layers) if run.composition.window is None else Windows(run, layers)
    return EngineParts(layers, rounds, GroupLifecycle(run, layers, rounds))


def in_stages(run: RunState, store_run: "StoreRun | None") -> EngineParts:
    """`store_run`: where workers meet who have no connection to each other; the link is its."""
    from potluck.engine.staged import StagedLayers

    assert run.wanted.stages is not None
    return over_group(run, StagedLayers(run, run.wanted.stages, store_run))


def under_host(run: RunState, client: "Client | NodeClient") -> EngineParts:
    """A worker of a host; the link is of the ranks that are this worker together."""
    from potluck.engine.buffers import SavedBuffers
    from potluck.engine.either_steps import EitherSteps
    from potluck.engine.host_lifecycle import HostLifecycle
    from potluck.engine.host_rounds import HostRounds
    from potluck.engine.means import HostMean
    from potluck.engine.moments import are_averaged
    from potluck.engine.node_mean import NodeMean
    from potluck.engine.slice_steps import SliceSteps
    from potluck.engine.slices import Gradients, WholeGradients
    from potluck.engine.split_gradients import SplitGradients
    from potluck.engine.window_steps import WindowSteps

    layers, composed, coding = WholeLayers(run), run.composition, coding_of(run.composition.wire)
    lifecycle = HostLifecycle(run, layers, client)

    driver, window = lifecycle.driver, composed.window
    has_both = window is not None and window.may_step_together

    def make_steps(
        replica: Replica, sender: "PartSender", room: "Allocate | None", mean: HostMean | None
    ) -> SliceSteps:
        """`mean`: of the windows between, which travel in the same parts."""
        gradients: Gradients
        if composed.split is None:
            gradients = WholeGradients(replica, room, coding)
        else:
            buffers, collected = SavedBuffers(replica.model).parts, mean.collected if mean is not None else None
            gradients = SplitGradients(replica, client, buffers, collected, coding)  # type: ignore[arg-type]
        return SliceSteps(run, replica, driver, sender, gradients)

    def make_work(replica: Replica, sender: "PartSender") -> "HostWork":
        room = sender.make_room(replica.model) if composed.split is None else None
        if window is None:
            return make_steps(replica, sender, room, None)
        wanted, steps_whole = window.averages_moments, replica.steps_whole
        has_moments = are_averaged(wanted, replica.optimizer, run.notice, steps_whole=steps_whole)
        mean = HostMean(sender.send, sender.begin, room, coding, has_moments=has_moments)
        if composed.split is not None:
            norms_on = replica.device if has_both else None
            mean = NodeMean(
                sender.send,
                sender.begin,
                client,  # type: ignore[arg-type]
                goes_ahead=window.overlap,
                coding=coding,
                has_moments=has_moments,
                norms_on=norms_on,
            )
        alone = WindowSteps(run, layers, driver, sender, mean)
        return EitherSteps(make_steps(replica, sender, room, mean), alone) if has_both else alone

    return EngineParts(layers, HostRounds(run, lifecycle, make_work), lifecycle)
