"""A case under a host: real workers that come, leave politely and are killed, while one stays to the end.

Which rows a step has is what its DataLoader says, so a worker reports only what the run told of each step.
"""

import functools
import math
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import potluck
from potluck.errors import PotluckError
from potluck.events import StepDone, StepSkipped
from potluck.fleet.membership import WorkerPhase
from tests.differential.cases import Case
from tests.differential.data import given_data, plain_batches
from tests.differential.habits import Loop, other_model
from tests.differential.models import build, loss_of, make_data
from tests.differential.optimizers import make_optimizer, make_scheduler
from tests.differential.outcomes import Failed, Refused
from tests.fleet.fleet import Fleet

FIRST = "w0"
"""The worker that stays."""
SLOW_S = 0.05
"""That each worker waits after a step, so that there is time for others to come."""


def run_hosted(case: Case, timeout_s: float) -> tuple[list[list[dict[str, Any]]], dict[str, Tensor]]:
    """As run_case()."""
    data = make_data(case.model, case.rows, case.seed, torch.float64, case.samples, case.faults)
    batches = plain_batches(case, data)
    steps = sum(map(len, batches))
    with tempfile.TemporaryDirectory(prefix="potluck-differential-") as folder:
        place = Path(folder)
        fleet = Fleet(place)
        try:
            _play(case, fleet, steps, time.monotonic() + timeout_s)
            found = torch.load(place / f"{FIRST}.pt", weights_only=True)
            events = torch.load(place / "events.pt", weights_only=True)
        finally:
            fleet.close()
    return told_of(batches, events), found


def told_of(batches: list[list[list[int]]], events: list[list[float]]) -> list[list[dict[str, Any]]]:
    """As ranks would tell of these steps: which rows each has is what the data say."""
    told = {
        "replica": 0,
        "lane": 0,
        "windows": [[[rows]] for epoch in batches for rows in epoch],
        "epochs": [[number, row] for number, epoch in enumerate(batches) for rows in epoch for row in rows],
        "ends": [],
        "events": events,
        "proofs": [],
        "anchors": [],
        "buckets": [],
        "evaluated": None,
        "average": {},
    }
    return [[told]]


def _play(case: Case, fleet: Fleet, steps: int, deadline: float) -> None:
    """Lets workers come and go as the case says, until the run has ended."""
    begin, *happenings = case.host.split(",")
    options = {
        "job": functools.partial(_job, case, str(fleet.folder)),
        "slow_s": SLOW_S,
        "steps": steps,
        "policy": potluck.Sync(),
        "step": _step_config(case),
    }
    fleet.add(FIRST, **options)
    while not _is_here(fleet) and fleet.workers[0].process.is_alive():  # else the others may have ended the run
        _check(fleet, deadline)
        time.sleep(0.01)
    for number in range(1, int(begin)):
        fleet.add(f"w{number}", **options)
    for happening in happenings:
        what, _, step = happening.partition("@")
        if not _wait(fleet, deadline, int(step)):
            break
        others = [worker for worker in fleet.workers if worker.name != FIRST and worker.process.is_alive()]
        if what == "join":
            fleet.add(f"w{len(fleet.workers)}", **options)
        elif others and (fleet.folder / f"{others[0].name}.in").exists():
            others[0].send(signal.SIGUSR1 if what == "leave" else signal.SIGKILL)
    while fleet.workers[0].process.is_alive():
        _check(fleet, deadline)
        time.sleep(0.02)
    _check(fleet, deadline)
    if not (fleet.folder / f"{FIRST}.pt").exists():
        raise Failed("CRASH", f"{FIRST} has ended without its last step: {fleet.describe()}")


def _is_here(fleet: Fleet) -> bool:
    """Whether the worker that stays has built its model and takes part."""
    members = list(fleet.server.core.membership.members.values())
    return fleet.server.core.standing.version > 0 or any(member.phase is not WorkerPhase.GREETED for member in members)


def _wait(fleet: Fleet, deadline: float, step: int) -> bool:
    """Until the run has done this step; False if it has ended."""
    while fleet.server.core.standing.version < step:
        if not fleet.workers[0].process.is_alive():
            return False
        _check(fleet, deadline)
        time.sleep(0.01)
    return True


def _check(fleet: Fleet, deadline: float) -> None:
    for path in fleet.folder.glob("*.error"):
        text = path.read_text()
        if not text or "The run has ended" in text:  # it is not written yet; or the worker came too late
            continue
        if "Refused: " not in text:
            raise Failed("CRASH", f"{path.stem}: {text}")
        phase, kind, sentence = text.rsplit("Refused: ", 1)[1].split("|", 2)
        if phase == "start":
            raise Refused(sentence.strip())
        raise Failed("LATE", f"{path.stem}: {kind}: {sentence.strip()}")
    if time.monotonic() > deadline:
        raise Failed("HANG", fleet.describe())


def _step_config(case: Case) -> potluck.StepConfig:
    switches = case.legs[0].switches
    return potluck.StepConfig(**eval(f"dict({switches + ', ' if switches else ''}nonfinite_limit=1000)"))


def _job(case: Case, folder: str, fleet: Any) -> Any:
    phase = ["start"]
    try:
        return _train(case, Path(folder), fleet, phase)
    except PotluckError as error:
        if type(error).__name__ in ("Interrupted", "WorkerLost"):
            raise
        raise Refused(f"{phase[0]}|{type(error).__name__}|{error}") from error


def _train(case: Case, folder: Path, fleet: Any, phase: list[str]) -> Any:
    dtype = getattr(torch, case.dtype)
    model = build(case.model, dtype, case.seed)
    optimizer = make_optimizer(model, case.optimizer)
    data = make_data(case.model, case.rows, case.seed, dtype, case.samples, case.faults)
    loop = Loop(case.habits, model, optimizer)
    loop.before_prepare()
    scheduler = make_scheduler(optimizer, case.scheduler)
    sizes = {} if case.data != "stream" else {"batch_size": case.batch}
    model, optimizer, loader = fleet.prepare(
        model, optimizer, given_data(case, data), seed=case.seed, scheduler=scheduler, **sizes
    )
    loop.after_prepare(model, lambda: other_model(case.model, dtype, case.seed))
    steps: list[list[float]] = []

    def hear(event: Any) -> None:
        if isinstance(event, StepDone):
            steps.append([event.loss, event.grad_norm, event.samples])
        elif isinstance(event, StepSkipped):
            steps.append([math.nan, math.nan, 0.0])

    fleet.events.listeners.append(hear)
    for _ in fleet.epochs(case.epochs):
        for batch in loader:
            mean, samples = loss_of(model, batch, case.scale, case.habits)
            fleet.backward(mean, samples=float(samples))
            fleet.step()
            phase[0] = "trained"
    if os.environ["POTLUCK_NAME"] == FIRST:
        torch.save(steps, folder / "events.pt")
    return model
