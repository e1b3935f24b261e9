"""The time to save and to load a 50M model that is fully sharded over two ranks, against torch.distributed.checkpoint.

Both sides live in the same two processes, each with its own copy of the model and of AdamW's state, and take turns.
Both end with all bytes synced to the disk; both read files that the system may still have in memory. Ours also writes
a checksum of every file, and compares them before it loads.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.turns import say, take_turns

WHAT = {
    "save": "time until a checkpoint of a 50M model, FullShard on 2 ranks, is on the disk, against dcp.save",
    "stall": "time that training stands still for it, against dcp.async_save",
    "load": "time to load it, against dcp.load",
}


def measure(quick: bool) -> Result:
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        told = run_ranks("bench.checkpoint_time", folder, 2 if quick else 15, "small" if quick else "large")
    answer = told[0]
    compared = [
        Comparison(what=what, unit="s", ours=answer[f"ours {key}"], bare=answer[f"bare {key}"], target=None)
        for key, what in WHAT.items()
    ]
    return Result(compared, {"parameters": answer["parameters"], "bytes": answer["bytes"]})


def measure_as_rank(place: str, rounds: str, size: str) -> dict[str, Any]:
    import torch.distributed as dist

    from bench.contenders import parameters_of

    ours, bare = Ours(Path(place) / "ours", size), Bare(Path(place) / "bare", size)
    parameters = parameters_of(bare.model)
    speaks = dist.get_rank() == 0
    if speaks:
        say(f"checkpoint_time: {parameters / 1e6:.1f}M parameters")
    found: dict[str, Any] = {}
    for key in WHAT:
        sides = {f"{name} {key}": timed(getattr(side, key)) for name, side in (("ours", ours), ("bare", bare))}
        for turn in sides.values():
            turn()  # once to warm up
        found |= take_turns("checkpoint_time", int(rounds), sides, "s", show=speaks)
    size_bytes = sum(file.stat().st_size for file in (Path(place) / "ours").rglob("*.safetensors"))
    return found | {"parameters": parameters, "bytes": size_bytes}


def timed(work: Callable[[], Callable[[], None]]) -> Callable[[], float]:
    """Seconds, on the rank that took longer. What `work` returns is done afterwards, and not counted."""
    import torch
    import torch.distributed as dist

    def turn() -> float:
        dist.barrier()
        started = time.perf_counter()
        rest = work()
        took_s = torch.tensor(time.perf_counter() - started)
        rest()
        dist.all_reduce(took_s, dist.ReduceOp.MAX)
        return took_s.item()

    return turn


def nothing() -> None:
    pass


def build(size: str) -> Any:
    import torch

    from potluck.train.model import GPT, ModelConfig

    torch.manual_seed(1)
    shape = {"large": ModelConfig(dim=640, layers=10, heads=10), "small": ModelConfig(dim=128, layers=2, heads=4)}
    return GPT(shape[size])


class Ours:
    def __init__(self, folder: Path, size: str) -> None:
        import torch

        import potluck
        from potluck.sharding.strategy import FullShard
        from potluck.train.model import next_token_loss

        self.folder = folder
        self.model = build(size)
        self.fleet = potluck.init(strategy=FullShard())
        self.fleet.prepare(self.model, torch.optim.AdamW(self.model.parameters(), fused=True))
        loss, samples = next_token_loss(self.model, torch.zeros(1, 9, dtype=torch.int64))
        self.fleet.backward(loss, samples=samples)
        self.fleet.step()

    def save(self) -> Callable[[], None]:
        self.stall()()
        return nothing

    def stall(self) -> Callable[[], None]:
        self.fleet.save(self.folder, keep_last=1)
        return self.fleet.wait_for_saves

    def load(self) -> Callable[[], None]:
        assert self.fleet.load(self.folder)
        return nothing


class Bare:
    """fully_shard, and torch.distributed.checkpoint as its documentation shows it."""

    def __init__(self, folder: Path, size: str) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        from potluck.train.model import next_token_loss

        self.folder, self.count = folder, 0
        self.model = build(size)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        next_token_loss(self.model, torch.zeros(1, 9, dtype=torch.int64))[0].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=self._next())
        return self._remove_old

    def stall(self) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        begun: Any = dcp.async_save(self._state(), checkpoint_id=self._next())

        def rest() -> None:
            begun.result()
            self._remove_old()

        return rest

    def load(self) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=self.folder / str(self.count))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return nothing

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _next(self) -> Path:
        self.count += 1
        return self.folder / str(self.count)

    def _remove_old(self) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / str(self.count - 1), ignore_errors=True)


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
