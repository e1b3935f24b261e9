"""`potluck up`, on one task of a job: the first leads, the others follow, and all of them train one run.

Knows places and plans, and no scheduler but what SLURM has to be asked for. Imports no torch.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from potluck.cluster.meeting import Meeting, Reply
from potluck.cluster.options import UpOptions, resumes
from potluck.cluster.place import JobPlace, find
from potluck.cluster.plan import Decision, own_resources, plan, plan_early
from potluck.cluster.reaching import lead_gloo_to, reach
from potluck.environment import IGNORED, QUIET
from potluck.errors import ConfigError, PotluckError, WorkerLost
from potluck.fleet.invite import Invite, reachable, read_invite
from potluck.launch.host import host
from potluck.launch.join import join
from potluck.launch.processes import RankSpan, free_port, launch
from potluck.save.run_folder import holds_run, make_run_folder
from potluck.signals import ECHO_S
from potluck.words import say

ASK_S = 10.0
"""How long SLURM has to answer: one whose controller is away would hold up the job."""
TURNED_AWAY_S = 5.0
"""How long a first node that cannot begin waits for those whom it tells so: some may never come."""


def up(options: UpOptions) -> int:
    """Returns the exit code."""
    place = find(os.environ, options.on)
    if options.is_script and not Path(options.what).is_file():
        raise ConfigError(f"There is no script {options.what}.")
    if place.scheduler == "Ray":
        from potluck.cluster.ray import up_on_ray

        return up_on_ray(options, place.leader)
    if place.spread:
        say(f"Found {place.scheduler}: on all nodes of job {place.job}, with {' '.join(place.spread)}")
        try:
            os.execvp(place.spread[0], [*place.spread, sys.executable, "-m", "potluck.cli", *sys.argv[1:]])
        except OSError as error:  # in a container, say
            raise ConfigError(
                f"Cannot run {place.spread[0]}: {error.strerror}. Where there is none, as in a container, start the"
                f" command on every node from outside: srun --ntasks-per-node=1 ... potluck up {options.what}"
            ) from None
    os.environ[IGNORED] = "SIGTERM"  # SLURM sends it to all; this process passes on what is meant
    return _Task(options, place).run()


class _Task:
    def __init__(self, options: UpOptions, place: JobPlace) -> None:
        self.options, self.place = options, place
        self.folder = options.folder(place.job)
        self.resources = own_resources(place.cores, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.workers = options.workers_here(self.resources, place.local_tasks)
        self.config = options.workers_config(self.workers, self.resources, place.local_tasks)

    def run(self) -> int:
        make_run_folder(self.folder)
        meeting = Meeting(self.folder, self.place.attempt, self.place.tasks)
        if self.place.group is not None and self.options.led != "host":
            return self._as_rank(meeting)
        if self.place.task:
            return self._follow(meeting)
        with meeting.hold():
            try:
                return self._lead(meeting)
            except PotluckError:
                self._turn_away(meeting)
                raise
            finally:
                meeting.close()

    def _as_rank(self, meeting: Meeting) -> int:
        """Become the worker in the group that torchrun has made. All resume, or none does."""
        if self.place.task == 0:
            say(f"{self.place.sentence()} A fixed group, which {self.place.scheduler} has made.")
            resume = holds_run(self.folder)
            self._hear(meeting, Decision("group", ""))
            for task, each in meeting.greetings().items():
                meeting.answer(task, Reply(word=each.word, led="group", resume=resume))
        else:
            resume = self._greet(meeting).resume
        command = self.options.group_command(self.folder, resume=resume)
        del os.environ[IGNORED]  # torchrun signals its workers itself, once
        os.execv(sys.executable, [sys.executable, "-m", "potluck.launch.worker", *command])

    # The first

    def _lead(self, meeting: Meeting) -> int:
        resume = resumes(self.folder)
        requeued = self.place.scheduler == "SLURM" and self.options.led is None and may_be_requeued(self.place)
        decided = plan_early(self.place, self.options.led, may_be_requeued=requeued)
        if decided is None or decided.led == "group":
            decided = self._hear(meeting, decided)
        say(f"{self.place.sentence()} {decided.sentence}")
        if decided.led == "group":
            return self._lead_group(meeting, resume)
        args = self.options.host_args(self.folder, self.config, local=self.workers, address=self._address())
        return host(args, meeting.hand_over)

    def _turn_away(self, meeting: Meeting) -> None:
        """Tell all who wait for an answer that the run is over, so that they need not wait any longer."""
        for task, each in meeting.wait_for_all(TURNED_AWAY_S).items():
            meeting.answer(task, Reply(word=each.word, led="host", is_over=True))
        time.sleep(1.0)  # they look many times a second, and then the answers go

    def _hear(self, meeting: Meeting, decided: Decision | None) -> Decision:
        """Waits for all others, for half as long as they wait for an answer; a group that was asked for needs all."""
        patience_s = self.options.patience_s * (0.5 if decided is None else 10)
        came = meeting.wait_for_all(patience_s)
        if decided is None:
            nodes = [(self.place.node, self.resources), *((each.node, each.brings) for each in came.values())]
            return plan(self.place, nodes)
        if missing := sorted({*range(1, self.place.tasks or 1)} - {*came}):
            raise ConfigError(
                f"A fixed group was asked for, and tasks {', '.join(map(str, missing))} have not come within"
                f" {patience_s:.0f} s. Leave out --as group, and those who come late will join."
            )
        return decided

    def _lead_group(self, meeting: Meeting, resume: bool) -> int:
        came = meeting.greetings()
        world = self.workers + sum(each.workers for each in came.values())
        address, port, first = self._address(), self.options.port or free_port(), self.workers
        for task, each in came.items():
            reply = Reply(
                word=each.word, led="group", address=address, port=port, first=first, world=world, resume=resume
            )
            meeting.answer(task, reply)
            first += each.workers
        return self._launch(Reply(word="", led="group", address=address, port=port, world=world, resume=resume))

    def _address(self) -> str:
        found = address_of(self.place) if self.place.scheduler == "SLURM" else None
        return self.options.address or found or self.place.leader or reachable("0.0.0.0")

    # The others

    def _follow(self, meeting: Meeting) -> int:
        reply = self._greet(meeting)
        if reply.led == "group":
            self._tell_if_unreachable(reply)
            return self._launch(reply)
        return self._join(meeting)

    def _greet(self, meeting: Meeting) -> Reply:
        greeting = meeting.greet(self.place.task, self.place.node, self.workers, self.resources)
        reply = meeting.wait_for_answer(self.place.task, greeting, self.options.patience_s, say)
        if reply.is_over:
            raise WorkerLost(f"{self.place.node} has nothing to do: the first node could not begin, and said why.")
        return reply

    def _join(self, meeting: Meeting) -> int:
        invite = read_invite(str(meeting.invite))
        reach(self.place.node, invite.host, invite.port, self.options.patience_s)
        os.environ[QUIET] = "1"  # all tasks have one log, and the host shows the run in it
        if self.place.scheduler == "SLURM":
            self._watch_first_node(invite)
        args = self.options.host_args(self.folder, self.config, local=0, address=invite.host)
        return join(str(meeting.invite), list(args.script), self.config, args.settings)

    def _tell_if_unreachable(self, reply: Reply) -> None:
        """Say so, in a thread, if the first node cannot be reached: beside the workers, which are loading torch."""

        def look() -> None:
            try:
                reach(self.place.node, reply.address, reply.port, self.options.patience_s)
            except ConfigError as error:
                say(str(error))

        threading.Thread(target=look, name="reach", daemon=True).start()

    def _watch_first_node(self, invite: Invite) -> None:
        """SLURM starts no task again, so a host that is gone stays away; and of a job that may outlive a node it does
        not ask whose node that was. Started again, the job resumes."""

        def look() -> None:
            while True:
                time.sleep(min(5.0, self.options.patience_s / 3))
                try:
                    reach(self.place.node, invite.host, invite.port, self.options.patience_s)
                except ConfigError as error:
                    say(f"The first node is lost: {error}")
                    if may_be_requeued(self.place) and requeue(self.place):
                        say(f"Job {self.place.job} is requeued, and resumes from what was saved.")
                    for _ in range(2):
                        os.kill(os.getpid(), signal.SIGTERM)
                        time.sleep(2 * ECHO_S)  # sooner, the second would be the first's echo
                    return

        # A thread, since this process waits for its workers, which would look for the lost host until they give up.
        threading.Thread(target=look, name="first node", daemon=True).start()

    # Both

    def _launch(self, reply: Reply) -> int:
        count = self.workers
        command = self.options.group_command(self.folder, resume=reply.resume)
        if reply.world == count:
            return launch(command, self.config)
        span = RankSpan(
            first=reply.first,
            world=reply.world,
            address=reply.address,
            port=reply.port,
            place=self.place.local * count,
            places=self.place.local_tasks * count,
        )
        lead_gloo_to(reply.address)
        return launch(command, self.config, span=span)


# What has to be asked of SLURM, by scontrol


def address_of(place: JobPlace) -> str | None:
    """How other nodes reach this one: by its name, or where names are not resolved, by what SLURM itself reaches."""
    try:
        socket.getaddrinfo(place.node, None)
        return place.node
    except OSError:
        return _field(_ask("node", place.node), "NodeAddr")


def may_be_requeued(place: JobPlace) -> bool:
    """Whether SLURM may take the nodes away and start the job again. A job without a batch script is never."""
    said = _ask("job", place.job)
    return _field(said, "BatchFlag") == "1" and _field(said, "Requeue") == "1"


def requeue(place: JobPlace) -> bool:
    """Whether SLURM takes the job back, to start it again from its beginning."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(["scontrol", "requeue", place.job], check=False, timeout=ASK_S).returncode == 0
    return False


def _ask(kind: str, name: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", "show", kind, name], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"potluck: scontrol show {kind} {name} gave no answer: {error}", file=sys.stderr, flush=True)
        return ""
    return done.stdout if done.returncode == 0 else ""


def _field(said: str, name: str) -> str | None:
    found = re.search(rf"(?<!\S){name}=(\S+)", said)
    return found[1] if found else None
