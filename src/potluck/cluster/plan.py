"""How a run over several nodes is led: as a fixed group, or by a host, by what each node brings. Loads no torch.

The decision is pure, and its reason is a sentence.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from potluck.cluster.place import JobPlace
from potluck.environment import processor, usable_cores
from potluck.words import plural

As = Literal["group", "host"]
NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResources:
    cores: int = 1
    processor: str = ""
    gpus: tuple[str, ...] = ()
    """The kind of each."""

    def words(self) -> str:
        cores = f"{plural(self.cores, 'core')} of {self.processor or 'an unknown kind'}"
        kinds = ", ".join(f"{self.gpus.count(kind)} × {kind}" for kind in sorted(set(self.gpus)))
        return f"{cores} and {kinds}" if kinds else cores


def own_resources(cores: int | None, visible: str | None) -> NodeResources:
    """Find the resources of this machine. `cores`: by the scheduler's word, where it has one; `visible`:
    CUDA_VISIBLE_DEVICES."""
    usable = usable_cores()
    return NodeResources(
        cores=min(usable, cores) if cores else usable, processor=processor(), gpus=_gpus(NVIDIA, visible)
    )


def _gpus(folder: Path, visible: str | None) -> tuple[str, ...]:
    """List the GPUs of NVIDIA's driver that this process may use."""
    kinds = []
    for path in sorted(folder.glob("*/information")):
        with suppress(OSError):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("Model:"):
                    kinds.append(line.partition(":")[2].strip())
    if visible is None:
        return tuple(kinds)
    visible_ids = [word for word in visible.split(",") if word.strip() not in ("", "-1", "NoDevFiles")]
    named = [kinds[int(word)] for word in visible_ids if word.strip().isdigit() and int(word) < len(kinds)]
    return tuple(named) if len(named) == len(visible_ids) else tuple(kinds[: len(visible_ids)])


def difference(nodes: Sequence[tuple[str, NodeResources]]) -> str:
    """How the first that differs does so, as a sentence; empty where all are alike."""
    first, its = nodes[0]
    for name, resources in nodes[1:]:
        if resources != its:
            return f"{name} has {resources.words()}, and {first} {its.words()}"
    return ""


@dataclass(frozen=True, slots=True)
class Decision:
    led: As
    sentence: str


def plan_early(place: JobPlace, asked: As | None, *, may_be_requeued: bool) -> Decision | None:
    """Decide what is clear before any other node is heard of; None if they decide it."""
    if asked is not None:
        return Decision(asked, f"{_what(asked)}, as asked.")
    if may_be_requeued:
        return _host_since(f"{place.scheduler} may take the nodes away and start the job again")
    if place.tasks is None:
        return _host_since(f"{place.scheduler} does not say how many will come")
    return None


def plan(place: JobPlace, nodes: Sequence[tuple[str, NodeResources]]) -> Decision:
    """Decide by the nodes that have come, this one first."""
    missing = (place.tasks or len(nodes)) - len(nodes)
    if missing > 0:
        are = "is" if missing == 1 else "are"
        return _host_since(f"{plural(missing, 'node')} {are} not there yet and may come later")
    if other := difference(nodes):
        return _host_since(f"nodes differ: {other}")
    if len(nodes) == 1:
        return Decision("group", "A fixed group, on this node alone.")
    return Decision("group", f"{_what('group')}, since all {len(nodes)} nodes are alike: {nodes[0][1].words()}.")


def _host_since(why: str) -> Decision:
    return Decision("host", f"{_what('host')}, since {why}.")


def _what(led: As) -> str:
    return "A fixed group" if led == "group" else "A host on the first node, which the others join"
