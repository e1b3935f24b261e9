"""How much memory the server's process grows by, for a gradient of 100 MB and any number of workers.

The last worker is late in every step, so that the server holds all that it ever lets in before the others have to wait.
"""

import tempfile
from collections.abc import Callable

from bench.report import Comparison, Result
from bench.stars import MB, Actor, Helpers, Host, on_stage
from bench.turns import take_turns

SIZE = 100 * MB
LATE_S = 0.5
STEPS = 3
CONSTANT_MB = 32


def measure(quick: bool) -> Result:
    counts = (2, 4) if quick else (2, 4, 8, 16)
    sides = {f"{workers} workers": _grown_mb(workers) for workers in counts}
    found = take_turns("coordinator_memory", 1 if quick else 3, sides, "MB")
    allowed = [2 * SIZE / MB + CONSTANT_MB] * len(found[f"{counts[0]} workers"])
    what = f"memory of the server for 100 MB from each of {{}}, against two such gradients and {CONSTANT_MB} MB"
    return Result(
        [
            Comparison(what=what.format(side), unit="MB", ours=grown, bare=allowed, target=1.0)
            for side, grown in found.items()
        ]
    )


def _grown_mb(workers: int) -> Callable[[], float]:
    def run() -> float:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, on_stage() as actors:
            host = Actor(Host, folder, workers)
            actors.append(host)
            helpers = Actor(Helpers, host.call("listening")[0], workers, SIZE)
            actors.append(helpers)
            helpers.call("rounds", STEPS, LATE_S)
            return float(host.call("grown_bytes")) / MB

    return run
