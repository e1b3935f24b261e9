"""Nodes: ranks that hold one replica together, and those who hold the same part of the others. Knows no model.

Of nodes of n ranks, ranks 0 to n - 1 are the first, the next n the second, and so on. Each steps by itself, and all
its ranks as one. A node of one rank is a whole replica.
"""

from dataclasses import dataclass

from potluck.agree.policy import Windowed
from potluck.errors import ConfigError
from potluck.link.link import Alone, Link, Parted
from potluck.shard.strategy import HybridShard, NoShard, ShardingStrategy


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
    assert isinstance(link, Parted)
    ranks = range(link.world)
    return Nodes(
        link=link,
        size=size,
        within=link.part([ranks[first : first + size] for first in ranks[::size]]),
        across=link.part([ranks[place::size] for place in ranks[:size]]),
    )


def node_size(policy: Windowed, strategy: ShardingStrategy, world: int) -> int:
    """How many ranks hold one replica together. Where all do, there is nothing to average."""
    if isinstance(strategy, NoShard):
        return 1
    alone = f"{type(policy).__name__} averages replicas, and there is only one"
    if not isinstance(strategy, HybridShard):
        if world == 1:
            return 1
        raise ConfigError(
            f"{alone}: {type(strategy).__name__} splits it over all {world} workers. Use HybridShard with an"
            f" intra_node_size that is smaller than {world} and divides it, or the policy Sync."
        )
    size = strategy.intra_node_size
    try:
        nodes = strategy.nodes(world)
    except ValueError as error:
        raise ConfigError(
            f"strategy: {error}. Start a multiple of {size} workers, or choose an intra_node_size that divides {world}."
        ) from None
    if nodes == 1 and size > 1:
        raise ConfigError(
            f"{alone}: HybridShard with an intra_node_size of {size} makes one node of all {world} workers. Start"
            f" {2 * size} or more, choose a smaller intra_node_size, or use the policy Sync."
        )
    return size
