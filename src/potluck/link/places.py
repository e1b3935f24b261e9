"""Places: who holds which stage, of which replica, for whose rows. Knows no model.

A replica is cut over `workers` places, and each place may be held by several ranks that split it. Of 2 replicas of 3
stages, each split over 2 ranks, rank 0 and 1 are stage 0 of the first, 2 and 3 stage 1, and so on. Ranks of one number
within their places compute the same rows: they are a *lane*.
"""

from dataclasses import dataclass

from potluck.link.link import Alone, Link


@dataclass(frozen=True, slots=True)
class Places:
    link: Link
    workers: int
    """Places of each replica."""
    each: int
    """Ranks that hold one place together."""
    line: Link
    """The ranks of our lane, in the order of their stages."""
    peers: Link
    """All who hold the same stages as we do, of any replica."""
    shards: Link
    """Those of them who hold them of our replica: each some part."""

    @property
    def size(self) -> int:
        """Ranks of a replica."""
        return self.workers * self.each

    @property
    def lanes(self) -> int:
        return self.link.world // self.workers

    def lane_of(self, rank: int) -> int:
        return rank // self.size * self.each + rank % self.each

    def place_of(self, rank: int) -> int:
        return rank // self.each % self.workers

    @property
    def lane(self) -> int:
        return self.lane_of(self.link.rank)

    @property
    def place(self) -> int:
        return self.place_of(self.link.rank)

    @property
    def is_last(self) -> bool:
        return self.place == self.workers - 1

    def ranks_of(self, lane: int) -> list[int]:
        return [rank for rank in range(self.link.world) if self.lane_of(rank) == lane]


def make_places(link: Link, workers: int, each: int) -> Places:
    """Every rank of the link calls this alike. `workers`: places of each replica; `each`: ranks of each place."""
    alone = Places(link, workers, each, Alone(), Alone(), Alone())
    if link.world == 1:
        return alone
    ranks = range(link.world)
    lines = [alone.ranks_of(lane) for lane in range(alone.lanes)]
    peers = [[rank for rank in ranks if alone.place_of(rank) == place] for place in range(workers)]
    shards = link.part([ranks[first : first + each] for first in ranks[::each]]) if each > 1 else Alone()
    return Places(link, workers, each, link.part(lines), link.part(peers), shards)
