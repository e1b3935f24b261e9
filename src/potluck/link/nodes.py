"""Nodes: ranks that hold one replica together, and those who hold the same part of the others. Knows no model.

Of nodes of n ranks, ranks 0 to n - 1 are the first, the next n the second, and so on. Each steps by itself, and all
its ranks as one. A node of one rank is a whole replica.
"""

from dataclasses import dataclass

from potluck.link.link import Alone, Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    link: Link
    """All ranks of all nodes."""
    size: int
    """Ranks of each node."""
    within: Link
    """The ranks of our node."""
    across: Link
    """One rank of each node: those who hold the same part of a replica as we do."""

    @property
    def count(self) -> int:
        return self.link.world // self.size

    @property
    def number(self) -> int:
        """Of our node."""
        return self.link.rank // self.size

    @property
    def names(self) -> list[str]:
        return [f"node {number}" if self.size > 1 else f"worker {number}" for number in range(self.count)]


def make_nodes(link: Link, size: int) -> Nodes:
    """Every rank of the link calls this alike."""
    if size == 1:
        return Nodes(link=link, size=1, within=Alone(), across=link)
    ranks = range(link.world)
    return Nodes(
        link=link,
        size=size,
        within=link.part([ranks[first : first + size] for first in ranks[::size]]),
        across=link.part([ranks[place::size] for place in ranks[:size]]),
    )
