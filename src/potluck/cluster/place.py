"""Finds the scheduler that started this process, and JobPlace: what it says of it, in its environment. Pure.

Nothing is asked, opened or started: what has to be asked of SLURM is in running.py.
"""

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from potluck.errors import ConfigError

Scheduler = Literal["SLURM", "Ray", "torchrun", "MPI", "Kubernetes", "SkyPilot", "dstack"]


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
    job: str = ""
    """The job's number, of which the run folder may have its name: the same when the job is started again."""
    spread: tuple[str, ...] = ()
    """Command that runs a job on all of its nodes, to be put before ours, if ours runs on one node only so far."""
    group: tuple[str, int] | None = None
    """Address and port where the ranks of a group meet that the scheduler has made already."""

    def sentence(self) -> str:
        if self.scheduler == "Ray":
            return f"Found {self.scheduler}."
        among = f" of {self.tasks}" if self.tasks is not None else ""
        return f"Found {self.scheduler}: this is task {self.task}{among}, on {self.node}."


RAY = ("ray", "auto")
"""Name that `--on` has for the Ray cluster of this machine."""


def find(environ: Mapping[str, str], on: str | None = None) -> JobPlace:
    """`on`: a Ray cluster that was named, instead of whatever started this."""
    if on is not None:
        if on.startswith("ray://"):
            raise ConfigError(
                "The host has to be inside of the cluster, where nodes reach it, and ray:// leads in from outside."
                " Submit it as a job: ray job submit --address http://HEAD:8265 -- potluck up RECIPE"
            )
        if on not in RAY and ":" not in on:
            raise ConfigError(f"--on takes ray, for the cluster of this machine, or the address of one; not {on!r}.")
        return JobPlace(scheduler="Ray", node="", leader="auto" if on in RAY else on)
    for _, look in LOOKS.values():
        if (found := look(environ)) is not None:
            return found
    looked = ", ".join(f"{name} ({variable})" for name, (variable, _) in LOOKS.items())
    raise ConfigError(
        f"No scheduler started this. Looked for: {looked}. Start it with srun, sbatch, mpirun, torchrun or ray job"
        " submit; or name a Ray cluster with --on. On one machine: potluck train RECIPE, or potluck run SCRIPT."
    )


def _task(scheduler: Scheduler, environ: Mapping[str, str], *names: str, **more: Any) -> JobPlace:
    """Read a place from variables of these names: task, tasks, and where there are any, the same on this node."""
    task, tasks, local, here = (*names, "", "")[:4]
    return JobPlace(
        scheduler=scheduler,
        task=number(environ, task, 0),
        tasks=number(environ, tasks, 1),
        local=number(environ, local, 0),
        local_tasks=max(1, number(environ, here, 1)),
        node=socket.gethostname(),
        **more,
    )


def _torchrun(environ: Mapping[str, str]) -> JobPlace | None:
    """A group is there already, and torchrun watches over it."""
    if "RANK" not in environ or "TORCHELASTIC_RUN_ID" not in environ:
        return None
    attempt = f"{environ['TORCHELASTIC_RUN_ID']}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    group = environ.get("MASTER_ADDR", "127.0.0.1"), number(environ, "MASTER_PORT", 29500)
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    return _task("torchrun", environ, *names, attempt=attempt, group=group)


MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Variables of Open MPI, and of MPICH and Intel MPI: rank, how many, rank on the node, how many there."""


def _mpi(environ: Mapping[str, str]) -> JobPlace | None:
    """Only the launcher's variables are read: no MPI library is loaded, and no message of its own is sent.

    srun sets PMI_RANK too, for programs of MPI; then it is SLURM that started this.
    """
    for rank, size, *local in MPI:
        is_srun = rank == "PMI_RANK" and environ.get("SLURM_NTASKS") == environ.get(size)
        if rank in environ and size in environ and not is_srun:
            attempt = environ.get("PMIX_NAMESPACE", "") or environ.get("OMPI_MCA_ess_base_jobid", "")
            return _task("MPI", environ, rank, size, *local, attempt=attempt)
    return None


def _slurm(environ: Mapping[str, str]) -> JobPlace | None:
    """In a batch script or an allocation nothing runs on the other nodes yet: `srun` runs it again, on all."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    shared = {"scheduler": "SLURM", "node": node, "job": environ.get("SLURM_JOB_ID_HET_GROUP_0") or job}
    if "SLURM_STEP_ID" not in environ and "SLURM_STEPID" not in environ:
        return JobPlace(**shared, tasks=None, spread=_spread(environ))  # type: ignore[arg-type]
    tasks = number(environ, "SLURM_NTASKS", number(environ, "SLURM_STEP_NUM_TASKS", 1))
    return JobPlace(
        **shared,  # type: ignore[arg-type]
        task=number(environ, "SLURM_PROCID", 0),
        tasks=tasks,
        local=number(environ, "SLURM_LOCALID", 0),
        local_tasks=_tasks_here(environ),
        cores=number(environ, "SLURM_CPUS_ON_NODE", 0) or None,
        attempt=f"{shared['job']}.{environ.get('SLURM_STEP_ID') or environ['SLURM_STEPID']}.{restarts}",
    )


def _spread(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One task on each node, of every part of a heterogeneous job; and those that are left go on without a lost one."""
    parts = number(environ, "SLURM_HET_SIZE", 1)
    groups = [f"--het-group=0-{parts - 1}"] if parts > 1 else []
    # What sbatch was told of tasks is for programs that do not start their own processes on a node.
    return ("srun", *groups, "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Return this node's number of tasks from a list such as `2(x3),1`, which is 2, 2, 2 and 1."""
    counts: list[int] = []
    for each in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", each):
            counts += [int(found[1])] * int(found[2] or 1)
    node = number(environ, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 1


def number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    """`2` and `2(x3)` are both 2."""
    found = re.match(r"[0-9]{1,9}", environ.get(name, ""))
    return int(found[0]) if found else otherwise


def _ray(environ: Mapping[str, str]) -> JobPlace | None:
    address = environ.get("RAY_ADDRESS", "")
    return JobPlace(scheduler="Ray", node="", leader=address) if address else None


def _skypilot(environ: Mapping[str, str]) -> JobPlace | None:
    if "SKYPILOT_NODE_RANK" not in environ:
        return None
    leader, attempt = environ.get("SKYPILOT_NODE_IPS", "").partition("\n")[0], environ.get("SKYPILOT_TASK_ID", "")
    return _task("SkyPilot", environ, "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", leader=leader, attempt=attempt)


def _dstack(environ: Mapping[str, str]) -> JobPlace | None:
    if "DSTACK_NODE_RANK" not in environ:
        return None
    leader = environ.get("DSTACK_MASTER_NODE_IP", "")
    return _task("dstack", environ, "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", leader=leader)


def _kubernetes(environ: Mapping[str, str]) -> JobPlace | None:
    """A pod of an indexed Job, as JobSet makes them. How many there will be, no pod is told: those that come, join."""
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    # Of several jobs in one set, the first pod of the first leads.
    jobs_before = number(environ, "JOB_INDEX", 0)
    task = number(environ, "JOB_COMPLETION_INDEX", 0) + (jobs_before << 20)
    return JobPlace(scheduler="Kubernetes", task=task, tasks=None, node=socket.gethostname())


LOOKS: dict[str, tuple[str, Callable[[Mapping[str, str]], JobPlace | None]]] = {
    "torchrun": ("TORCHELASTIC_RUN_ID", _torchrun),
    "MPI": ("OMPI_COMM_WORLD_RANK or PMI_RANK", _mpi),
    "SLURM": ("SLURM_JOB_ID", _slurm),
    "Ray": ("RAY_ADDRESS", _ray),
    "SkyPilot": ("SKYPILOT_NODE_RANK", _skypilot),
    "dstack": ("DSTACK_NODE_RANK", _dstack),
    "Kubernetes": ("JOB_COMPLETION_INDEX", _kubernetes),
}
"""The innermost first: torchrun and mpirun may run in a job of SLURM's, and Ray and SkyPilot's nodes in pods."""
