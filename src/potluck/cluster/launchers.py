"""Schedulers that say in a few variables which task this is: torchrun, MPI, Kubernetes, SkyPilot and dstack. Pure."""

import socket
from collections.abc import Mapping

from potluck.cluster.place import JobPlace
from potluck.cluster.slurm import number


def torchrun(environ: Mapping[str, str]) -> JobPlace | None:
    """A group is there already, and torchrun watches over it."""
    if "RANK" not in environ or "TORCHELASTIC_RUN_ID" not in environ:
        return None
    local_tasks = max(1, number(environ, "LOCAL_WORLD_SIZE", 1))
    return JobPlace(
        scheduler="torchrun",
        task=number(environ, "RANK", 0),
        tasks=number(environ, "WORLD_SIZE", 1),
        local=number(environ, "LOCAL_RANK", 0),
        local_tasks=local_tasks,
        node=socket.gethostname(),
        attempt=f"{environ['TORCHELASTIC_RUN_ID']}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        group=(environ.get("MASTER_ADDR", "127.0.0.1"), number(environ, "MASTER_PORT", 29500)),
    )


MPI = {
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI_RANK": ("PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Variables of Open MPI, and of MPICH and Intel MPI: rank, how many, rank on the node, how many there."""


def mpi(environ: Mapping[str, str]) -> JobPlace | None:
    """Only the launcher's variables are read: no MPI library is loaded, and no message of its own is sent.

    srun sets PMI_RANK too, for programs of MPI; then it is SLURM that started this.
    """
    for rank, (size, local, local_size) in MPI.items():
        if rank not in environ or size not in environ:
            continue
        if rank == "PMI_RANK" and environ.get("SLURM_NTASKS") == environ[size]:
            continue
        return JobPlace(
            scheduler="MPI",
            task=number(environ, rank, 0),
            tasks=number(environ, size, 1),
            local=number(environ, local, 0),
            local_tasks=max(1, number(environ, local_size, 1)),
            node=socket.gethostname(),
            attempt=environ.get("PMIX_NAMESPACE", "") or environ.get("OMPI_MCA_ess_base_jobid", ""),
        )
    return None


def kubernetes(environ: Mapping[str, str]) -> JobPlace | None:
    """A pod of an indexed Job, as JobSet makes them. How many there will be, no pod is told: those that come, join."""
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    # Of several jobs in one set, the first pod of the first leads.
    jobs_before = number(environ, "JOB_INDEX", 0)
    task = number(environ, "JOB_COMPLETION_INDEX", 0) + (jobs_before << 20)
    return JobPlace(scheduler="Kubernetes", task=task, tasks=None, node=socket.gethostname())


def skypilot(environ: Mapping[str, str]) -> JobPlace | None:
    if "SKYPILOT_NODE_RANK" not in environ:
        return None
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    return JobPlace(
        scheduler="SkyPilot",
        task=number(environ, "SKYPILOT_NODE_RANK", 0),
        tasks=number(environ, "SKYPILOT_NUM_NODES", max(1, len(addresses))),
        node=socket.gethostname(),
        leader=addresses[0] if addresses else "",
        attempt=environ.get("SKYPILOT_TASK_ID", ""),
    )


def dstack(environ: Mapping[str, str]) -> JobPlace | None:
    if "DSTACK_NODE_RANK" not in environ:
        return None
    return JobPlace(
        scheduler="dstack",
        task=number(environ, "DSTACK_NODE_RANK", 0),
        tasks=number(environ, "DSTACK_NODES_NUM", 1),
        node=socket.gethostname(),
        leader=environ.get("DSTACK_MASTER_NODE_IP", ""),
    )
