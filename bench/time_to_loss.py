"""The demo's model and text on two workers, one three times slower: the time to a validation loss, against bare DDP.

    python -m bench time_to_loss [--quick]

Bare DDP is a plain loop with the same model, rows, optimizer and schedule, in equal parts. Everybody trains for the
same number of samples (260 of the demo's steps, with a schedule of that length), from the same weights for a seed, and
the loss to reach is the largest that any run ended with: all of them have reached it. After the same samples, Cadence
should have lost nothing to Sync beyond what another seed does to Sync itself.

Speeds differ by CPU quotas, 0.9 and 0.3 cores. Looking at the validation loss is not in the time: see learning.py.
"""

from pathlib import Path
from statistics import mean
from typing import Any

from bench import report
from bench.learning import TRAINED, lift, merged
from bench.report import Comparison, Result
from bench.testbed import Machine
from bench.turns import say
from bench.uneven import Uneven, cores_of
from potluck.show.picture import time_to

GAP = 3
CONTENDERS = ("bare DDP", "Cadence", "Sync")
COLORS = {"bare DDP": "#8c8c8c", "Cadence": "#4c9f70", "Sync": "#4c72b0"}
FASTER = 1.8
Curves = dict[str, list[list[tuple[float, float]]]]
"""Of each contender and seed: (seconds, loss)."""


def measure(quick: bool) -> Result:
    seeds, steps, looks = (1, 40, 2) if quick else (3, 260, 13)
    curves: Curves = {name: [] for name in CONTENDERS}
    cores = cores_of(2, GAP)
    with Uneven([Machine(cpu=quota) for quota in cores]) as fleet:
        how = fleet.how
        for seed in range(seeds):
            for contender in CONTENDERS[seed % 3 :] + CONTENDERS[: seed % 3]:
                answers = fleet.run(
                    "bench.learning:learn",
                    cores=cores,
                    on={TRAINED: lift(fleet.set_cores, 2)},
                    limit_s=600,
                    contender=contender,
                    seed=seed,
                    steps=steps,
                    model={},
                    looks=looks,
                )
                curves[contender].append(merged(answers))
                seconds, loss = curves[contender][-1][-1]
                say(f"time_to_loss: seed {seed + 1} of {seeds}: {contender}: loss {loss:.4f} after {seconds:.1f} s")
    return Result(compare(curves), {"unequal_by": how, "gap": GAP, "steps": steps, "curves": curves})


def compare(curves: Curves) -> list[Comparison]:
    target = loss_of_all(curves)
    times = {name: [time_to(curve, target) or curve[-1][0] for curve in found] for name, found in curves.items()}
    finals = {name: [curve[-1][1] for curve in found] for name, found in curves.items()}
    spread = max(finals["Sync"]) - min(finals["Sync"])
    what = f"time to a validation loss of {target:.3f} on 2 workers, gap {GAP}"
    return [
        Comparison(
            what=f"{what}: Cadence, against bare DDP ({FASTER:g} times faster is wanted)",
            unit="s",
            ours=times["Cadence"],
            bare=times["bare DDP"],
            target=round(1 / FASTER, 3),
        ),
        Comparison(
            what=f"{what}: Sync, against bare DDP", unit="s", ours=times["Sync"], bare=times["bare DDP"], target=None
        ),
        Comparison(
            what="validation loss after the same samples: Cadence, against Sync (and what a seed does to Sync)",
            unit="",
            ours=finals["Cadence"],
            bare=finals["Sync"],
            target=round(1 + spread / mean(finals["Sync"]), 4) if len(finals["Sync"]) > 1 else None,
        ),
    ]


def loss_of_all(curves: Curves) -> float:
    """The loss that every run came down to."""
    return max(min(loss for _, loss in curve) for found in curves.values() for curve in found)


def draw(details: dict[str, Any], folder: Path) -> None:
    if (plt := report.pyplot()) is None:
        return
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    curves: Curves = details["curves"]
    for name, found in curves.items():
        for curve in found:
            axes.plot([s for s, _ in curve], [loss for _, loss in curve], color=COLORS[name], linewidth=0.7, alpha=0.6)
        average = mean_curve(found)
        axes.plot(*zip(*average, strict=True), color=COLORS[name], linewidth=2.5, label=name)
    axes.axhline(loss_of_all(curves), color="0.3", linestyle="--", linewidth=0.8, label="reached by all")
    axes.set_xlabel(f"seconds (2 workers, one {details['gap']} times slower, by {details['unequal_by']})")
    axes.set_ylabel("validation loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "time_to_loss.png", dpi=150)
    plt.close(figure)


def mean_curve(curves: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Point by point, as far as all of them go."""
    return [
        (mean(seconds for seconds, _ in points), mean(loss for _, loss in points))
        for points in zip(*curves, strict=False)
    ]
