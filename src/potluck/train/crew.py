"""Workers of a host on this machine: none of them needs another, so one that ends does not end the rest.

Imports no torch. When we ourselves are killed, however, they see our pipe close and end too.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

from potluck.errors import Interrupted
from potluck.train.launch import PARENT_PIPE, Worker, end_workers, start_worker, worker_environment
from potluck.train.order import WorkersConfig


class Crew:
    def __init__(self, command: list[str], config: WorkersConfig, environment: dict[str, str]) -> None:
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="potluck-")
        self._read_end, self._write_end = os.pipe()
        self._environment = worker_environment(config) | environment | {PARENT_PIPE: str(self._read_end)}
        self._heard: set[int] = set()
        self.workers: list[Worker] = []

    def start(self, names: list[str]) -> None:
        for rank, name in enumerate(names):
            environment = self._environment | {"POTLUCK_NAME": name}
            self.workers.append(start_worker(rank, self._command, environment, Path(self._folder.name), self._read_end))

    @property
    def is_alive(self) -> bool:
        return any(worker.is_alive for worker in self.workers)

    def news(self) -> list[Worker]:
        """Those who have ended since this was last asked."""
        ended = [w for w in self.workers if not w.is_alive and w.process.pid not in self._heard]
        self._heard.update(worker.process.pid for worker in ended)
        return ended

    def interrupt(self) -> None:
        for worker in self.workers:
            if worker.is_alive:
                worker.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        end_workers(self.workers, signal.SIGTERM)
        os.close(self._read_end)
        os.close(self._write_end)
        self._folder.cleanup()


def tell_end(worker: Worker) -> str:
    """What became of a worker, as a sentence; empty if all is well."""
    words = worker.words().removeprefix("potluck: ")
    if worker.code in (0, Interrupted.exit_code):
        return words
    if worker.code < 0:
        return f"A worker on this machine was ended by {signal.Signals(-worker.code).name}. {words}".strip()
    return words or f"A worker on this machine stopped with exit code {worker.code}."


def say(sentence: str) -> None:
    print(f"potluck: {sentence}", file=sys.stderr, flush=True)
