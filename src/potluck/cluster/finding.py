"""Finds the scheduler that started this process, from its environment. Pure: nothing is asked, opened or started."""

from collections.abc import Callable, Mapping

from potluck.cluster import launchers, slurm
from potluck.cluster.place import JobPlace
from potluck.errors import ConfigError

RAY = ("ray", "auto")
"""Name that `--on` has for the Ray cluster of this machine."""


def ray(environ: Mapping[str, str]) -> JobPlace | None:
    address = environ.get("RAY_ADDRESS", "")
    return JobPlace(scheduler="Ray", node="", leader=address, channel="actors") if address else None


LOOKS: dict[str, Callable[[Mapping[str, str]], JobPlace | None]] = {
    "torchrun": launchers.torchrun,
    "MPI": launchers.mpi,
    "SLURM": slurm.look,
    "Ray": ray,
    "SkyPilot": launchers.skypilot,
    "dstack": launchers.dstack,
    "Kubernetes": launchers.kubernetes,
}
"""The innermost first: torchrun and mpirun may run in a job of SLURM's, and Ray and SkyPilot's nodes in pods."""
VARIABLES = {
    "torchrun": "TORCHELASTIC_RUN_ID",
    "MPI": "OMPI_COMM_WORLD_RANK or PMI_RANK",
    "SLURM": "SLURM_JOB_ID",
    "Ray": "RAY_ADDRESS",
    "SkyPilot": "SKYPILOT_NODE_RANK",
    "dstack": "DSTACK_NODE_RANK",
    "Kubernetes": "JOB_COMPLETION_INDEX",
}


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
        return JobPlace(scheduler="Ray", node="", leader="auto" if on in RAY else on, channel="actors")
    for look in LOOKS.values():
        if (found := look(environ)) is not None:
            return found
    looked = ", ".join(f"{name} ({variable})" for name, variable in VARIABLES.items())
    raise ConfigError(
        f"No scheduler started this. Looked for: {looked}. Start it with srun, sbatch, mpirun, torchrun or ray job"
        " submit; or name a Ray cluster with --on. On one machine: potluck train RECIPE, or potluck run SCRIPT."
    )
