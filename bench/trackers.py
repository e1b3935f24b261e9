"""The time of a step while a tracker takes nothing, or takes everything, against the same without one.

    python -m bench trackers [--quick]

One worker, a small model, blocks of steps in turns. The tracker that hangs is a real process that never reads. The
other is TensorBoard's, with the file of events that it follows.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from bench.report import Comparison, Result
from bench.turns import take_turns
from potluck.engine.engine import Engine
from potluck.events import Event, EventFile, Listener
from potluck.trackers.reporter import Reporter, Tracking

HANGS = "import threading; threading.Event().wait()"
WIDTH, ROWS = 512, 64
TARGET = 1.01


def measure(quick: bool) -> Result:
    rounds, steps = (3, 5) if quick else (60, 25)
    torch.set_num_threads(1)
    fleet = Engine()
    step = _stepper(fleet)
    for _ in range(5):
        step()
    hung = Reporter("one that hangs", [sys.executable, "-c", HANGS], lambda sentence: None)
    with tempfile.TemporaryDirectory() as place:
        file = EventFile(Path(place) / "events.jsonl")
        board = Tracking(["tensorboard"], Path(place), Path(place) / "events.jsonl", lambda sentence: None)

        def write(event: Event) -> None:
            file(event)
            board(event)

        sides: dict[str, Listener | None] = {"no tracker": None, "one that hangs": hung, "TensorBoard": write}
        try:
            found = take_turns(
                "trackers",
                rounds,
                {name: lambda heard=heard: _time(fleet, step, steps, heard) for name, heard in sides.items()},
                "ms",
            )
        finally:
            board.close()
            hung.end()
            hung.wait(0)
    bare = found.pop("no tracker")
    compared = [
        Comparison(what=f"a step with {name}, against none", unit="ms", ours=ours, bare=bare, target=TARGET)
        for name, ours in found.items()
    ]
    return Result(compared, {"rounds": found | {"no tracker": bare}, "steps_a_round": steps})


def _stepper(fleet: Engine) -> Callable[[], None]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    rows = torch.randn(ROWS, WIDTH)

    def step() -> None:
        fleet.backward(model(rows).square().mean(), samples=ROWS)
        fleet.step()

    return step


def _time(fleet: Engine, step: Callable[[], None], steps: int, heard: Listener | None) -> float:
    """Of the median step of a block, in ms."""
    listeners = fleet.events.listeners
    listeners[:] = [heard] if heard is not None else []
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        took.append(1000 * (time.perf_counter() - began))
    return median(took)
