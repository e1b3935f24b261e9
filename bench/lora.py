"""LoRA with peft over a frozen llama: bytes on the wire, bytes on the disk, and the time of a step, against peft alone.

    python -m bench lora [--quick]

Bytes on the wire are what the system counts for the host's own TCP connections to two workers that share no memory with
it, TLS included, per agreement and worker. A checkpoint is all files of its folder, against the numbers of the adapter
and of AdamW's state.
"""

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.report import Comparison, Result
from bench.turns import say, take_turns

ROWS, LENGTH, BATCH, RANK = 512, 32, 8, 8
WARM_UP_STEPS = 3
TCP_INFO_BYTES, ACKED_AT = 136, 120
"""Of struct tcp_info: bytes that the other end has acknowledged, and bytes that came, one after the other."""


def build() -> Any:
    """A llama of 7.3M numbers with random weights, and an adapter of 65,536 on its attention."""
    import peft
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
    )
    lora = peft.LoraConfig(r=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)  # type: ignore[arg-type]


def rows() -> Any:
    import torch

    return torch.randint(0, 2048, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))


def loss_of(model: Any, batch: Any) -> Any:
    return model(input_ids=batch, labels=batch).loss


def make_optimizer(model: Any) -> Any:
    import torch

    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)


class Bare:
    """peft in a bare loop."""

    def __init__(self) -> None:
        self.model = build()
        self._optimizer, self._rows, self._at = make_optimizer(self.model), rows(), 0

    def step(self) -> None:
        batch = self._rows[self._at : self._at + BATCH]
        self._at = (self._at + BATCH) % ROWS
        loss = loss_of(self.model, batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        loss.item()


class Ours:
    def __init__(self) -> None:
        import potluck

        self.fleet = potluck.init()
        model = build()
        self.model, self._optimizer, self._loader = self.fleet.prepare(
            model, make_optimizer(model), rows(), batch_size=BATCH
        )
        self._batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def step(self) -> None:
        batch = next(self._batches)
        self.fleet.backward(loss_of(self.model, batch), samples=len(batch))
        self.fleet.step()

    def saved_bytes(self) -> tuple[int, int]:
        """(of the checkpoint's folder, of what must be in it)"""
        from potluck.save import checkpoint_folder

        with tempfile.TemporaryDirectory(prefix="bench-lora-") as folder:
            self.fleet.save(folder)
            self.fleet.wait_for_saves()
            found = sum(file.stat().st_size for file in checkpoint_folder.found(Path(folder))[0].iterdir())
        state = [each for known in self._optimizer.state.values() for each in known.values()]
        return found, self.adapter_bytes() + sum(each.nbytes for each in state)

    def adapter_bytes(self) -> int:
        return sum(each.nbytes for each in self.model.parameters() if each.requires_grad)


def measure(quick: bool) -> Result:
    ours, bare = Ours(), Bare()
    for side in (ours, bare):
        for _ in range(WARM_UP_STEPS):
            side.step()
    times = take_turns("lora", 5 if quick else 60, {"ours": timed(ours.step), "bare": timed(bare.step)}, "ms")
    cpu = in_cpu_time(ours, bare, 5 if quick else 60)
    saved, needed = ours.saved_bytes()
    adapter = ours.adapter_bytes()
    ours.fleet.close()
    say(f"lora: a checkpoint of {saved:,} bytes for {needed:,} of adapter and optimizer")
    compared = [
        Comparison(what="step of LoRA, 1 worker, against peft in a bare loop", unit="ms", **times, target=1.02),
        Comparison(
            what="CPU time of that step, on one thread, which others' load leaves alone", unit="ms", **cpu, target=1.02
        ),
        Comparison(
            what="bytes of a LoRA checkpoint, against the adapter and its optimizer's state",
            unit="bytes",
            ours=[saved],
            bare=[needed],
            target=1.05,
        ),
    ]
    for policy in ("sync", "cadence"):
        for way, found in zip(("to the host", "from it"), on_the_wire(policy, steps=6 if quick else 40), strict=True):
            say(f"lora: {policy}: {found:,.0f} bytes {way}, for an adapter of {adapter:,}")
            compared.append(
                Comparison(
                    what=f"LoRA on the wire, {way}, per agreement and worker, {policy}, 2 workers",
                    unit="bytes",
                    ours=[found],
                    bare=[float(adapter)],
                    target=1.05,
                )
            )
    return Result(compared, {"adapter_bytes": adapter, "checkpoint_bytes": saved})


def in_cpu_time(ours: Ours, bare: Bare, rounds: int) -> dict[str, list[float]]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sides = {"ours": timed(ours.step, time.thread_time), "bare": timed(bare.step, time.thread_time)}
    found = take_turns("lora, CPU time", rounds, sides, "ms")
    torch.set_num_threads(threads)
    return found


def timed(step: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    def turn() -> float:
        started = clock()
        step()
        return 1000 * (clock() - started)

    return turn


def on_the_wire(policy: str, steps: int) -> tuple[float, float]:
    """Bytes from each of two workers to the host, and back, per agreement."""
    from bench.stars import Host
    from potluck.environment import QUIET
    from potluck.fleet.invite import INVITE

    with tempfile.TemporaryDirectory(prefix="bench-lora-") as folder:
        host = Host(folder, 2, encrypted=True)
        environment = os.environ | {INVITE: host.listening()[0], QUIET: "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.lora_script", policy]
        workers = [subprocess.Popen(command, env=environment | {"POTLUCK_NAME": f"w{n}"}) for n in range(2)]
        try:
            begun, at = _at_step(host, 3)
            ended, end = _at_step(host, at + steps)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            host.server.stop()
    up, down = ((b - a) / (end - at) / len(workers) for a, b in zip(begun, ended, strict=True))
    return up, down


def _at_step(host: Any, step: int) -> tuple[tuple[int, int], int]:
    """(bytes that came and that left by then, the step)"""
    deadline = time.monotonic() + 180
    while host.server.core.standing.version < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the workers have not come to step {step}: {host.counts()}")
        time.sleep(0.002)
    return _counted(host), host.server.core.standing.version


def _counted(host: Any) -> tuple[int, int]:
    came = left = 0
    for connection in host.server.connections.values():
        told = connection.pipe._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        acked, received = struct.unpack_from("<QQ", told, ACKED_AT)
        came, left = came + received, left + acked
    return came, left
