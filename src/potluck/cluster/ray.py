"""Ray: an actor on every node, or for every GPU, that holds workers of one run; more come with nodes that come.

The invite goes to actors in calls, over Ray's own connections, and on each node into a file for its owner alone. Ray is
an extra (`potluck[ray]`), and only this file imports it.
"""

import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.cluster.options import UpOptions, resumes
from potluck.cluster.place import JobPlace
from potluck.cluster.plan import NodeResources, plan_early
from potluck.cluster.reaching import connect, lead_gloo_to, reach
from potluck.config import from_dict, to_dict
from potluck.environment import IGNORED, QUIET
from potluck.errors import ConfigError, Interrupted, PotluckError, WorkerLost
from potluck.files import write_whole
from potluck.fleet.invite import read_invite
from potluck.launch.host import host
from potluck.launch.join import join
from potluck.launch.processes import RankSpan, free_port, launch
from potluck.save.run_folder import make_run_folder
from potluck.train.arguments import WorkersConfig
from potluck.words import plural, say

LOOK_S = 0.5
AGAIN_S = 2.0
"""Seconds before a slot whose workers were lost is filled again: some would be lost as soon as they are started."""


def up_on_ray(options: UpOptions, address: str) -> int:
    """Returns the exit code. `address`: of the cluster; `auto` for that of this machine."""
    ray = _library()
    try:
        if found := re.fullmatch(r"\[?([^\[\]/]+)\]?:([0-9]{1,5})", address):
            connect(found[1], int(found[2]), options.patience_s)  # Ray itself would try for minutes
        ray.init(address=address, logging_level="warning")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"There is no Ray cluster at {address}: {str(error).splitlines()[0]}. Start one with ray start --head, or"
            " name its address with --on."
        ) from None
    try:
        return _lead(options)
    finally:
        ray.shutdown()


def _library() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed. Get it with: pip install './potluck[ray]'") from None
    return ray


def _lead(options: UpOptions) -> int:
    folder = options.folder("").absolute()
    make_run_folder(folder)
    resume = resumes(folder)
    place = JobPlace(scheduler="Ray", node="", tasks=None)
    decided = plan_early(place, options.led, may_be_requeued=False)
    assert decided is not None  # nobody knows how many nodes will come
    actors = RayActors(options)
    actors.fill()
    say(f"Found Ray, with {plural(len(actors.slots), 'slot')} for workers. {decided.sentence}")
    with ExitStack() as stack:
        stack.callback(actors.close)
        if decided.led == "group":
            return actors.run_group(options.group_command(folder, resume=resume))
        import ray

        address = ray.util.get_node_ip_address()
        args = options.host_args(folder, WorkersConfig(count=1), local=0, address=address)
        script = [str(Path(options.what).absolute()), *options.arguments] if options.is_script else []
        return host(args, lambda invite: actors.follow(invite.line(), script, args.settings, options.patience_s))


class WorkerActor:
    """An actor that holds workers on its node, as long as the run lasts or it lives."""

    def __init__(self, folder: str) -> None:
        """`folder`: where the command was given. What is named relative to it is there, on nodes that have it too."""
        with suppress(OSError):  # this node may not have it; then only absolute paths can be named
            os.chdir(folder)
        os.environ |= {QUIET: "1", IGNORED: "SIGTERM"}

    def meet(self) -> tuple[str, int]:
        """Return where the ranks of a group may meet, if the first is here."""
        import ray

        return ray.util.get_node_ip_address(), free_port()

    def take_part(
        self, line: str, script: list[str], config: dict[str, Any], settings: tuple[str, ...], patience_s: float
    ) -> int:
        import ray

        with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
            write_whole(place := Path(folder) / "invite", line + "\n", 0o600)
            try:
                invite = read_invite(str(place))
                reach(ray.util.get_node_ip_address(), invite.host, invite.port, patience_s)
                return join(str(place), script, from_dict(WorkersConfig, config, "workers"), settings)
            except PotluckError as error:
                say(str(error))
                return error.exit_code

    def run_ranks(self, command: list[str], config: dict[str, Any], span: RankSpan) -> int:
        os.environ.pop(QUIET, None)  # rank 0 shows the run
        lead_gloo_to(span.address)
        try:
            return launch(command, from_dict(WorkersConfig, config, "workers"), span=span)
        except PotluckError as error:
            say(str(error))
            return error.exit_code


@dataclass
class ActorSlot:
    """Room for one actor."""

    node: str
    """Ray's id of it."""
    name: str
    cpus: float
    gpus: float
    config: WorkersConfig
    actor: Any = None
    work: Any = None
    """Ray's reference to what the actor is doing."""
    is_free_at: float = 0.0
    is_over: bool = False
    """Whether nobody is to be placed here again: its workers said why."""


