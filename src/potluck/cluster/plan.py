"""How a run over several nodes is led: as a fixed group, or by a host. Pure; the reason is a sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from potluck.cluster.place import JobPlace
from potluck.cluster.resources import NodeResources, difference
from potluck.words import plural

As = Literal["group", "host"]


@dataclass(frozen=True, slots=True)
class Decision:
    led: As
    sentence: str


def plan_early(place: JobPlace, asked: As | None, *, may_be_requeued: bool) -> Decision | None:
    """Decide what is clear before any other node is heard of; None if they decide it."""
    if asked is not None:
        return Decision(asked, f"{_what(asked)}, as asked.")
    if may_be_requeued:
        return Decision(
            "host", f"{_what('host')}, since {place.scheduler} may take the nodes away and start the job again."
        )
    if place.tasks is None:
        return Decision("host", f"{_what('host')}, since {place.scheduler} does not say how many will come.")
    return None


def plan(place: JobPlace, nodes: Sequence[tuple[str, NodeResources]]) -> Decision:
    """Decide by the nodes that have come, this one first."""
    missing = (place.tasks or len(nodes)) - len(nodes)
    if missing > 0:
        are = "is" if missing == 1 else "are"
        return Decision(
            "host", f"{_what('host')}, since {plural(missing, 'node')} {are} not there yet and may come later."
        )
    if other := difference(nodes):
        return Decision("host", f"{_what('host')}, since nodes differ: {other}.")
    if len(nodes) == 1:
        return Decision("group", "A fixed group, on this node alone.")
    return Decision("group", f"{_what('group')}, since all {len(nodes)} nodes are alike: {nodes[0][1].words()}.")


def _what(led: As) -> str:
    return "A fixed group" if led == "group" else "A host on the first node, which the others join"
