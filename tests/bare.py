"""Real processes without a process group, which tell what they do and may be killed at any moment."""

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.ranks import _main_module_unnamed, _server

TIMEOUT_S = 30.0


class Tell:
    """A worker's way to speak to the test; listen() waits for what the test says."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, said: Any) -> None:
        self._connection.send(("told", said))

    def listen(self) -> Any:
        return self._connection.recv()


class Worker:
    """Runs function(tell, *arguments) in a process of its own; hear() returns what it told, in order."""

    def __init__(self, function: Callable[..., None], *arguments: Any, env: dict[str, str] | None = None) -> None:
        self._ours, theirs = _server.Pipe()
        with _main_module_unnamed():
            self._process = _server.Process(target=_be, args=(theirs, env or {}, function, arguments), daemon=True)
            self._process.start()
        theirs.close()

    def hear(self) -> Any:
        if not self._ours.poll(TIMEOUT_S):
            raise AssertionError(f"a worker said nothing for {TIMEOUT_S:g} s")
        kind, said = self._ours.recv()
        assert kind == "told", said
        return said

    def say(self, said: Any) -> None:
        self._ours.send(said)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """As kill -9 does."""
        self._process.kill()
        self._process.join()

    def finish(self) -> None:
        """Until it has ended by itself."""
        if not self._ours.poll(TIMEOUT_S):
            raise AssertionError(f"a worker did not end within {TIMEOUT_S:g} s")
        kind, said = self._ours.recv()
        assert kind == "ended", said
        self._process.join()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._ours.close()


def _be(connection: Connection, env: dict[str, str], function: Callable[..., None], arguments: tuple[Any]) -> None:
    os.environ |= env
    torch.set_num_threads(1)
    try:
        function(Tell(connection), *arguments)
        connection.send(("ended", None))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
    os._exit(0)
