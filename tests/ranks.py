"""N real Gloo ranks in about a tenth of a second: children of a fork server that has torch loaded already.

Each rank is a process of its own; they meet over a file, on the loopback interface. A rank that fails, or takes too
long, fails the test with its traceback, and none is ever left behind.
"""

import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "torch.utils.serialization.config",
    "pytest",
    "hypothesis",
    "potluck.train.recipe",
    "potluck.replica.sharded",
    "potluck.replica.staged",
    "potluck.save.store_run",
    "potluck.stages.datastore",
    "tests.preloaded",
]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


class RankFailed(AssertionError):
    pass


class _TooLate(Exception):
    def __init__(self, ranks: list[int], timeout_s: float) -> None:
        super().__init__(f"ranks {ranks} took longer than {timeout_s} s")
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank."""

    kind: str
    """fine, failed, died or late."""
    data: Any
    """What it returned, its traceback, or where it stood."""


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60) -> list[Any]:
    """Calls function(*arguments) on each of `world` ranks and returns what they returned, in order of rank.

    Results may be tensors, numbers, strings, and lists or dictionaries of them.
    """
    with _started(world, function, arguments) as (rendezvous, ranks):
        try:
            return _collect([connection for _, connection in ranks], timeout_s)
        except _TooLate as late:
            raise RankFailed(f"{late}\n{_stacks(rendezvous, [ranks[rank][0] for rank in late.ranks])}") from None


def try_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float, grace_s: float
) -> list[Outcome]:
    """The same, of each rank what became of it. Once one has failed, the others have `grace_s` left."""
    with _started(world, function, arguments) as (rendezvous, ranks):
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < world:
            missing = {connection: rank for rank, (_, connection) in enumerate(ranks) if rank not in found}
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in missing.values():
                    found[rank] = Outcome("late", _stacks(rendezvous, [ranks[rank][0]]))
            for connection in ready:
                outcome = _outcome(connection)  # type: ignore[arg-type]
                found[missing[connection]] = outcome  # type: ignore[index]
                if outcome.kind != "fine":
                    deadline = min(deadline, time.monotonic() + grace_s)
        return [found[rank] for rank in range(world)]


def _outcome(connection: Connection) -> Outcome:
    try:
        is_fine, data = connection.recv()
    except EOFError:
        return Outcome("died", "died without a word")
    return (
        Outcome("fine", torch.load(io.BytesIO(data), "cpu", weights_only=True)) if is_fine else Outcome("failed", data)
    )


@contextmanager
def _started(world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[tuple[str, list[Any]]]:
    """Where they meet, and of each its process and connection. None is left when this ends."""
    with tempfile.TemporaryDirectory(prefix="potluck-test-") as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        ranks: list[Any] = []
        try:
            with _main_module_unnamed():
                for rank in range(world):
                    ours, theirs = _server.Pipe(duplex=False)
                    process = _server.Process(target=_be, args=(rank, world, rendezvous, theirs, function, arguments))
                    process.start()
                    theirs.close()
                    ranks.append((process, ours))
            yield rendezvous, ranks
        finally:
            for process, connection in ranks:
                connection.close()
                process.kill()
                process.join()


def _collect(connections: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(connections):
        missing = [c for rank, c in enumerate(connections) if rank not in results]
        ready = wait(missing, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(connections)) if rank not in results]
            raise _TooLate(late, timeout_s)
        for connection in ready:
            rank = connections.index(connection)  # type: ignore[arg-type]
            try:
                fine, data = connections[rank].recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not fine:
                raise RankFailed(_cause(connections, rank, data))
            results[rank] = torch.load(io.BytesIO(data), "cpu", weights_only=True)
    return [results[rank] for rank in range(len(connections))]


def _stacks(rendezvous: str, processes: list[Any]) -> str:
    """Where each of them is, in all its threads."""
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # faulthandler says nothing when it is done
    return "\n".join(_stack_file(rendezvous, process.pid).read_text() for process in processes)


def _stack_file(rendezvous: str, pid: int) -> Path:
    return Path(f"{rendezvous}.stack-{pid}")


def _cause(connections: list[Connection], rank: int, said: str) -> str:
    """A rank that lost a peer is not the one to blame: whoever else fails within a second is."""
    if "WorkerLost" in said:
        for other, connection in enumerate(connections):
            if other != rank and connection.poll(1.0):
                try:
                    fine, data = connection.recv()
                except EOFError:
                    return f"rank {other} died without a word, and rank {rank} noticed:\n{said}"
                if not fine and "WorkerLost" not in data:
                    return f"rank {other} failed:\n{data}"
    return f"rank {rank} failed:\n{said}"


def _be(
    rank: int, world: int, rendezvous: str, connection: Connection, function: Callable[..., Any], arguments: tuple[Any]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "POTLUCK_RENDEZVOUS": rendezvous,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, _stack_file(rendezvous, os.getpid()).open("w"), all_threads=True)
    try:
        result = function(*arguments)
        buffer = io.BytesIO()
        torch.save(result, buffer)
        connection.send((True, buffer.getvalue()))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    os._exit(0)


@contextmanager
def _main_module_unnamed() -> Iterator[None]:
    """Else each child would run pytest's own script again, to have its names."""
    main = sys.modules["__main__"]
    file, spec = main.__dict__.pop("__file__", None), main.__spec__
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
