"""The largest model that two ranks train of which one may hold a third of the other's memory.

Shares of 3 to 1, against torch's fully_shard, whose shares are even, and against our own engine with even shares.

The limit is the kernel's: RLIMIT_DATA, counted from when torch and a first small model have run, and set when the model
has been split. Beyond it an allocation fails, so a size either trains or does not; nothing is estimated, and no root is
needed. (A control group would also count the pages of torch's own files, and would kill instead of refusing.) Building
the model happens before: whoever builds it whole needs four bytes for each parameter, with any strategy.
"""

import ctypes
import gc
import multiprocessing
import os
import re
import resource
import tempfile
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bench.ranks import CPU_ONLY
from bench.report import Comparison, Result
from bench.turns import say

RANKS = (3, 1)
"""Their memory, in proportion."""
SIDES = {"uneven": (3.0, 1.0), "even": (), "our even": (1.0, 1.0)}
"""Weights of FullShard; none of them: torch's fully_shard."""
STEPS = 3
TOKENS = 16
TRIAL_S = 60.0
FITS, REFUSED, FAILED = 0, 3, 1
"""How a rank ends."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",  # freed tensors go back to the kernel, and not to a list of malloc's
}


def measure(quick: bool) -> Result:
    os.environ.update(ENVIRONMENT)  # before the fork server starts
    dim, small_bytes = (128, 40_000_000) if quick else (256, 256_000_000)
    found: dict[str, int] = {}
    for side in SIDES:
        found[side] = _largest(side, dim, small_bytes)
        say(f"uneven_memory: {side} trains {found[side]} layers, {_parameters(dim, found[side]) / 1e6:.1f}M parameters")
    millions = {side: [_parameters(dim, layers) / 1e6] for side, layers in found.items()}
    what = "largest model on two ranks, one with a third of the other's memory, shares 3 to 1 against even ones"
    comparisons = [
        Comparison(
            what=f"{what} of {whose}",
            unit="M parameters",
            ours=millions["uneven"],
            bare=millions[side],
            target=target,
            at_least=True,
        )
        for side, whose, target in (("even", "fully_shard", 1.8), ("our even", "our own engine", None))
    ]
    theory = {"even": 2 * small_bytes / 16e6, "uneven": sum(RANKS) * small_bytes / 16e6}
    limits = [each * small_bytes for each in RANKS]
    details = {"limits_bytes": limits, "dim": dim, "layers": found, "millions": millions, "theory_millions": theory}
    return Result(comparisons, details)


def _largest(side: str, dim: int, small_bytes: int) -> int:
    """Layers, by halving: as many as fit, one more does not."""
    each = 16 * (_parameters(dim, 2) - _parameters(dim, 1))
    fits, too_many = 0, sum(RANKS) * small_bytes // each + 2  # AdamW's sixteen bytes alone would need more
    while too_many - fits > 1:
        layers = (fits + too_many) // 2
        if _trains(side, dim, small_bytes, layers):
            fits = layers
        else:
            too_many = layers
    return fits


def _trains(side: str, dim: int, small_bytes: int, layers: int) -> bool:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "torch._dynamo", "potluck.train.recipe", "potluck.replica.sharded"])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        ranks = [
            server.Process(target=_be, args=(rank, folder, side, dim, layers, small_bytes * share))
            for rank, share in enumerate(RANKS)
        ]
        try:
            for rank in ranks:
                rank.start()
            codes = _await(ranks)
            words = "\n".join(path.read_text() for path in sorted(Path(folder).glob("words-*")))
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    say(f"uneven_memory: {side}, {layers} layers: ranks ended with {codes}")
    if FAILED in codes and not any(code == REFUSED or (code or 0) < 0 for code in codes):
        raise SystemExit(f"A rank failed for another reason than memory:\n{words}")
    return codes == [FITS] * len(ranks)


def _await(ranks: list[BaseProcess]) -> list[int | None]:
    """Until all have ended, or one has not fitted: the other would wait for it. A rank that is late does not fit."""
    deadline = time.monotonic() + TRIAL_S
    while time.monotonic() < deadline:
        codes = [rank.exitcode for rank in ranks]
        if None not in codes or any(code == REFUSED or (code or 0) < 0 for code in codes):
            break
        time.sleep(0.02)
    return [rank.exitcode for rank in ranks]


def _config(dim: int, layers: int) -> Any:
    from potluck.train.model import ModelConfig

    return ModelConfig(dim=dim, layers=layers, heads=dim // 32, context=TOKENS)


def _parameters(dim: int, layers: int) -> int:
    import torch

    from potluck.train.model import GPT

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(_config(dim, layers)).parameters())


# A rank's side


def _be(rank: int, folder: str, side: str, dim: int, layers: int, limit_bytes: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= CPU_ONLY  # here, and not before the fork server starts: benchmarks of a GPU may follow
    torch.set_num_threads(1)
    code = FAILED
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(RANKS))
        _train(side, dim, 2, None)  # threads, and whatever a library allocates once
        base_bytes = _data_bytes()
        _train(side, dim, layers, base_bytes + limit_bytes)
        dist.barrier()
        code = FITS
    except (MemoryError, RuntimeError) as error:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        is_refused = isinstance(error, MemoryError) or re.search("t allocate memory|not enough memory", str(error))
        code = REFUSED if is_refused else FAILED
        _leave_words(folder, rank)  # also those of a rank that lost its peer, which is no failure of its own
    except BaseException:
        _leave_words(folder, rank)
    os._exit(code)


def _leave_words(folder: str, rank: int) -> None:
    (Path(folder) / f"words-{rank}").write_text(traceback.format_exc())


def _train(side: str, dim: int, layers: int, limit_bytes: int | None) -> None:
    import torch

    from potluck.replica.precision import StepConfig, switch_on
    from potluck.replica.sharded import shard_over
    from potluck.sharding.strategy import FullShard
    from potluck.train.model import GPT, next_token_loss

    device = torch.device("cpu")
    torch.manual_seed(1)
    model = GPT(_config(dim, layers))
    switch_on(model, device, StepConfig(checkpoint_activations=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sharded = shard_over(model, optimizer, FullShard(weights=SIDES[side]), device)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))
    rows = torch.randint(model.config.vocab, (1, TOKENS + 1))
    for _ in range(STEPS):
        sharded.arm(last=True)
        next_token_loss(model, rows)[0].backward()
        sharded.finish()
        sharded.norm()
        sharded.step()
        sharded.share()


def _data_bytes() -> int:
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
