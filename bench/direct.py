"""Bytes per second of activations through Direct between two processes, against a bare socket with the same bytes.

    python -m bench direct [--quick]

Both are streams over the loopback interface, from one process to another: a round sends some tensors one after another,
and the clock of the receiver runs until it has the last of them. The bare socket is the least that can be done: sendall
from memory that is there already, recv_into memory that is there already. Direct gives every tensor memory of its own,
as a backward needs it, behind a header that says what follows. The receiver lets go of a tensor when the next one
comes, as a stage does that has gone backward.
"""

import socket
import time
from collections.abc import Callable
from typing import Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.turns import take_turns

SIZES_MB = (1, 16, 64)
ROUND_MB = 256
"""Bytes of one turn."""
TARGET = 0.8


def measure(quick: bool) -> Result:
    rounds, round_mb = (3, 64) if quick else (40, ROUND_MB)
    found = run_ranks("bench.direct", rounds, round_mb)[1]  # the receiver's
    return Result(
        [
            Comparison(
                what=f"activations of {size} MB between two processes: Direct, against a bare socket",
                unit="GB/s",
                ours=turns["ours"],
                bare=turns["bare"],
                target=TARGET,
                at_least=True,
            )
            for size, turns in ((size, found[str(size)]) for size in SIZES_MB)
        ]
    )


def measure_as_rank(rounds: str, round_mb: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from potluck.stages.direct import GroupChannel

    rank = dist.get_rank()
    channel = GroupChannel(None, torch.device("cpu"), rank=rank, workers=2)
    bare = _connect(rank)
    found = {}
    for size in SIZES_MB:
        count = max(1, int(round_mb) // size)
        tensor = torch.full((size << 18,), float(size))  # four bytes each
        stream = _Stream(channel, tensor, count, rank)
        sides = {"ours": _timed(stream.through_channel, tensor.nbytes * count)}
        sides["bare"] = _timed(lambda move=_Bare(bare, tensor, count, rank): move(), tensor.nbytes * count)
        for side in sides.values():
            side()
        found[str(size)] = take_turns(f"direct: {size} MB", int(rounds), sides, "GB/s", show=rank == 1)
    channel.close()
    bare.close()
    return found


class _Stream:
    """Some tensors through our channel, each with a label of its own."""

    def __init__(self, channel: Any, tensor: Any, count: int, rank: int) -> None:
        self.channel, self.tensor, self.count, self.rank = channel, tensor, count, rank
        self.step = 0

    def through_channel(self) -> None:
        from potluck.stages.pipeline import Label

        self.step += 1
        labels = [Label(self.step * 1000 + self.tensor.numel(), "activation", 0, 1, n) for n in range(self.count)]
        if self.rank == 0:
            for label in labels:
                self.channel.send(label, self.tensor)
            self.channel.flush()
            return
        self.channel.expect(labels)
        for label in labels:
            received = self.channel.receive(label)
        assert received[0] == self.tensor[0] and received[-1] == self.tensor[-1]


class _Bare:
    """The same bytes through a socket."""

    def __init__(self, connection: socket.socket, tensor: Any, count: int, rank: int) -> None:
        self.connection, self.count, self.rank = connection, count, rank
        self.bytes = memoryview(tensor.clone().numpy()).cast("B")

    def __call__(self) -> None:
        for _ in range(self.count):
            if self.rank == 0:
                self.connection.sendall(self.bytes)
                continue
            rest = self.bytes
            while rest:
                rest = rest[self.connection.recv_into(rest) :]


def _timed(move: Callable[[], None], size_bytes: int) -> Callable[[], float]:
    """GB/s, as the receiver has them; both begin together."""
    import torch.distributed as dist

    def turn() -> float:
        dist.barrier()
        started = time.perf_counter()
        move()
        return size_bytes / (time.perf_counter() - started) / 1e9

    return turn


def _connect(rank: int) -> socket.socket:
    import torch
    import torch.distributed as dist

    port = torch.zeros((), dtype=torch.int64)
    if rank == 1:
        listener = socket.create_server(("127.0.0.1", 0))
        port.fill_(listener.getsockname()[1])
    dist.broadcast(port, src=1)
    if rank == 0:
        return socket.create_connection(("127.0.0.1", int(port)))
    with listener:
        return listener.accept()[0]


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
