"""What workers of different speeds do together, as a share of the sum of what each does alone at the same time.

    python -m bench mixed_speeds [--quick]
    python -m bench.mixed_speeds --gaps 3 --workers 2 --mbit none 1000 --contenders Cadence Async --turns 1

Speeds differ by CPU quotas (half of the workers have 1.8 cores over the workers, the others that over the gap); where
there is no testbed they differ by pausing, and the details say so. The model is a GPT of 0.98M parameters (192 wide,
2 layers) on rows of 8 tokens, 24 rows to a worker's batch: 30 ms of a whole core, 100 ms of the slow worker at gap 3,
so that a default window of Cadence lasts a second. Its gradient has 3.9 MB: on a link of 1 Gbit/s, two workers need
31 ms for it, while a well balanced step at gap 3 takes 50 ms, of which the backward is half. And even without that
limit, the slow worker's third of a core needs some 30 ms a step for its part of the sum and its optimizer, whatever its
rows. So Sync has settings of its own, with long steps: 384 rows to a worker's batch, 0.8 s to a balanced step.

A quota is given out every 20 ms. Whoever waits for less than what it would have been held back for loses nothing: a
slow worker that waits a few milliseconds is a little better off here than a slow machine would be.

The gap that workers really had alone is told with each turn: where it is not the one that was asked for, something
else was running here, and the turn says little.

Bare local SGD is PyTorch's own PeriodicModelAverager, every 10 steps, with equal batches.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench import report
from bench.mixed import TASK, Times, combined
from bench.report import Comparison, Result
from bench.testbed import Machine
from bench.turns import say
from bench.uneven import Uneven, cores_of

CONTENDERS = ("bare DDP", "bare local SGD", "Sync", "Sync balanced", "Cadence", "Async")
CODED = ("Sync balanced int4", "Sync balanced auto", "Cadence int4")
"""What travels does so in fewer bits. Measured where asked for."""
ALL = (*CONTENDERS, *CODED)
OURS = (*CONTENDERS[2:], *CODED)
GOALS = {"Sync balanced": 0.90, "Cadence": 0.95, "Async": 0.95}
"""At gap 3."""
COLORS = {
    "bare DDP": "#9a9a9a",
    "bare local SGD": "#c8c8c8",
    "Sync": "#b5c7e3",
    "Sync balanced": "#4c72b0",
    "Cadence": "#4c9f70",
    "Async": "#dd8452",
    "Sync balanced int4": "#2f4b7c",
    "Sync balanced auto": "#7a93bd",
    "Cadence int4": "#2d6a4f",
}


@dataclass(frozen=True)
class Setting:
    gap: float = 3
    workers: int = 2
    mbit: float | None = None
    turns: int = 2
    is_long: bool = False
    """Steps that are long against what agreeing costs, for those that agree in each."""

    @property
    def name(self) -> str:
        link = "" if self.mbit is None else f", {self.mbit:g} Mbit/s"
        return f"{self.workers} workers, gap {self.gap:g}{link}{', long steps' if self.is_long else ''}"


@dataclass(frozen=True)
class Turn:
    """What one contender came to in one turn."""

    setting: str
    contender: str
    together: float
    """Rows per second."""
    alone: float
    speeds: list[float]
    """Of each worker alone."""
    told: dict[str, Any]

    @property
    def share(self) -> float:
        return self.together / self.alone


FULL = (
    Setting(gap=1),
    Setting(gap=2, turns=1),
    Setting(gap=3),
    Setting(gap=5, turns=1),
    Setting(gap=3, mbit=1000),
    Setting(gap=3, workers=4, turns=1),
    Setting(gap=3, is_long=True),
)
LONG = ("bare DDP", "Sync", "Sync balanced", "Sync balanced int4", "Sync balanced auto")
LONG_ROWS = 384


def measure(quick: bool) -> Result:
    if quick:
        return measure_settings((Setting(turns=1),), CONTENDERS, Times(alone_s=0.6, together_s=1.5, warm_steps=20))
    return measure_settings(FULL, CONTENDERS, Times())


def measure_settings(settings: Sequence[Setting], contenders: Sequence[str], times: Times) -> Result:
    found: list[Turn] = []
    how = ""
    for workers, mbit in dict.fromkeys((setting.workers, setting.mbit) for setting in settings):
        machines = [Machine(cpu=cores, mbit=mbit) for cores in cores_of(workers, 1)]
        with Uneven(machines) as fleet:
            how = fleet.how
            for setting in settings:
                if (setting.workers, setting.mbit) == (workers, mbit):
                    found += _take_turns(fleet, setting, contenders, times)
                    _keep(found, how)  # a run that is ended early is not for nothing
    print(table(found))
    return _result(found, how)


def _result(found: Sequence[Turn], how: str) -> Result:
    return Result(compare(found), {"unequal_by": how, "task": TASK.as_json(), "turns": [vars(turn) for turn in found]})


def _keep(found: Sequence[Turn], how: str) -> None:
    result = _result(found, how)
    report.write(report.RESULTS / "raw", "mixed_speeds", result, quick=True)
    draw(result.details, report.RESULTS / "raw")


def _take_turns(fleet: Uneven, setting: Setting, contenders: Sequence[str], times: Times) -> list[Turn]:
    found = []
    for turn in range(setting.turns):
        task = replace(TASK, rows=LONG_ROWS) if setting.is_long else TASK
        clock = replace(times, warm_steps=24, together_s=2 * times.together_s) if setting.is_long else times
        some = [name for name in contenders if not setting.is_long or name in LONG]
        for contender in some[:: -1 if turn % 2 else 1]:
            answers = fleet.run(
                "bench.mixed:compete",
                cores=cores_of(setting.workers, setting.gap),
                contender=contender,
                task=task.as_json(),
                times=asdict(clock),
            )
            together, alone = combined(answers)
            speeds = [mean(answer["alone"]) for answer in answers]
            told = {key: value for key, value in answers[0].items() if key not in ("alone", "rows_per_s")}
            found.append(Turn(setting.name, contender, together, alone, speeds, told))
            shares = ", ".join(f"{share:.2f}" for share in told["shares"])
            gap = f"a gap of {speeds[0] / speeds[-1]:.1f} alone"
            say(
                f"mixed_speeds: {setting.name}, turn {turn + 1} of {setting.turns}: {contender} {found[-1].share:.3f}"
                f" ({together:,.0f} of {alone:,.0f} rows/s; shares {shares}; {gap})"
            )
    return found


def compare(turns: Sequence[Turn]) -> list[Comparison]:
    """Where there is a goal; all else is in the details, the table and the picture."""
    found = []
    for setting in dict.fromkeys(turn.setting for turn in turns):
        for contender, goal in GOALS.items():
            own = [turn for turn in turns if (turn.setting, turn.contender) == (setting, contender)]
            if own and "gap 3" in setting:
                # Nothing was promised where a step's agreement takes as long as the step.
                target = None if contender == "Sync balanced" and "long" not in setting else goal
                what = f"rows/s of {setting}: {contender}, against the sum of what each does alone"
                ours, alone = [turn.together for turn in own], [turn.alone for turn in own]
                found.append(Comparison(what=what, unit="rows/s", ours=ours, bare=alone, target=target, at_least=True))
        if "gap 1" in setting:
            found += _against_ddp(setting, [turn for turn in turns if turn.setting == setting])
    return found


def _against_ddp(setting: str, turns: Sequence[Turn]) -> list[Comparison]:
    ddp = [turn.share for turn in turns if turn.contender == "bare DDP"]
    return [
        Comparison(
            what=f"share of combined speed of {setting}: {contender}, against bare DDP",
            unit="of combined speed",
            ours=shares,
            bare=ddp,
            target=1.0,
            at_least=True,
        )
        for contender in OURS
        if (shares := [turn.share for turn in turns if turn.contender == contender]) and len(shares) == len(ddp)
    ]


def medians(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """Of the shares: by setting, then by contender."""
    found: dict[str, dict[str, list[float]]] = {}
    for turn in turns:
        found.setdefault(turn.setting, {}).setdefault(turn.contender, []).append(turn.share)
    return {setting: {name: median(shares) for name, shares in row.items()} for setting, row in found.items()}


def table(turns: Sequence[Turn]) -> str:
    """As Markdown: the share of combined speed, a row per setting."""
    rows = medians(turns)
    names = [name for name in ALL if any(name in row for row in rows.values())]
    lines = [["share of combined speed", *names], ["---"] * (1 + len(names))]
    lines += [
        [setting, *(f"{row[name]:.3f}" if name in row else "-" for name in names)] for setting, row in rows.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(details: dict[str, Any], folder: Path) -> None:
    turns = [Turn(**turn) for turn in details["turns"]]
    (folder / "mixed_speeds.md").write_text(table(turns) + "\n")
    if (plt := report.pyplot()) is None:
        return
    rows = medians(turns)
    names = [name for name in ALL if any(name in row for row in rows.values())]
    figure, axes = plt.subplots(figsize=(4.5 + 1.8 * len(rows), 5), layout="constrained")
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        at = [group + (index - (len(names) - 1) / 2) * width for group, row in enumerate(rows.values()) if name in row]
        shares = [row[name] for row in rows.values() if name in row]
        axes.bar(at, shares, width=0.92 * width, color=COLORS[name], label=name)
        for group, setting in enumerate(rows):
            own = [turn.share for turn in turns if (turn.setting, turn.contender) == (setting, name)]
            place = group + (index - (len(names) - 1) / 2) * width
            axes.plot([place] * len(own), own, "k.", markersize=3)
    for goal in sorted(set(GOALS.values())):
        axes.axhline(goal, color="0.25", linestyle="--", linewidth=0.9)
        axes.text(-0.5, goal, f"{goal:.2f} ", ha="right", va="center")
    axes.axhline(1.0, color="0.7", linewidth=0.8, zorder=0)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(rows)), [setting.replace(", ", "\n") for setting in rows])
    axes.set_ylabel("rows/s together / sum of rows/s alone")
    axes.set_title(f"Workers of different speeds ({details['unequal_by']}); dashed: the goals for gap 3", fontsize=10)
    figure.legend(ncols=min(4, len(names)), loc="outside lower center", fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "mixed_speeds.png", dpi=150)
    plt.close(figure)


def main() -> None:
    """Some of it, for a closer look: into bench/results/raw."""
    parser = argparse.ArgumentParser(prog="python -m bench.mixed_speeds")
    parser.add_argument("--gaps", nargs="+", type=float, default=[3])
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--mbit", nargs="+", type=lambda text: None if text == "none" else float(text), default=[None])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=ALL)
    parser.add_argument("--long", action="store_true", help="Long steps, for Sync.")
    parser.add_argument("--turns", type=int, default=1)
    chosen = parser.parse_args()
    settings = [
        Setting(gap=gap, workers=workers, mbit=mbit, turns=chosen.turns, is_long=chosen.long)
        for workers in chosen.workers
        for mbit in chosen.mbit
        for gap in chosen.gaps
    ]
    measure_settings(settings, chosen.contenders, Times())


if __name__ == "__main__":
    main()
