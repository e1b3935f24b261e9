"""SLURM: what it says of a task in its environment, and what has to be asked of `scontrol`.

In a batch script or an allocation nothing runs on the other nodes yet: then `srun` runs the command again, on all.
"""

import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from potluck.cluster.place import JobPlace

ASK_S = 10.0


def look(environ: Mapping[str, str]) -> JobPlace | None:
    """Pure. None where this is no job of SLURM's."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    shared = {"scheduler": "SLURM", "node": node, "job": environ.get("SLURM_JOB_ID_HET_GROUP_0") or job}
    if "SLURM_STEP_ID" not in environ and "SLURM_STEPID" not in environ:
        return JobPlace(**shared, tasks=None, spread=spread(environ))  # type: ignore[arg-type]
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


def spread(environ: Mapping[str, str]) -> tuple[str, ...]:
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
