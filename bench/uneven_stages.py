"""Two stages on workers of which one is three times slower: the cut that we measure and balance, against an equal one.

    python -m bench uneven_stages [--quick]

Speeds differ by CPU quotas: 0.9 and 0.3 cores (bench/testbed); without quotas there is nothing to measure, since a
worker that pauses by itself does so between stages and not within them. The model is a GPT of 16 blocks (128 wide) on
rows of 32 tokens, 8 micro-batches of 4 rows to a step, under 1f1b.

Best possible: if work could be divided in any proportion, each worker would have as much of every row as its speed
allows, so that together they would do the sum of the rows/s that each does alone with the whole model; times
m / (m + p - 1), since the schedule leaves a worker without work for that long. What each does alone is measured in the
same processes, at the same time, just before and just after they train together.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.report import Comparison, Result
from bench.testbed import Machine
from bench.turns import say
from bench.uneven import Uneven, cores_of

GAP = 3
TARGET = 0.9
LAYERS = 16
CUTS = {"balanced": (), "equal": ((LAYERS + 2) // 2,)}
"""Before, the blocks, after; none: as it is measured."""


@dataclass(frozen=True, kw_only=True)
class Length:
    micros: int = 8
    rows: int = 4
    """Of a micro-batch."""
    steps: int = 12
    warm_steps: int = 3
    alone_s: float = 6.0
    turns: int = 5


def measure(quick: bool) -> Result | None:
    length = Length(steps=2, warm_steps=1, alone_s=1.5, turns=1) if quick else Length()
    cores = cores_of(2, GAP)
    found: list[dict[str, Any]] = []
    with Uneven([Machine(cpu=each) for each in cores]) as fleet:
        if fleet.how == "pausing":
            say("uneven_stages needs CPU quotas, and there are none here: skipped.")
            return None
        for turn in range(length.turns):
            for name in list(CUTS)[:: -1 if turn % 2 else 1]:
                found.append(_take_turn(fleet, cores, name, length, turn))
    print(table(found))
    return Result(compare(found), {"length": asdict(length), "cores": cores, "turns": found})


def _take_turn(fleet: Uneven, cores: list[float], name: str, length: Length, turn: int) -> dict[str, Any]:
    answers = fleet.run("bench.uneven_stages:train", cores=cores, cuts=CUTS[name], length=asdict(length))
    speeds = [mean(answer["alone"]) for answer in answers]
    best = sum(speeds) * length.micros / (length.micros + len(speeds) - 1)
    told = {"cut": name, "together": answers[0]["together"], "best": best, "speeds": speeds} | answers[0]["told"]
    say(
        f"uneven_stages: turn {turn + 1} of {length.turns}: {name} cut before layer {told['cuts'][0]} of {LAYERS + 2}:"
        f" {told['together']:.1f} rows/s, {told['together'] / best:.3f} of the best possible {best:.1f}; alone"
        f" {' and '.join(f'{speed:.1f}' for speed in speeds)}"
    )
    return told


def compare(found: list[dict[str, Any]]) -> list[Comparison]:
    by_cut = {name: [turn for turn in found if turn["cut"] == name] for name in CUTS}
    together = {name: [turn["together"] for turn in turns] for name, turns in by_cut.items()}
    best = [turn["best"] for turn in by_cut["balanced"]]
    what = f"rows/s of 2 stages at a speed gap of {GAP}"
    return [
        Comparison(
            what=f"{what}: balanced cut, against the best possible",
            unit="rows/s",
            ours=together["balanced"],
            bare=best,
            target=TARGET,
            at_least=True,
        ),
        Comparison(
            what=f"{what}: balanced cut, against an equal cut",
            unit="rows/s",
            ours=together["balanced"],
            bare=together["equal"],
            target=None,
        ),
    ]


def table(found: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [["cut", "before layer", "rows/s", "of the best possible", "busy, by stage"], ["---"] * 5]
    for name in CUTS:
        own = [turn for turn in found if turn["cut"] == name]
        lines.append(
            [
                name,
                ", ".join(sorted({str(turn["cuts"][0]) for turn in own})) + f" of {LAYERS + 2}",
                f"{median(turn['together'] for turn in own):.1f}",
                f"{median(turn['together'] / turn['best'] for turn in own):.3f}",
                " / ".join(f"{median(each):.0%}" for each in zip(*(turn["busy"] for turn in own), strict=True)),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(details: dict[str, Any], folder: Path) -> None:
    (folder / "uneven_stages.md").write_text(table(details["turns"]) + "\n")


# One rank


def train(seat: Any, *, cuts: list[int], length: dict[str, Any]) -> dict[str, Any]:
    """Alone, together in two stages, and alone again."""
    import torch.distributed as dist

    import potluck
    from bench.mixed import Task
    from potluck.train.model import ModelConfig, next_token_loss

    given = Length(**length)
    batch_size = given.micros * given.rows
    steps = given.warm_steps + given.steps
    model_config = ModelConfig(dim=128, layers=LAYERS, heads=4, context=32)
    task = Task(model=model_config, rows=given.rows, length=batch_size * steps)
    data = task.data()
    alone = [_alone(task, data, given)]
    stages = potluck.Stages(protocol=potluck.Pipeline(micro_batch_size=given.rows), cuts=tuple(cuts))
    fleet = potluck.init(potluck.Sync(balance=False), stages=stages)
    model, optimizer = task.build()
    _, _, loader = fleet.prepare(model, optimizer, data, batch_size=batch_size, loss=next_token_loss)
    heard: list[Any] = []
    started = 0.0
    for batch in loader:
        fleet.train(next_token_loss, batch)
        if (done := fleet.step()) is not None:
            heard.append(done)
            if len(heard) == given.warm_steps:
                dist.barrier()
                started = time.perf_counter()
    took_s = time.perf_counter() - started
    measured = heard[given.warm_steps :]
    seconds = sum(done.seconds for done in measured)
    busy = [sum(done.workers[rank].busy_s for done in measured) / seconds for rank in range(seat.world)]
    alone.append(_alone(task, data, given))
    told = {"cuts": list(fleet.plan.cuts), "layers_ms": [1000 * layer.seconds for layer in fleet.plan.layers]}  # type: ignore[attr-defined]
    return {"alone": alone, "together": batch_size * given.steps / took_s, "told": told | {"busy": busy}}


def _alone(task: Any, data: Any, given: Length) -> float:
    """Rows per second of the whole model on this worker, while the others do the same and nobody waits."""
    import torch.distributed as dist

    from potluck.train.model import next_token_loss

    model, optimizer = task.build()
    dist.barrier()
    done, started = -2, 0.0  # the first two warm up
    while done < 1 or time.perf_counter() - started < given.alone_s:
        if done == 0:
            started = time.perf_counter()
        loss, _ = next_token_loss(model, data[: given.rows])
        loss.backward()
        done += 1
        if done % given.micros == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    speed = done * given.rows / (time.perf_counter() - started)
    dist.barrier()
    return speed
