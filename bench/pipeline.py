"""Two stages of a net on two processes with a core each: how long they wait, and the time of a step.

    python -m bench pipeline [--quick]

The net is 8 equal blocks of 2.1M parameters with nothing before or after, 4 to a stage. Micro-batches have 192 rows for
idle shares, where the batch grows with their number m, and 96 for step times.

Idle share: what part of a step's time, from when both workers may begin until both are done, they did not compute;
against (p - 1) / (m + p - 1), which is what equal stages have to wait whatever they run on. Stages are equal as far as
cores are; the details tell the busy share of each, and what idle share remains if the idler of the two had been as busy
as the other ("without imbalance").

Step time: forward, backward and AdamW of 8 micro-batches, against the same schedule of torch.distributed.pipelining
used bare, in turns in the same processes. Ours weighs by samples, takes the norm, checks that it is finite, and tells
all workers of it; bare does not. Against somatize (1.0.1 from PyPI, where it is installed) likewise: it has the first
half of the net in a worker of its own, and runs micro-batches one after another, forward and backward. All of them have
to reach the same losses, which is checked.
"""

import importlib.util
from pathlib import Path
from statistics import median
from typing import Any

from bench import report
from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.turns import say, take_turns

MICROS = (1, 2, 4, 8, 16)
IDLE_ROWS = 192
"""Of a micro-batch whose idle share is measured: on noisy cores, short ones measure how unequal the cores are."""
WARM_UP_STEPS = 2
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
LIMIT_S = 400.0
"""Of one group of ranks: a schedule that hangs must not keep the others from being measured."""

Idle = dict[str, dict[str, dict[str, Any]]]
"""By schedule and number of micro-batches."""


def measure(quick: bool) -> Result:
    found: Idle = {name: _run("idle", name, quick) for name in ("1f1b", "gpipe")}
    comparisons = [_idle(name, micros, one) for name, row in found.items() for micros, one in row.items()]
    said: dict[str, str] = {}
    has_somatize = importlib.util.find_spec("somatize") is not None
    for name in SCHEDULES:
        peers = ["bare"] + ["somatize"] * (has_somatize and name == "1f1b")
        try:
            answer = _run("step", name, quick, *peers)
        except SystemExit as error:
            said[name] = str(error)
            say(f"pipeline: {name}: {error}")
            continue
        comparisons += [_step(name, peer, answer) for peer in peers]
        said[name] = answer["said"]
    if not has_somatize:
        say("pipeline: somatize is not installed here (pip install somatize==1.0.1 cloudpickle): left out.")
    print(table(found))
    return Result(comparisons, {"idle": found, "said": said})


def _run(what: str, schedule: str, quick: bool, *peers: str) -> dict[str, Any]:
    answers = run_ranks("bench.pipeline", what, schedule, "quick" if quick else "full", *peers, limit_s=LIMIT_S)
    if what == "step":
        answers[0]["said"] = "; ".join(filter(None, (answer["said"] for answer in answers)))
    return answers[0]


def _idle(schedule: str, micros: str, one: dict[str, Any]) -> Comparison:
    return Comparison(
        what=f"idle share of 2 stages, {schedule}, {micros} micro-batches, against (p - 1) / (m + p - 1)",
        unit="of the time",
        ours=one["shares"],
        bare=[one["theory"]] * len(one["shares"]),
        target=1.1,
    )


def _step(schedule: str, peer: str, answer: dict[str, Any]) -> Comparison:
    name = "torch.distributed.pipelining" if peer == "bare" else "somatize 1.0.1"
    return Comparison(
        what=f"step time, 2 stages, 8 micro-batches, {schedule}, against {name}",
        unit="ms",
        ours=answer["ours"],
        bare=answer[peer],
        target=1.02 if peer == "bare" else None,
    )


# One rank


def measure_as_rank(what: str, schedule: str, size: str, *peers: str) -> dict[str, Any]:
    import torch.distributed as dist

    from bench.pipes import Task, pin

    pin(dist.get_rank())
    quick = size == "quick"
    task = Task(width=128, rows=32) if quick else Task(rows=IDLE_ROWS if what == "idle" else Task.rows)
    return _measure_idle(task, schedule, quick) if what == "idle" else _measure_step(task, schedule, quick, peers)


