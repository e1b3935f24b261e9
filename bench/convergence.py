"""What the length of windows does to the loss after the same samples, against Sync.

    python -m bench convergence [--quick]

Two real ranks, one of which pauses so that it is three times slower; time is not measured. The demo's text and
settings, with a smaller model (96 wide, 3 layers, rows of 64 tokens), so that enough windows fit in seconds. Sync is
run in equal parts and without pauses: its numbers do not depend on who computes what.
"""

from pathlib import Path
from statistics import mean
from typing import Any

from bench.learning import POLICIES
from bench.report import Comparison, Result
from bench.testbed import Machine
from bench.turns import say
from bench.uneven import Uneven

MODEL = ("model.dim=96", "model.layers=3", "model.heads=4", "model.context=64")
GAP = 3
CONTENDERS = ("Sync equal", "Cadence", "Async", *(name for name in POLICIES if name.startswith("Cadence ")))


def measure(quick: bool) -> Result:
    seeds, steps = (1, 60) if quick else (3, 350)
    finals: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    windows: dict[str, int] = {}
    with Uneven([Machine()] * 2, pausing=True) as fleet:
        for seed in range(seeds):
            for contender in CONTENDERS:
                answers = fleet.run(
                    "bench.learning:learn",
                    cores=[1.0, 1.0 if contender == "Sync equal" else 1 / GAP],
                    contender=contender,
                    seed=seed,
                    steps=steps,
                    settings=MODEL,
                    looks=0,
                )
                finals[contender].append(answers[0]["final"])
                windows[contender] = answers[0]["windows"]
                say(f"convergence: seed {seed + 1} of {seeds}: {contender}: loss {finals[contender][-1]:.4f}")
    print(table(finals, windows))
    return Result(compare(finals), {"gap": GAP, "steps": steps, "finals": finals, "windows": windows})


def compare(finals: dict[str, list[float]]) -> list[Comparison]:
    """Only told: what is promised of the loss is for the defaults, in time_to_loss."""
    what = f"validation loss after the same samples, gap {GAP}"
    return [
        Comparison(what=f"{what}: {name}, against Sync", unit="", ours=losses, bare=finals["Sync equal"], target=None)
        for name, losses in finals.items()
        if name != "Sync equal"
    ]


def table(finals: dict[str, list[float]], windows: dict[str, int]) -> str:
    """As Markdown."""
    lines = [("policy", "windows", "validation loss, mean", "lowest to highest seed", "beyond Sync"), ("---",) * 5]
    for name, losses in finals.items():
        apart = mean(losses) - mean(finals["Sync equal"])
        span = f"{min(losses):.4f} to {max(losses):.4f}"
        told = "Sync" if name == "Sync equal" else name
        lines.append((told, f"{windows[name]}", f"{mean(losses):.4f}", span, f"{apart:+.4f}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(details: dict[str, Any], folder: Path) -> None:
    (folder / "convergence.md").write_text(table(details["finals"], details["windows"]) + "\n")
