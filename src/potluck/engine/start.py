"""How a process becomes a worker of a run: init(), and joining a host."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from potluck.account import begin as begin_account
from potluck.agree.policy import Policy, policy_of
from potluck.coded_numbers import AskedWire
from potluck.composition import Wanted, compose, ranks_per_worker, settled
from potluck.config import checked
from potluck.devices import choose_device, kind_of
from potluck.engine.engine import Engine
from potluck.engine.engine_parts import over_group, under_host
from potluck.environment import PATIENCE_S, RETURNING, check_patience
from potluck.files import write_whole
from potluck.fleet.client import Client
from potluck.fleet.invite import INVITE, Invite, read_invite
from potluck.fleet.listener import Listener
from potluck.link.link import Alone, GroupLink, Link, placed
from potluck.link.link import connect as join_group
from potluck.link.ranks import asked_ranks, is_later_rank, meet, ranks_here
from potluck.logs import configure_logs
from potluck.replica.precision import StepConfig
from potluck.sharding.strategy import NoShard, ShardingStrategy
from potluck.stages.protocol import CommunicationProtocol, Stages


def init(
    policy: Policy | None = None,
    strategy: ShardingStrategy = NoShard(),
    *,
    stages: Stages | CommunicationProtocol | None = None,
    step: StepConfig = StepConfig(),
    wire: AskedWire = "fp32",
    patience_s: float = PATIENCE_S,
) -> Engine:
    """Joins the run that `potluck join`, `potluck run` or torchrun started; without one of them, it is a run of one.

    `policy` says when workers agree, by name or with its settings: Sync if it is left out, and Auto under a host.
    `strategy` says what of the model is split over ranks, `stages` how it is cut over workers, and `step` how one step
    is computed. `wire` is the form in which replicas send each other their numbers: fp32, or in fewer bits as bf16,
    int8 or int4; auto: what makes steps shorter. `patience_s` is how long a worker of a process group may be silent
    before the others give it up. These pages call what it returns `fleet`.
    """
    begin_account("worker", os.environ.get("POTLUCK_NAME") or os.environ.get("RANK", ""))
    configure_logs()
    checked(lambda: check_patience("patience_s", patience_s))
    if isinstance(stages, CommunicationProtocol):
        stages = Stages(protocol=stages)
    device = choose_device(is_whole=strategy == NoShard() and stages is None)
    has_host = INVITE in os.environ
    wanted = Wanted(
        policy=checked(lambda: policy_of(policy, has_host=has_host)),
        strategy=strategy,
        stages=stages,
        wire=wire,
        has_host=has_host,
        offload_optimizer=step.offload_optimizer,
        on_gpu=device.type == "cuda",
    )
    if wanted.has_host:
        wanted = _with_ranks(wanted)  # what is refused must not have joined
        is_first = wanted.world == 1 or not is_later_rank()
        client = connect(read_invite(None), device, wanted.world, is_first=is_first)
        return hosted_engine(*as_one_worker(client, device, wanted.world), wanted, step)
    if stages is not None:
        return _in_stages(wanted, stages, device, step, patience_s)
    link = join_group(device, patience_s)
    return Engine(link, device, step=step, wanted=replace(wanted, world=link.world))


class Joined:
    """A process that has joined the host of its invite, and does not know yet what it trains: the host says so."""

    def __init__(self) -> None:
        self._device, is_later = choose_device(), is_later_rank()
        self._client = connect(read_invite(None), self._device, asked_ranks() or 1, is_first=not is_later)
        self._worker: tuple[Listener, torch.device, Link] | None = None
        if is_later:  # the first rank, which has the recipe, waits for this one
            self._worker = as_one_worker(self._client, self._device, int(os.environ["WORLD_SIZE"]))

    @property
    def recipe(self) -> str:
        """The host's recipe, as TOML; empty where it trains a script."""
        return self._client.welcome.recipe if self._client.welcome is not None else ""

    def engine(
        self,
        policy: Policy | None,
        strategy: ShardingStrategy,
        *,
        stages: Stages | None,
        step: StepConfig,
        wire: AskedWire,
    ) -> Engine:
        """The handle of this worker, from what init() would be given."""
        wanted = Wanted(
            policy=policy_of(policy, has_host=True),
            strategy=strategy,
            stages=stages,
            wire=wire,
            has_host=True,
            offload_optimizer=step.offload_optimizer,
            on_gpu=self._device.type == "cuda",
        )
        wanted = _with_ranks(wanted)
        worker = self._worker or as_one_worker(self._client, self._device, wanted.world)
        return hosted_engine(*worker, wanted, step)

    def close(self) -> None:
        self._client.close()


def _with_ranks(wanted: Wanted) -> Wanted:
    """How many ranks are one worker of a host; refused if that cannot be."""
    ranks = ranks_per_worker(wanted.strategy, ranks_here(torch.cuda.device_count()), asked_ranks())
    wanted = replace(wanted, world=ranks)
    compose(wanted)
    return wanted


def _in_stages(wanted: Wanted, stages: Stages, device: torch.device, step: StepConfig, patience_s: float) -> Engine:
    from potluck.save.store_run import StoreRun

    store_run: StoreRun | None = None
    link: Link | None = None
    if stages.store is None:
        link = join_group(device, patience_s)
    rank, world = (link.rank, link.world) if link is not None else placed() or (0, 1)
    wanted = settled(replace(wanted, world=world))
    compose(wanted)
    if stages.store is not None:  # only now: what is refused must not have touched it
        store_run = StoreRun(stages.store, rank, world, patience_s, keeps=wanted.policy.steps_together)
        link = store_run.link
    return Engine(link, device, step=step, wanted=wanted, table=lambda run: over_group(run, store_run))


def connect(invite: Invite, device: torch.device, ranks: int, *, is_first: bool) -> Client:
    """A client that has joined. Of a worker's later ranks it has no connection: what it is given to say is dropped."""
    from potluck.words import say

    name, kind = name_of_worker(), kind_of(device, ranks)
    if not is_first:
        return Client(invite, name=name, kind=kind, say=lambda sentence: None)
    client = Client(invite, name=name, kind=kind, say=say)
    kept = os.environ.pop(RETURNING, None)
    if kept is not None and Path(kept).exists():
        client.return_to(float(Path(kept).read_text(encoding="utf-8")))
    client.connect()
    if kept is not None:
        write_whole(Path(kept), str(client.patience_s))
    return client


def name_of_worker() -> str:
    return os.environ.get("POTLUCK_NAME") or f"{socket.gethostname()}-{os.getpid()}"


def as_one_worker(client: Client, device: torch.device, ranks: int) -> tuple[Listener, torch.device, Link]:
    """What an engine is made of: of one process, what its client hears; of several, what all hear from the first.

    `client`: the first rank's has joined. The others come when it asks for them.
    """
    if ranks == 1:
        return Listener(client), device, Alone()
    try:
        meet(ranks)
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))  # a worker's threads are its ranks' together
        device = choose_device(is_whole=False)
        link = cast(GroupLink, join_group(device, PATIENCE_S))
        from potluck.engine.node_listener import NodeListener

        return NodeListener(client, link), device, link
    except BaseException:
        client.close()
        raise


def hosted_engine(listener: Listener, device: torch.device, link: Link, wanted: Wanted, step: StepConfig) -> Engine:
    """Build the engine of a worker that a host leads."""
    return Engine(link, device, step=step, wanted=wanted, table=lambda run: under_host(run, listener))