def _measure_idle(task: Any, schedule: str, quick: bool) -> dict[str, Any]:
    """Each number of micro-batches by itself, as a run has them: they are not compared with each other."""
    import torch.distributed as dist

    from bench.pipes import Idle
    from potluck.stages.schedule import expected_idle_share

    found = {}
    for micros in MICROS:
        side = Idle(task, schedule, micros)
        for _ in range(WARM_UP_STEPS):
            side.share()
        side.busy.clear()
        shares = [side.share() for _ in range(2 if quick else 16)]
        side.close()
        found[str(micros)] = {
            "theory": expected_idle_share(2, micros),
            "shares": shares,
            "without_imbalance": [1 - max(busy) for busy in side.busy],
            "busy": [median(each) for each in zip(*side.busy, strict=True)],
        }
        if dist.get_rank() == 0:
            told = " ".join(f"{share:.3f}" for share in shares)
            say(f"pipeline: idle share, {schedule}, {micros} micro-batches: {told}")
    return found


def _measure_step(task: Any, schedule: str, quick: bool, peers: tuple[str, ...]) -> dict[str, Any]:
    from dataclasses import replace

    import torch.distributed as dist

    from bench.pipes import Bare, Ours, Somatize
    from bench.step_time import timed

    rounds = 2 if quick else 20
    task = replace(task, steps=WARM_UP_STEPS + rounds)
    make: dict[str, Any] = {"bare": lambda: Bare(task, schedule), "somatize": lambda: Somatize(task)}
    sides: dict[str, Any] = {"ours": Ours(task, schedule)} | {peer: make[peer]() for peer in peers}
    losses = {name: [side.step() for _ in range(WARM_UP_STEPS)] for name, side in sides.items()}
    told = {name: found for name, found in losses.items() if any(found)}  # bare tells only its last stage
    reference = losses["ours"]
    for name, found in told.items():
        apart = max(abs(a - b) / b for a, b in zip(found, reference, strict=True))
        assert apart < 1e-4, f"{name} does other work: its losses are {found}, and ours {reference}"
    speaks = dist.get_rank() == 0
    found = take_turns(
        f"pipeline: step, {schedule}", rounds, {k: timed(v.step, 1) for k, v in sides.items()}, "ms", show=speaks
    )
    for side in sides.values():
        if hasattr(side, "close"):
            side.close()
    same = f"losses of {', '.join(name for name in told if name != 'ours')} are ours" if len(told) > 1 else ""
    return found | {"said": same}


# What it came to


def table(found: Idle) -> str:
    """As Markdown."""
    header = [
        "idle share, 2 stages",
        "theory",
        *(f"{name}{more}" for name in found for more in ("", ", without imbalance")),
    ]
    lines = [header, ["---"] * len(header)]
    for micros in map(str, MICROS):
        row = [f"{micros} micro-batches", f"{next(iter(found.values()))[micros]['theory']:.3f}"]
        for one in (each[micros] for each in found.values()):
            row += [f"{median(one['shares']):.3f}", f"{median(one['without_imbalance']):.3f}"]
        lines.append(row)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(details: dict[str, Any], folder: Path) -> None:
    found: Idle = details["idle"]
    (folder / "pipeline.md").write_text(table(found) + "\n")
    if (plt := report.pyplot()) is None:
        return
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    places = range(len(MICROS))
    theory = [next(iter(found.values()))[str(micros)]["theory"] for micros in MICROS]
    axes.plot(places, theory, color="0.4", linestyle="--", label="theory: (p - 1) / (m + p - 1)")
    axes.fill_between(places, [0.9 * t for t in theory], [1.1 * t for t in theory], color="0.9", label="within 10 %")
    for (name, row), color in zip(found.items(), ("#4c72b0", "#dd8452"), strict=True):
        for place, micros in zip(places, MICROS, strict=True):
            shares = row[str(micros)]["shares"]
            axes.plot([place] * len(shares), shares, ".", color=color, markersize=3, alpha=0.5)
        medians = [median(row[str(micros)]["shares"]) for micros in MICROS]
        axes.plot(places, medians, "o", color=color, label=f"{name}, measured")
    axes.set_xticks(places, [str(micros) for micros in MICROS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches")
    axes.set_ylabel("share of the time in which workers wait")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "pipeline.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
