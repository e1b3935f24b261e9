"""The gradients of workers on this machine, averaged by Potluck's server and back with everyone.

Against a bare loop over sockets that moves as many bytes the same ways and adds none of them, against an all-reduce by
Gloo; and encrypted against plain TCP, both as between two machines. All of them wait in processes of their own, and
take turns.
"""

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.ranks import ENVIRONMENT
from bench.report import Comparison, Result
from bench.stars import MB, Actor, ask_all, on_stage, receive_all, round_ms, start_star
from bench.turns import say, take_turns

PIECE_BYTES = 512 * 1024
SHAPES = ((2, 100), (4, 100), (2, 1))
"""(workers, megabytes)"""


def measure(quick: bool) -> Result:
    found: list[Comparison] = []
    details: dict[str, Any] = {}
    for workers, megabytes in SHAPES:
        compared, details[f"{workers} workers, {megabytes} MB"] = _measure_shape(workers, megabytes, quick)
        found += compared
    return Result(found, details)


def _measure_shape(workers: int, megabytes: int, quick: bool) -> tuple[list[Comparison], dict[str, Any]]:
    size = megabytes * MB
    rounds, steps = (3, 2) if quick else (30, 2)
    if megabytes == 1:
        steps = 20
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, on_stage() as actors:
        host, ours, _ = start_star(actors, f"{folder}/plain", workers, size)
        tcp_host, tcp, _ = start_star(actors, f"{folder}/tcp", workers, size, shares=False)
        tls_host, encrypted, _ = start_star(actors, f"{folder}/encrypted", workers, size, encrypted=True)
        bare = _start_bare(actors, workers, size, tuned=False)
        tuned = _start_bare(actors, workers, size, tuned=True)
        gloo = [Actor(Rank, f"{folder}/rendezvous", rank, workers, size) for rank in range(workers)]
        actors += gloo
        sides = {"ours": ours, "tcp": tcp, "encrypted": encrypted, "bare": bare, "tuned": tuned, "gloo": gloo}
        for group in sides.values():
            round_ms(group, 2)

        def rate(group: list[Actor]) -> Callable[[], float]:
            return lambda: 2 * workers * megabytes / round_ms(group, steps)  # megabytes per ms: GB/s

        measured = take_turns(
            f"star of {workers}, {megabytes} MB", rounds, {name: rate(group) for name, group in sides.items()}, "GB/s"
        )
        hosts = {"ours": host, "tcp": tcp_host, "encrypted": tls_host}
        details: dict[str, Any] = {name: _cpu_ms(hosts.get(name), group, steps) for name, group in sides.items()}
        details |= {"shared memory": host.call("shares"), "a step on disk, ms": host.call("record_ms")}
        say(f"{workers} workers, {megabytes} MB: {details}")
    what = f"{megabytes} MB from each of {workers} workers, averaged and back"
    goals = {
        "bare": (f"{what}: against a bare loop over sockets that adds nothing", 0.9),
        "tuned": (f"{what}: against the same with small send buffers", None),
        "gloo": (f"{what}: against an all-reduce by Gloo", 1.1 if megabytes > 1 else 0.6),
    }
    against = [
        Comparison(what=text, unit="GB/s", ours=measured["ours"], bare=measured[side], target=goal, at_least=True)
        for side, (text, goal) in goals.items()
    ]
    tls = Comparison(
        what=f"{what}, between machines: encrypted, against plain TCP",
        unit="GB/s",
        ours=measured["encrypted"],
        bare=measured["tcp"],
        target=0.6 if megabytes > 1 else None,
        at_least=True,
    )
    return [*against, tls], details


def _cpu_ms(host: Actor | None, group: list[Actor], steps: int) -> dict[str, float]:
    """Of a round: how long it takes, and the processor time of the host and of all workers together."""
    everyone = [*([host] if host is not None else []), *group]
    before = ask_all(everyone, "cpu_s")
    took_ms = round_ms(group, steps)
    used = [1000 * (end - start) / steps for start, end in zip(before, ask_all(everyone, "cpu_s"), strict=True)]
    hosts = used[: len(everyone) - len(group)]
    return {"ms": round(took_ms, 2), "host": round(sum(hosts), 2), "workers": round(sum(used[len(hosts) :]), 2)}


# The bare loop


def _start_bare(actors: list[Actor], workers: int, size: int, *, tuned: bool) -> list[Actor]:
    hub = Actor(Hub, workers, size, tuned)
    ends = [Actor(End, hub.call("listening"), size, tuned) for _ in range(workers)]
    actors += [hub, *ends]
    return ends


def _prepare(connection: socket.socket, tuned: bool) -> None:
    """Tuned for this machine alone: what is on its way stays in the caches, and is not held back for a network."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tuned:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 * 1024)
        if hasattr(socket, "TCP_CONGESTION"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class Hub:
    """Two threads for each end: one reads and forgets, the other sends as many bytes back once the first have come."""

    def __init__(self, ends: int, size: int, tuned: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._bytes = memoryview(bytearray(b"1" * size))
        self._tuned = tuned
        threading.Thread(target=self._serve, args=(ends,), daemon=True).start()

    def listening(self) -> int:
        return int(self._listener.getsockname()[1])

    def _serve(self, ends: int) -> None:
        for _ in range(ends):
            connection, _ = self._listener.accept()
            _prepare(connection, self._tuned)
            begun = threading.Semaphore(0)
            for loop in (self._read, self._write):
                threading.Thread(target=loop, args=(connection, begun), daemon=True).start()

    def _read(self, connection: socket.socket, begun: threading.Semaphore) -> None:
        space = memoryview(bytearray(PIECE_BYTES))
        with contextlib.suppress(OSError):
            while True:
                for start in range(0, len(self._bytes), PIECE_BYTES):
                    receive_all(connection, space[: len(self._bytes) - start])
                    if not start:
                        begun.release()

    def _write(self, connection: socket.socket, begun: threading.Semaphore) -> None:
        with contextlib.suppress(OSError):
            while begun.acquire():
                connection.sendall(self._bytes)


class End:
    """One worker of the bare loop: sends and receives at the same time."""

    def __init__(self, port: int, size: int, tuned: bool) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        _prepare(self._socket, tuned)
        self._own = memoryview(bytearray(b"1" * size))
        self._space = memoryview(bytearray(b"1" * size))

    def rounds(self, count: int) -> tuple[float, float]:
        started = time.monotonic()
        for _ in range(count):
            sender = threading.Thread(target=self._socket.sendall, args=(self._own,))
            sender.start()
            receive_all(self._socket, self._space)
            sender.join()
        return started, time.monotonic()


class Rank:
    """One rank of an all-reduce."""

    def __init__(self, rendezvous: str, rank: int, world: int, size: int) -> None:
        os.environ |= ENVIRONMENT
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        self._all_reduce = dist.all_reduce
        self._tensor = torch.zeros(size // 4)

    def rounds(self, count: int) -> tuple[float, float]:
        started = time.monotonic()
        for _ in range(count):
            self._all_reduce(self._tensor)
        return started, time.monotonic()
