"""What fetching rows costs: processes that fetch, against the same under DDP; and under a host, against rows for free.

Under a host, reading a row takes as long as training on it, and two processes of each worker read. Both sides live in
the same two processes and take turns, which are long there: what was fetched ahead while the other side had its turn is
one step's, and must not count for more than a little. A plain loop without a host, in which each process trains by
itself on slices of the same size, tells what of the difference is the fetching processes' own: their work is done on
the cores that train.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.stars import Actor, Host, on_stage
from bench.step_time import WARM_UP_STEPS, timed
from bench.turns import say, take_turns

WORLD, FETCHERS, ROWS_PER_RANK, ROWS_PER_SLICE = 2, 2, 8, 2
PATIENCE_S = 600.0
"""A worker that has its turn elsewhere is not lost."""


def measure(quick: bool) -> Result:
    rounds = 3 if quick else 40
    in_group = run_ranks("bench.fetching", "group", rounds, 1)[0]
    turns, steps = (2, 4) if quick else (8, 24)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, on_stage() as actors:
        for side in ("slow", "free"):
            (Path(folder) / side).mkdir()
            actors.append(Actor(Host, f"{folder}/{side}", WORLD, False, 0, PATIENCE_S))
        invites = [actor.call("listening")[0] for actor in actors]
        led = run_ranks("bench.fetching", "led", turns, steps, *invites)[0]
    return Result(
        [
            Comparison(
                what="step time with a DataLoader of 2 workers, 20M model on 2 CPU ranks, against DDP",
                unit="ms",
                ours=in_group["ours"],
                bare=in_group["bare"],
                target=1.02,
            ),
            Comparison(
                what="rows/s where fetching a row takes as long as training on it, under a host, against rows for free",
                unit="rows/s",
                ours=led["slow"],
                bare=led["free"],
                target=0.95,
                at_least=True,
            ),
            Comparison(
                what="the same in a plain loop of each process, without a host",
                unit="rows/s",
                ours=led["slow alone"],
                bare=led["free alone"],
                target=None,
            ),
        ],
        {"row_ms": led["row_ms"], "steps_per_turn": steps, "fetchers": FETCHERS},
    )


def measure_as_rank(kind: str, *arguments: str) -> dict[str, Any]:
    return (_measure_group if kind == "group" else _measure_led)(*arguments)


def _rows(tokens: Any, pause_s: float = 0.0) -> Any:
    from torch.utils.data import Dataset

    class Rows(Dataset[Any]):
        """Tokens that take some time to read."""

        def __len__(self) -> int:
            return len(tokens)

        def __getitem__(self, row: int) -> Any:
            time.sleep(pause_s)
            return tokens[row]

    return Rows()


def _measure_group(rounds: str, steps: str) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    from bench.contenders import GPT_20M, Bare, Ours, Task

    count = WARM_UP_STEPS + int(rounds) * int(steps)
    task = Task(model=GPT_20M, rows_per_rank=1, steps=count)
    rows = _rows(task.tokens(WORLD))

    class Fetching(Ours):
        """Given the DataLoader that a single process would have."""

        def data(self, task: Task) -> Any:
            return DataLoader(rows, batch_size=WORLD, shuffle=True, num_workers=FETCHERS)

    ours, bare = Fetching(task), Bare(task)
    loader = DataLoader(rows, batch_size=1, sampler=DistributedSampler(rows), num_workers=FETCHERS)
    bare.batches = ([batch] for batch in loader)
    for side in (ours, bare):
        for _ in range(WARM_UP_STEPS):
            side.step()
    sides = {"ours": timed(ours.step, int(steps)), "bare": timed(bare.step, int(steps))}
    return take_turns("fetching", int(rounds), sides, "ms", show=dist.get_rank() == 0)


def _measure_led(rounds: str, steps: str, slow: str, free: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from bench.contenders import Led, Task
    from potluck import Sync
    from potluck.environment import QUIET
    from potluck.fleet.invite import INVITE
    from potluck.train.model import ModelConfig

    os.environ |= {QUIET: "1", "POTLUCK_NAME": f"rank {dist.get_rank()}"}
    count = 3 * (WARM_UP_STEPS + (1 + int(rounds)) * int(steps))  # a worker may be given nothing of some steps
    task = Task(model=ModelConfig(dim=128, layers=4, heads=4, context=128), rows_per_rank=ROWS_PER_RANK, steps=count)

    class Given(Led):
        def __init__(self, invite: str, data: Any) -> None:
            os.environ[INVITE] = invite
            self._data = data
            self.policy = (Sync(),)
            super().__init__(task)

        def data(self, task: Task) -> Any:
            return self._data

    tokens = task.tokens(WORLD)
    plain = Given(free, tokens)
    for _ in range(WARM_UP_STEPS):
        plain.step()
    step_ms = timed(plain.step, int(steps))()
    pause_s = step_ms / 1000 / ROWS_PER_RANK
    if dist.get_rank() == 0:
        say(f"fetching: training on a row takes {1000 * pause_s:.2f} ms, and so does reading it")
    loader = DataLoader(_rows(tokens, pause_s), batch_size=WORLD * ROWS_PER_RANK, shuffle=True, num_workers=FETCHERS)
    fetched = Given(slow, loader)
    for _ in range(WARM_UP_STEPS):
        fetched.step()

    def rows_per_s(step: Callable[[], float]) -> Callable[[], float]:
        group = timed(step, int(steps))
        return lambda: 1000 * WORLD * ROWS_PER_RANK / group()

    alone = {
        "slow alone": rows_per_s(_plain_loop(task, _rows(tokens, pause_s), FETCHERS)),
        "free alone": rows_per_s(_plain_loop(task, tokens, 0)),
    }
    sides = {"slow": rows_per_s(fetched.step), "free": rows_per_s(plain.step)} | alone
    found: dict[str, Any] = take_turns("fetching", int(rounds), sides, "rows/s", show=dist.get_rank() == 0)
    torch.distributed.barrier()
    return found | {"row_ms": 1000 * pause_s}


def _plain_loop(task: Any, data: Any, fetchers: int) -> Callable[[], float]:
    """A step of this process by itself, on slices as a host gives them."""
    from torch.utils.data import DataLoader

    from potluck.train.model import next_token_loss

    model, optimizer = task.build()
    batches = iter(DataLoader(data, batch_size=ROWS_PER_SLICE, shuffle=True, num_workers=fetchers))

    def step() -> float:
        for _ in range(ROWS_PER_RANK // ROWS_PER_SLICE):
            loss, _ = next_token_loss(model, next(batches))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
