"""The time to a validation loss where a model has learned something, on unequal workers and links, against bare DDP.

    python -m bench time_to_loss [--quick]
    python -m bench.time_to_loss --gaps 1 3 5 --mbit none 1000 100 --contenders Sync Cadence Auto --seeds 1
    python -m bench.time_to_loss --gpu 60 20 --contenders "bare DDP" Sync Auto --losses 1.0 0.8

Bare DDP is a plain loop with the same model, rows, optimizer and schedule, in equal parts. Everybody trains for the
same number of samples, with a schedule of that length, from the same weights for a seed. The loss to reach is the
largest that any run ended with: all of them have reached it; and, where they are given, --losses.

On CPUs: the model and text of `potluck demo`, 400 steps, to losses near 1.6; speeds differ by CPU quotas, 0.9 and 0.3
cores at a gap of 3. With --gpu: parts of one GPU in percent, by MPS; the model of ../shared/LEARNING.md, 10.9M
parameters, in TF32, 950 steps, to losses near 0.8. Looking at the loss is not in the time: see learning.py.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from bench import report
from bench.learning import POLICIES, TRAINED, lift, merged
from bench.report import Comparison, Result
from bench.testbed import Machine
from bench.turns import say
from bench.uneven import Uneven, cores_of
from potluck.commands.demo import SETTINGS
from potluck.show.picture import time_to

CONTENDERS = ("bare DDP", "Cadence", "Sync", "Auto")
COLORS = {"bare DDP": "#8c8c8c", "Cadence": "#4c9f70", "Sync": "#4c72b0", "Auto": "#dd8452"}
FASTER = 2.5
SMALL = tuple(each for each in SETTINGS if each.startswith(("model", "data", "batch", "optimizer")))
LARGE = (
    "model.dim=384",
    "model.layers=6",
    "model.heads=6",
    "model.context=256",
    "batch.size=64",
    "optimizer.lr=2e-3",
    "optimizer.betas=[0.9, 0.95]",
    f'data.paths=["{Path(torch.__file__).parent}"]',
    "data.limit_bytes=16_000_000",
    "data.validation=0.005",
)
Curves = dict[str, list[list[tuple[float, float]]]]
"""Of each contender and seed: (seconds, loss)."""


@dataclass(frozen=True)
class Place:
    gap: float = 3
    mbit: float | None = None
    gpu: tuple[int, ...] = ()
    """Percent of it that each worker has."""

    @property
    def cores(self) -> list[float]:
        return [] if self.gpu else cores_of(2, self.gap)

    @property
    def machines(self) -> list[Machine]:
        if self.gpu:
            return [Machine(gpu=part) for part in self.gpu]
        return [Machine(cpu=quota, mbit=self.mbit) for quota in self.cores]

    @property
    def words(self) -> str:
        if self.gpu:
            return f"parts of {'/'.join(map(str, self.gpu))} % of a GPU"
        return f"2 workers, gap {self.gap:g}{f', {self.mbit:g} Mbit/s' if self.mbit else ''}"


@dataclass(frozen=True)
class Size:
    seeds: int = 3
    steps: int = 400
    looks: int = 16
    settings: tuple[str, ...] = SMALL
    contenders: tuple[str, ...] = CONTENDERS
    losses: tuple[float, ...] = field(default=())


def measure(quick: bool) -> Result:
    size, place = Size(seeds=1, steps=40, looks=2) if quick else Size(), Place()
    curves, how = compete(place, size)
    return Result(compare(curves, place, size), {"unequal_by": how, "gap": place.gap, "curves": curves})


def compete(place: Place, size: Size) -> tuple[Curves, str]:
    curves: Curves = {name: [] for name in size.contenders}
    with Uneven(place.machines) as fleet:
        for seed in range(size.seeds):
            turn = seed % len(size.contenders)
            for contender in size.contenders[turn:] + size.contenders[:turn]:
                answers = fleet.run(
                    "bench.learning:learn",
                    cores=place.cores,
                    on={TRAINED: lift(fleet.set_cores, len(place.machines))},
                    limit_s=600,
                    contender=contender.removesuffix(" int4"),
                    seed=seed,
                    steps=size.steps,
                    settings=size.settings,
                    looks=size.looks,
                    wire="int4" if contender.endswith(" int4") else "fp32",
                )
                curves[contender].append(merged(answers))
                seconds, loss = curves[contender][-1][-1]
                windows = answers[0].get("windows", size.steps)
                say(
                    f"time_to_loss: {place.words}: seed {seed + 1} of {size.seeds}: {contender}: loss {loss:.4f} after"
                    f" {seconds:.1f} s, {windows} agreements"
                )
                if out := os.environ.get("OUT"):
                    Path(out, f"time_to_loss-{place.gap:g}-{place.mbit}.json").write_text(json.dumps(curves))
        return curves, fleet.how


def compare(curves: Curves, place: Place, size: Size) -> list[Comparison]:
    found = []
    for target in (loss_of_all(curves), *size.losses):
        times = {name: [time_to(each, target) or each[-1][0] for each in of] for name, of in curves.items()}
        what = f"time to a validation loss of {target:.3f}, {place.words}"
        bare = "bare DDP" if "bare DDP" in curves else "Sync"
        wanted = round(1 / FASTER, 3) if bare == "bare DDP" else None
        found += [
            Comparison(what=f"{what}: {name}, against {bare}", unit="s", ours=of, bare=times[bare], target=wanted)
            for name, of in times.items()
            if name != bare
        ]
        if "Auto" in times and len(times) > 2:
            best = min((name for name in times if name not in ("Auto", "bare DDP")), key=lambda name: mean(times[name]))
            found.append(
                Comparison(
                    what=f"{what}: Auto, against the best other, {best}",
                    unit="s",
                    ours=times["Auto"],
                    bare=times[best],
                    target=1.1,
                )
            )
    if "Sync" in curves:
        finals = {name: [each[-1][1] for each in of] for name, of in curves.items()}
        what = f"validation loss after the same samples, {place.words}"
        found += [
            Comparison(what=f"{what}: {name}, against Sync", unit="", ours=of, bare=finals["Sync"], target=1.05)
            for name, of in finals.items()
            if name not in ("Sync", "bare DDP")
        ]
    return found


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
    axes.set_xlabel(f"seconds (2 workers, one {details['gap']:g} times slower, by {details['unequal_by']})")
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


def main(arguments: Sequence[str] | None = None) -> None:
    names = [*("bare DDP", *POLICIES), *(f"{name} int4" for name in POLICIES)]
    parser = argparse.ArgumentParser(prog="python -m bench.time_to_loss")
    parser.add_argument("--gaps", nargs="+", type=float, default=[3.0])
    parser.add_argument("--mbit", nargs="+", default=["none"], help="of each worker's link; none: no limit")
    parser.add_argument("--gpu", nargs="+", type=int, default=[], help="parts of one GPU, in percent")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=names)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--looks", type=int, default=16)
    parser.add_argument("--losses", nargs="+", type=float, default=[])
    asked = parser.parse_args(arguments)
    size = Size(
        seeds=asked.seeds,
        steps=asked.steps or (950 if asked.gpu else 400),
        looks=asked.looks,
        settings=LARGE if asked.gpu else SMALL,
        contenders=tuple(asked.contenders),
        losses=tuple(asked.losses),
    )
    places = [Place(gpu=tuple(asked.gpu))] if asked.gpu else []
    for gap in asked.gaps if not asked.gpu else ():
        places += [Place(gap=gap, mbit=None if mbit == "none" else float(mbit)) for mbit in asked.mbit]
    for place in places:
        curves, _ = compete(place, size)
        for each in compare(curves, place, size):
            print(f"{each.what}: {each.ratio:.3f} ({each.median_ours:.4g} against {each.median_bare:.4g})")


if __name__ == "__main__":
    main()
