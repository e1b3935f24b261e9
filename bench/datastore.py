"""Activations from one process to another through a folder and through S3, against a bare write plus read.

Both sides put the same tensors with the same number of threads into the same folder or bucket, and take turns. Bare
means: a file that is written and renamed, and read as soon as it can be opened; or obstore's put and get. Nothing is
checked there. Ours writes and compares checksums, and deletes step by step what was received. The S3 server is
rclone's, on loopback and on the same disk, so it shares the machine with both processes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from bench.report import Comparison, Result
from bench.turns import say, take_turns

THREADS = 4
STEP = 8
"""Objects per step: a batch's micro-batches."""
BUCKET = "bench"


class Side(Protocol):
    def write(self, turn: int, tensors: list[Any]) -> None: ...

    def read(self, turn: int, count: int) -> None: ...

    def close(self) -> None: ...


def measure(quick: bool) -> Result:
    compared: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="bench-datastore-") as folder, s3_server(Path(folder) / "s3") as env:
        os.environ |= env
        for name, url, total_mb, rounds in (
            ("a folder", f"file://{folder}/store", 256, 50),
            ("S3 on loopback", f"s3://{BUCKET}/store", 128, 20),
        ):
            for size_mb in (4, 16):
                found = measure_at(url, size_mb, total_mb // size_mb, 2 if quick else rounds)
                what = f"bytes/s of {size_mb} MB activations through {name}, against a bare write plus read"
                ours, bare = found["ours"], found["bare"]
                compared.append(Comparison(what=what, unit="MB/s", ours=ours, bare=bare, target=0.8, at_least=True))
    return Result(compared, {"threads": THREADS, "objects per step": STEP})


def measure_at(url: str, size_mb: int, count: int, rounds: int) -> dict[str, list[float]]:
    import torch

    tensors = [torch.randn(size_mb << 18) for _ in range(STEP)]
    sides: dict[str, Side] = {"ours": Ours(url, 0), "bare": bare_at(url)}
    ours, theirs = get_context("spawn").Pipe()
    reader = get_context("spawn").Process(target=be_reader, args=(theirs, url, count), daemon=True)
    reader.start()
    theirs.close()
    turns = iter(range(10**6))

    def turn_of(name: str) -> Callable[[], float]:
        def turn() -> float:
            number = next(turns)
            ours.send((name, number))
            started = time.perf_counter()
            sides[name].write(number, [tensors[index % STEP] for index in range(count)])
            assert ours.recv() == "read"
            return count * size_mb * 1.048576 / (time.perf_counter() - started)

        return turn

    try:
        assert ours.recv() == "ready"
        for name in sides:
            turn_of(name)()  # once to warm up
        return take_turns(f"datastore {url[:4]} {size_mb} MB", rounds, {name: turn_of(name) for name in sides}, "MB/s")
    finally:
        ours.close()
        reader.join(60)
        for side in sides.values():
            side.close()


def be_reader(connection: Connection, url: str, count: int) -> None:
    import torch

    torch.set_num_threads(1)
    sides: dict[str, Side] = {"ours": Ours(url, 1), "bare": bare_at(url)}
    connection.send("ready")
    while True:
        try:
            name, turn = connection.recv()
        except EOFError:
            break
        sides[name].read(turn, count)
        connection.send("read")
    for side in sides.values():
        side.close()


class Ours:
    def __init__(self, url: str, stage: int) -> None:
        from potluck.stages.datastore import StoreChannel
        from potluck.store.store import Store

        store = Store(url, run="bench", generation=0, patience_s=60)
        self._channel = StoreChannel(store, stage, in_flight=THREADS)

    def write(self, turn: int, tensors: list[Any]) -> None:
        for label, tensor in zip(labels(turn, len(tensors)), tensors, strict=True):
            self._channel.send(label, tensor)
        self._channel.flush()

    def read(self, turn: int, count: int) -> None:
        expected = labels(turn, count)
        self._channel.expect(expected)
        for label in expected:
            self._channel.receive(label)
            if label.micro == STEP - 1:
                self._channel.consumed(label.step)

    def close(self) -> None:
        self._channel.end()


def labels(turn: int, count: int) -> list[Any]:
    from potluck.stages.pipeline import Label

    return [Label(turn * 1000 + index // STEP, "activation", 0, 1, index % STEP) for index in range(count)]


def bare_at(url: str) -> Side:
    return BareFolder(Path(url.removeprefix("file://"))) if url.startswith("file://") else BareBucket()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """work(0) to work(count - 1), in order, by as many threads as ours has."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(count)))


class BareFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = str(folder / "bare")
        os.makedirs(self._folder, exist_ok=True)  # noqa: PTH103

    def write(self, turn: int, tensors: list[Any]) -> None:
        def work(number: int) -> None:
            path = f"{self._folder}/{turn}-{number}"
            with open(f"{path}.new", "wb", buffering=0) as file:  # noqa: PTH123
                file.write(tensors[number].numpy().data)
            os.rename(f"{path}.new", path)  # noqa: PTH104

        in_threads(len(tensors), work)

    def read(self, turn: int, count: int) -> None:
        def work(number: int) -> None:
            path = f"{self._folder}/{turn}-{number}"
            with once_there(lambda: open(path, "rb", buffering=0)) as file:  # noqa: PTH123
                file.read()
            os.unlink(path)  # noqa: PTH108

        in_threads(count, work)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class BareBucket:
    """With the very settings of ours."""

    def __init__(self) -> None:
        from potluck.store.bucket import Bucket

        self._store = Bucket(BUCKET, "store/bare", patience_s=60)._store

    def write(self, turn: int, tensors: list[Any]) -> None:
        import obstore

        def work(number: int) -> None:
            data = memoryview(tensors[number].numpy()).cast("B")
            once_there(lambda: obstore.put(self._store, f"{turn}-{number}", data, use_multipart=False))

        in_threads(len(tensors), work)

    def read(self, turn: int, count: int) -> None:
        import obstore

        def work(number: int) -> None:
            once_there(lambda: obstore.get(self._store, f"{turn}-{number}")).bytes()

        in_threads(count, work)
        obstore.delete(self._store, [f"{turn}-{number}" for number in range(count)])

    def close(self) -> None:
        pass


def once_there(look: Callable[[], Any]) -> Any:
    """Tries until it works: rclone answers one request of thousands with an internal error of its own."""
    from obstore.exceptions import GenericError

    while True:
        try:
            return look()
        except (FileNotFoundError, GenericError):
            time.sleep(0.0005)


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """rclone's, from its package; the environment for its clients."""
    (folder / BUCKET).mkdir(parents=True)
    (folder.parent / "store").mkdir()
    program = Path(sys.executable).with_name("rclone")
    command = [program, "serve", "s3", "--auth-key=bench,secret", "--addr=127.0.0.1:0", "--config=", str(folder)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "http://127.0.0.1:" in line)
        url = "http://" + line.partition("http://")[2].partition("/")[0]
        threading.Thread(target=server.stderr.read, daemon=True).start()
        say(f"datastore: rclone at {url}")
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()
