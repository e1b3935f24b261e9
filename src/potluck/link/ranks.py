"""Ranks that are one worker of a host together: the first asks for the others, and its parent starts them.

Only the first knows how many there must be, once it has the recipe from the host, or has reached potluck.init() in a
script. It asks through a file, and is answered through another by what the ranks meet. Imports no torch.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from potluck.environment import RENDEZVOUS
from potluck.errors import ConfigError, WorkerLost
from potluck.files import write_whole
from potluck.waiting import wait_until

NODE = "POTLUCK_NODE"
"""Tells a worker's first rank where it asks for the others."""
RANKS = "POTLUCK_RANKS"
"""Tells a worker how many ranks it is to have, if its machine's owner has said so."""
MOST_RANKS = 1024
ANSWER_S = 60.0
"""How long a worker waits for its other ranks to be started: the command that does so may have been killed."""


def is_later_rank() -> bool:
    """Whether this process was started as another rank of a worker, whose first speaks with the host."""
    return _is_one_of_many() and os.environ.get("RANK", "0") != "0"


def _is_one_of_many() -> bool:
    return RENDEZVOUS in os.environ or (NODE not in os.environ and "WORLD_SIZE" in os.environ)


def asked_ranks() -> int | None:
    """How many ranks a worker of this machine is to have, if somebody has said so."""
    return int(os.environ[RANKS]) if RANKS in os.environ else None


def ranks_here(gpus: int) -> int:
    """How many ranks a worker of this machine has, where that is the machine's affair: those that were started, those
    that were asked for, or one for each GPU that is its own."""
    if _is_one_of_many():
        return int(os.environ["WORLD_SIZE"])
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return asked_ranks() or (max(1, gpus // workers) if NODE in os.environ else 1)


def meet(ranks: int) -> None:
    """Set the environment by which the ranks of this worker meet; those that are missing are started."""
    place = os.environ.pop(NODE, None)
    if place is not None and RENDEZVOUS not in os.environ:
        os.environ |= Request(Path(place)).ask(ranks)
        return
    world = os.environ.get("WORLD_SIZE")
    if world is None:
        raise ConfigError(
            f"HybridShard with an intra_node_size of {ranks} needs as many processes for one worker of a host. Start"
            " this with potluck join, which starts all of them."
        )
    if world != str(ranks):
        raise ConfigError(
            f"HybridShard has an intra_node_size of {ranks}, and {world} ranks were started as one worker of a host."
        )


@dataclass(frozen=True, slots=True)
class Request:
    """Asks, from a worker's first rank, for its other ranks to be started."""

    place: Path
    """A file with their number; the answer lies beside it."""

    def ask(self, ranks: int) -> dict[str, str]:
        """Waits for the answer: the environment by which they meet."""
        write_whole(self.place, str(ranks))
        if not wait_until(self._answer.exists, ANSWER_S):
            raise WorkerLost(
                f"The command that started this worker has not started its other ranks within {ANSWER_S:.0f} s."
            )
        return dict(json.loads(self._answer.read_text(encoding="utf-8")))

    def look(self) -> int | None:
        """How many ranks are asked for; none if nobody asks, or was answered."""
        if not self.place.exists() or self._answer.exists():
            return None
        ranks = int(self.place.read_text(encoding="utf-8"))
        if not 1 < ranks <= MOST_RANKS:
            raise ConfigError(f"A worker asks for {ranks} ranks; between 2 and {MOST_RANKS:,} are started.")
        return ranks

    def answer(self, environment: dict[str, str]) -> None:
        write_whole(self._answer, json.dumps(environment))

    @property
    def _answer(self) -> Path:
        return self.place.with_suffix(".answer")
