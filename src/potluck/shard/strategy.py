"""ShardingStrategy: what of a replica is split over its ranks."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class NoShard:
    """Nothing is split: each rank is a whole replica, and full gradients are averaged between them."""

    kind: ClassVar[str] = "no_shard"


ShardingStrategy = NoShard
