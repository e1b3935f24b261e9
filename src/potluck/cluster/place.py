"""JobPlace: what a scheduler says of this process: which task it is, of how many, on which node.

Knows no scheduler, and starts nothing.
"""

from dataclasses import dataclass
from typing import Literal

Scheduler = Literal["SLURM", "Ray", "torchrun", "MPI", "Kubernetes", "SkyPilot", "dstack"]
Channel = Literal["files", "actors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlace:
    scheduler: Scheduler
    task: int = 0
    """This one, counted from 0 over all nodes. The first leads."""
    tasks: int | None = 1
    """None: nobody has said how many will come, and more may come at any time."""
    local: int = 0
    """This task among those of its node."""
    local_tasks: int = 1
    node: str
    """The name of this node."""
    cores: int | None = None
    """Cores that the scheduler has given on this node, if it says so."""
    leader: str = ""
    """How others reach the first node, if the scheduler says so; empty: the first node says it by itself."""
    attempt: str = ""
    """Tells this start of the job from others with the same run folder, if the scheduler does."""
    channel: Channel = "files"
    """How the invite travels: by files in the run folder, for their owner alone; or by calls of Ray's own actors."""
    job: str = ""
    """The job's number, of which the run folder may have its name: the same when the job is started again."""
    spread: tuple[str, ...] = ()
    """Command that runs a job on all of its nodes, to be put before ours, if ours runs on one node only so far."""
    group: tuple[str, int] | None = None
    """Address and port where the ranks of a group meet that the scheduler has made already."""

    def sentence(self) -> str:
        if self.channel == "actors":
            return f"Found {self.scheduler}."
        among = f" of {self.tasks}" if self.tasks is not None else ""
        return f"Found {self.scheduler}: this is task {self.task}{among}, on {self.node}."
