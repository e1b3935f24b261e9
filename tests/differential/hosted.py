"""A case under a host: real workers that come, leave politely and are killed, while one stays to the end.

Which rows a step has is what its DataLoader says, so a worker reports only what the run told of each step.
"""

import functools
import json
import math
import os
import signal
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import potluck
from potluck.errors import PotluckError
from potluck.events import Decided, StepDone, StepSkipped
from potluck.fleet.effects import StepRecord
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
        records = _recorded(fleet)
        try:
            _play(case, fleet, steps, time.monotonic() + timeout_s)
            found = torch.load(place / f"{FIRST}.pt", weights_only=True)
            events = torch.load(place / "events.pt", weights_only=True)
            if not is_sync(case):
                return [_told_of_windows(fleet, list(records.values()), events)], found
        finally:
            fleet.close()
    return told_of(batches, events), found


def is_sync(case: Case) -> bool:
    return case.legs[0].policy.startswith("Sync")


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
        "anchors": [0 for epoch in batches for rows in epoch],
        "buckets": [],
        "evaluated": None,
        "average": {},
    }
    return [[told]]


def _recorded(fleet: Fleet) -> dict[int, StepRecord]:
    """What the journal gets of each step. A leader that is killed tells nobody that it has applied its last one."""
    found: dict[int, StepRecord] = {}
    record = fleet.journal.record

    def recorded(step: StepRecord) -> None:
        found[step.step] = step
        record(step)

    fleet.journal.record = recorded  # type: ignore[method-assign]
    return found


def _told_of_windows(fleet: Fleet, records: list[StepRecord], events: list[list[float]]) -> list[dict[str, Any]]:
    """As ranks would tell of windows: the journal has who did which range, and each worker in which steps. Whoever did
    it began with what all had agreed on, so each range of a window is a replica's."""
    decided = {event.version + 1: event.anchor for event in fleet.events if isinstance(event, Decided)}
    steps: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for path in fleet.folder.glob("*.steps"):
        for line in path.read_text().splitlines():
            worker, version, rows = json.loads(line)
            steps[worker, version][rows[0]] = rows
    found: list[dict[str, Any]] = []
    for record in records:
        done = []
        for start, end, worker in record.ranges:
            own = steps[worker, record.step]
            done.append([[rows] for first, rows in sorted(own.items()) if start <= first < end])
        if decided[record.step] == 0:
            done = [[[list(range(record.row, record.row + record.rows))]]]
        for number, window in enumerate(done):
            if number == len(found):
                found.append(told_of([], events)[0][0] | {"replica": number})
            found[number]["windows"] += [[]] * (record.step - 1 - len(found[number]["windows"])) + [window]
            rows = [row for step in window for micro in step for row in micro]
            found[number]["epochs"] += [[record.epoch, row] for row in rows]
    for each in found:
        each["windows"] += [[]] * (len(records) - len(each["windows"]))
        each["anchors"] = [decided[record.step] for record in records]
    return found


def _play(case: Case, fleet: Fleet, steps: int, deadline: float) -> None:
    """Lets workers come and go as the case says, until the run has ended."""
    begin, *happenings = case.host.split(",")
    options = {
        "job": functools.partial(_job, case, str(fleet.folder)),
        "slow_s": SLOW_S,
        "steps": steps,
        "policy": _policy(case),
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
        if phase == "start" and kind != "Diverged":  # one that comes as the others' run ends so hears why
            raise Refused(sentence.strip())
        raise Failed("LATE", f"{path.stem}: {kind}: {sentence.strip()}")
    if time.monotonic() > deadline:
        raise Failed("HANG", fleet.describe())


def _policy(case: Case) -> Any:
    """Of Cadence, what a case does not name is as published, as in a group."""
    return eval(case.legs[0].policy, {"Sync": potluck.Sync, "Auto": potluck.Auto, "Cadence": potluck.Cadence.published})


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
    name = os.environ["POTLUCK_NAME"]
    log = None if is_sync(case) else (folder / f"{name}.steps").open("a")  # line by line: it may be killed
    for _ in fleet.epochs(case.epochs):
        for batch in loader:
            mean, samples = loss_of(model, batch, case.scale, case.habits)
            fleet.backward(mean, samples=float(samples))
            if log is not None and loader.current.weighs:
                told = fleet.table.client.worker_id, fleet.version + 1, batch[-1].tolist()
                print(json.dumps(told), file=log, flush=True)
            fleet.step()
            phase[0] = "trained"
    if name == FIRST:
        torch.save(steps, folder / "events.pt")
    return model