@dataclass
class RayActors:
    options: UpOptions
    slots: dict[tuple[str, int], ActorSlot] = field(default_factory=dict)
    _begin: Callable[[Any, ActorSlot], Any] | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def fill(self) -> None:
        """An actor on every slot that has none, of every node that is there. Ray starts them as there is room."""
        nodes = {node["NodeID"]: node for node in _library().nodes() if node["Alive"]}
        for key in [key for key in self.slots if key[0] not in nodes]:
            del self.slots[key]
        for name, node in nodes.items():
            for number, slot in enumerate(slots_of(self.options, node)):
                self.slots.setdefault((name, number), slot)
        for slot in self.slots.values():
            if slot.actor is None and not slot.is_over and time.monotonic() >= slot.is_free_at:
                self._place(slot)

    def _place(self, slot: ActorSlot) -> None:
        ray = _library()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=slot.node, soft=False)
        options = {"num_cpus": slot.cpus, "num_gpus": slot.gpus, "scheduling_strategy": strategy, "max_restarts": 0}
        slot.actor = ray.remote(WorkerActor).options(**options).remote(str(Path.cwd()))
        if self._begin is not None:
            slot.work = self._begin(slot.actor, slot)

    def follow(self, line: str, script: list[str], settings: tuple[str, ...], patience_s: float) -> None:
        """Let all actors join, and until close() any that comes."""

        def begin(actor: Any, slot: ActorSlot) -> Any:
            return actor.take_part.remote(line, script, to_dict(slot.config), settings, patience_s)

        def watch() -> None:
            while not self._ended.wait(LOOK_S):
                self._note_ends()
                self.fill()

        self._begin = begin
        for slot in self.slots.values():
            slot.work = begin(slot.actor, slot)
        # A thread, since the host runs in this process's main one while nodes come and actors end.
        self._thread = threading.Thread(target=watch, name="actors", daemon=True)
        self._thread.start()

    def _note_ends(self) -> None:
        ray = _library()
        works = {slot.work: slot for slot in self.slots.values() if slot.work is not None}
        done = ray.wait(list(works), num_returns=len(works), timeout=0)[0] if works else []
        for work in done:
            slot = works[work]
            try:
                code = int(ray.get(work))
                # What was refused would be refused again; and who has left, or is done, has its reasons.
                slot.is_over = code in (0, ConfigError.exit_code, Interrupted.exit_code)
            except ray.exceptions.RayError as error:
                say(f"The workers on {slot.name} are lost: {type(error).__name__}. The run continues without them.")
            if not slot.is_over:
                slot.is_free_at = time.monotonic() + AGAIN_S
            self._leave(slot)

    def _leave(self, slot: ActorSlot) -> None:
        if slot.actor is not None:
            _library().kill(slot.actor)
        slot.actor = slot.work = None

    def run_group(self, command: list[str]) -> int:
        """Run a group until all ranks have ended, or one has failed and the rest have been ended."""
        ray = _library()
        slots = list(self.slots.values())
        if not slots:
            raise ConfigError("No node of the Ray cluster has a CPU or a GPU to give. Start one with ray start.")
        world, first = sum(slot.config.count for slot in slots), 0
        address, port = ray.get(slots[0].actor.meet.remote())
        works = []
        for slot in slots:
            count = slot.config.count
            span = RankSpan(
                first=first, world=world, address=self.options.address or address, port=self.options.port or port,
                places=count,
            )  # fmt: skip
            works.append(slot.actor.run_ranks.remote(command, to_dict(slot.config), span))
            first += count
        try:
            while works:
                done, works = ray.wait(works)
                if code := int(ray.get(done[0])):
                    return code
        except ray.exceptions.RayError as error:
            raise WorkerLost(
                f"A node of the group is lost ({type(error).__name__}), and with it the group. Start the command again:"
                " it resumes from the newest checkpoint. With --as host a run continues without a node."
            ) from None
        return 0

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()  # before slots are left: it would fill them again
        for slot in self.slots.values():
            self._leave(slot)


def slots_of(options: UpOptions, node: dict[str, Any]) -> list[ActorSlot]:
    """List the slots of a node as Ray describes it: one for each GPU; without any, or where all hold one model
    together, one for all.

    A slot takes as many of Ray's CPUs as its workers have threads.
    """
    resources = node["Resources"]
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if not cpus and not gpus:
        return []
    kind = next((name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")), "GPU")
    is_for_each = (
        gpus > 1 and options.workers is None and options.workers_here(NodeResources(gpus=(kind,) * gpus), 1) == gpus
    )
    slots = gpus if is_for_each else 1
    share = NodeResources(cores=max(1, cpus // slots), gpus=(kind,) * (gpus // slots))
    config = options.workers_config(options.workers_here(share, 1), share, 1)
    assert config.threads is not None
    return [
        ActorSlot(
            node=node["NodeID"],
            name=node.get("NodeManagerHostname") or node["NodeManagerAddress"],
            cpus=min(config.threads * config.count, cpus // slots),
            gpus=gpus // slots,
            config=config,
        )
        for _ in range(slots)
    ]
