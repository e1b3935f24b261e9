"""Ranks that are one worker of a host together: the first asks for the others, and whoever started it starts them.

Only the first knows how many there must be, once it has the recipe from the host, or has reached potluck.init() in a
script. It asks through a file, and is answered through another by what the ranks meet. Imports no torch.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from potluck.environment import POLL_S, RENDEZVOUS
from potluck.errors import ConfigError, WorkerLost

NODE = "POTLUCK_NODE"
"""Tells a worker's first rank where it asks for the others."""
MOST_RANKS = 1024
ANSWER_S = 60.0


def is_later_rank() -> bool:
    """Whether this process was started as another rank of a worker, whose first speaks with the host."""
    is_one_of_many = RENDEZVOUS in os.environ or (NODE not in os.environ and "WORLD_SIZE" in os.environ)
    return is_one_of_many and os.environ.get("RANK", "0") != "0"


def meet(ranks: int) -> None:
    """From here on the environment says by what the ranks of this worker meet; those that are missing are started."""
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
    """Of a worker's first rank, for the others."""

    place: Path
    """A file with their number; the answer lies beside it."""

    def ask(self, ranks: int) -> dict[str, str]:
        """Waits for the answer: the environment by which they meet."""
        _appear(self.place, str(ranks))
        deadline = time.monotonic() + ANSWER_S
        while not self._answer.exists():
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"Whoever started this worker has not started its other ranks within {ANSWER_S:.0f} s."
                )
            time.sleep(POLL_S)
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
        _appear(self._answer, json.dumps(environment))

    @property
    def _answer(self) -> Path:
        return self.place.with_suffix(".answer")


def _appear(path: Path, text: str) -> None:
    """A file that is there whole, or not at all."""
    aside = path.with_suffix(".part")
    aside.write_text(text, encoding="utf-8")
    aside.rename(path)
