"""Workers of a host on this machine: none of them needs another, so one that ends does not end the rest.

Most are one process. One that trains a replica which is split over several asks for its other ranks (ranks.py); these
do need each other, and where one fails, all of them end. Imports no torch. When we ourselves are killed, however, they
see our pipe close and end too.
"""

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from potluck.environment import PARENT_PIPE, RENDEZVOUS
from potluck.errors import Interrupted, WorkerLost
from potluck.launch.processes import (
    GRACE_S,
    Worker,
    check_room,
    end_workers,
    group_environment,
    pass_on,
    start_worker,
    worker_environment,
)
from potluck.link.ranks import NODE, Request
from potluck.train.arguments import WorkersConfig


@dataclass
class Team:
    """The ranks of one worker, of which most have but one."""

    ranks: list[Worker]
    environment: dict[str, str]
    request: Request
    """Where the first asks for the others."""
    failed_at: float | None = None
    is_told: bool = False

    @property
    def is_alive(self) -> bool:
        return any(rank.is_alive for rank in self.ranks)

    def end_with_its_first(self, now: float) -> None:
        """Once one has failed the others end by themselves, and are ended if they do not."""
        if all(rank.is_alive or rank.code == 0 for rank in self.ranks):
            return
        self.failed_at = self.failed_at or now
        if now - self.failed_at > GRACE_S:
            end_workers(self.ranks, signal.SIGTERM)

    @property
    def blamed(self) -> Worker:
        """The rank that failed by itself. One that only lost another, or was asked to stop, did not."""
        excused = (0, WorkerLost.exit_code, Interrupted.exit_code)
        failed = [rank for rank in self.ranks if rank.code not in excused]
        return next(iter(failed or [rank for rank in self.ranks if rank.code]), self.ranks[0])


class WorkerPool:
    def __init__(self, command: list[str], config: WorkersConfig, environment: dict[str, str]) -> None:
        check_room(config.count)
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="potluck-")
        self._read_end, self._write_end = os.pipe()
        self._environment = worker_environment(config) | environment | {PARENT_PIPE: str(self._read_end)}
        for name in (RENDEZVOUS, "WORLD_SIZE"):  # of a group that started us: our workers are in none
            self._environment.pop(name, None)
        self._teams: list[Team] = []

    def start(self, names: list[str]) -> None:
        for number, name in enumerate(names):
            request = Request(Path(self._folder.name) / f"ranks-{number}")
            environment = self._environment | {"POTLUCK_NAME": name}
            first = self._start(number, environment | {NODE: str(request.place)})
            self._teams.append(Team([first], environment, request))

    def _start(self, rank: int, environment: dict[str, str], first: int = 0, of: str = "") -> Worker:
        folder = Path(self._folder.name)
        return start_worker(rank, self._command, environment, folder, self._read_end, first=first, of=of)

    @property
    def is_alive(self) -> bool:
        return any(team.is_alive for team in self._teams)

    @property
    def _ranks(self) -> list[Worker]:
        return [rank for team in self._teams for rank in team.ranks]

    def news(self) -> list[tuple[Worker, str]]:
        """Workers that have ended since this was last asked, and what became of each, as a sentence.

        Of several ranks, the one that ended it. Whoever asks for more ranks gets them here.
        """
        told = []
        for number, team in enumerate(self._teams):
            if (ranks := team.request.look()) is not None:
                self._complete(number, team, ranks)
            team.end_with_its_first(time.monotonic())
            if not team.is_alive and not team.is_told:
                team.is_told = True
                told.append((team.blamed, tell_end(team)))
        return told

    def _complete(self, number: int, team: Team, ranks: int) -> None:
        """Starts the other ranks of a worker, and tells the first by what they meet."""
        first = number * ranks
        group = group_environment(ranks, team.request.place.with_suffix(".rendezvous"))
        group["LOCAL_WORLD_SIZE"] = str(ranks * len(self._teams))
        for rank in range(1, ranks):
            team.ranks.append(self._start(rank, team.environment | group, first, f"{number}."))
        team.request.answer(group | {"RANK": "0", "LOCAL_RANK": str(first)})

    def interrupt(self) -> None:
        pass_on(signal.SIGINT, self._ranks)

    def close(self) -> None:
        end_workers(self._ranks, signal.SIGTERM)
        os.close(self._read_end)
        os.close(self._write_end)
        self._folder.cleanup()


def tell_end(team: Team) -> str:
    """What became of a worker, as a sentence; empty if all is well."""
    worker = team.blamed
    words = worker.words().removeprefix("potluck: ")
    if worker.code in (0, Interrupted.exit_code):
        return words
    if worker.code < 0:
        count = len(team.ranks)
        others = f", which was rank {team.ranks.index(worker)} of {count}, so that all of it ended" if count > 1 else ""
        return f"A worker on this machine was ended by {signal.Signals(-worker.code).name}{others}. {words}".strip()
    return words or f"A worker on this machine stopped with exit code {worker.code}."
