"""How a process becomes a worker of a run: init(), and joining a host; which engine it gets.

Engines are imported where one is made: each brings libraries that a run of another kind need not wait for.
"""

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from potluck.agree.policy import ApplyPolicy, Sync
from potluck.config import checked
from potluck.engine.engine import Engine
from potluck.engine.replica import StepConfig
from potluck.environment import PATIENCE_S, insist_on_patience
from potluck.errors import ConfigError
from potluck.fleet.client import Client
from potluck.fleet.invite import INVITE, Invite, read_invite
from potluck.link.link import Alone, Link, choose_device
from potluck.link.link import connect as join_group
from potluck.link.ranks import is_later_rank, meet
from potluck.save.memory import Recovery, my_recovery
from potluck.shard.strategy import FullShard, HybridShard, NoShard, ShardGradOp, ShardingStrategy
from potluck.stages.protocol import CommunicationProtocol, Stages

if TYPE_CHECKING:
    from potluck.engine.elastic import ElasticEngine
    from potluck.engine.node_client import NodeClient


def init(
    policy: ApplyPolicy = Sync(),
    strategy: ShardingStrategy = NoShard(),
    *,
    stages: Stages | CommunicationProtocol | None = None,
    step: StepConfig = StepConfig(),
    patience_s: float = PATIENCE_S,
) -> Engine:
    """Joins the run that `potluck join`, `potluck run` or torchrun started; started by none, it is a run of one.

    `stages`: cuts the model into stages, one to a worker; how they talk, or also how many and where it is cut.
    """
    checked(lambda: insist_on_patience("patience_s", patience_s))
    device = choose_device()
    if stages is not None:
        stages = stages if isinstance(stages, Stages) else Stages(protocol=stages)
    if stages is not None and INVITE in os.environ:
        raise ConfigError(
            "A host's workers each have a whole replica, and stages would need each other. Start stages with potluck"
            ' run or potluck train; workers that have no connection meet in a store, with protocol "datastore".'
        )
    if INVITE in os.environ:
        kind, ranks = engine_for(policy, strategy), ranks_of(strategy)
        client = connect(read_invite(None), device) if ranks == 1 or not is_later_rank() else None
        return kind(*as_one_worker(client, device, ranks), policy=policy, strategy=strategy, step=step)
    recovery = my_recovery()
    if recovery is not None:
        policy, strategy = _for_those_left(policy, strategy, recovery)
    if stages is not None:
        from potluck.engine.staged import staged_engine

        return staged_engine(device, policy=policy, strategy=strategy, step=step, stages=stages, patience_s=patience_s)
    link = join_group(device, patience_s)
    if not isinstance(policy, Sync):
        from potluck.engine.windows import WindowEngine

        return WindowEngine(link, device, policy=policy, strategy=strategy, step=step)
    engine = Engine(link, device, policy=policy, strategy=strategy, step=step)
    engine.recovery = recovery
    return engine


def _for_those_left(
    policy: ApplyPolicy, strategy: ShardingStrategy, recovery: Recovery
) -> tuple[ApplyPolicy, ShardingStrategy]:
    """What was set for each worker by itself, without that of the lost ones."""
    if isinstance(policy, Sync):
        policy = replace(policy, shares=recovery.of_those_left(policy.shares))
    if isinstance(strategy, FullShard | ShardGradOp) and strategy.weights != "memory":
        strategy = replace(strategy, weights=recovery.of_those_left(strategy.weights))
    return policy, strategy


def connect(invite: Invite, device: torch.device) -> Client:
    from potluck.engine.elastic import kind_of, say

    client = Client(invite, name=name_of_worker(), kind=kind_of(device), say=say)
    client.connect()
    return client


def name_of_worker() -> str:
    return os.environ.get("POTLUCK_NAME") or f"{socket.gethostname()}-{os.getpid()}"


def as_one_worker(
    client: Client | None, device: torch.device, ranks: int
) -> tuple["Client | NodeClient", torch.device, Link]:
    """What an engine is made of: of one process, its client; of several, what makes them one worker of the host.

    `client`: the first rank's, which has joined. The others come when it asks for them, and have none.
    """
    if ranks == 1:
        assert client is not None
        return client, device, Alone()
    try:
        meet(ranks)
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))  # a worker's threads are its ranks' together
        device = choose_device()
        link = join_group(device, PATIENCE_S)
        from potluck.engine.node_client import NodeClient

        return NodeClient(client, link, name=name_of_worker()), device, link
    except BaseException:
        if client is not None:
            client.close()
        raise


def engine_for(policy: ApplyPolicy, strategy: ShardingStrategy = NoShard()) -> "type[ElasticEngine]":
    """Whether workers take each step together, or step by themselves; and whether each is a node of several ranks."""
    name = type(strategy).__name__
    if not isinstance(strategy, NoShard | HybridShard):
        raise ConfigError(
            f"{name} splits one replica over all workers, and under a host each may go at any time. Use HybridShard,"
            " whose replicas are each split over the ranks of one machine, with the policy Cadence or Async; or start"
            " the workers as one group, with potluck run or torchrun."
        )
    is_node = ranks_of(strategy) > 1
    if isinstance(policy, Sync):
        if is_node:
            raise ConfigError(
                f"{name} works with a host under Cadence and Async, where a node steps by itself. Under Sync each"
                " slice's gradient is one process's. Choose another policy, or set strategy to no_shard."
            )
        from potluck.engine.elastic import ElasticEngine

        return ElasticEngine
    from potluck.engine.elastic_windows import ElasticWindowEngine, insist_on_what_a_host_can_do

    insist_on_what_a_host_can_do(policy)
    if not is_node:
        return ElasticWindowEngine
    from potluck.engine.elastic_nodes import NodeEngine, insist_on_few_files

    insist_on_few_files(ranks_of(strategy))
    return NodeEngine


def ranks_of(strategy: ShardingStrategy) -> int:
    """How many processes of one machine are one worker."""
    return strategy.intra_node_size if isinstance(strategy, HybridShard) else 1
