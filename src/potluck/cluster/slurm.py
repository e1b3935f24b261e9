"""SLURM: what has to be asked of `scontrol`."""

import re
import socket
import subprocess
import sys
from contextlib import suppress

from potluck.cluster.place import JobPlace

ASK_S = 10.0


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
