"""Stages that are killed: those who wait say so by name; where they meet in a store, one that starts again goes on."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import potluck
from potluck import DataStore, Pipeline
from potluck.errors import StoreError, WorkerLost
from potluck.stages import stage_planner
from tests.bare import Tell, Worker
from tests.parity.test_stages import BATCH, MICRO, STEPS, assert_same, data, loss_of, make, one_process
from tests.quick import first_of
from tests.servers import BUCKET, rclone

WORKERS = 3
OPTIONS: dict[str, Any] = {"die_at": None, "patience_s": 30.0, "wait_at": None, "lr": None}


def be(
    tell: Tell, stages: Any, die_at: tuple[int, int] | None, patience_s: float, wait_at: int | None, lr: float | None
) -> None:
    """One stage. `die_at`: kills itself, as kill -9 does, in the forward of that micro-batch of that step.

    `wait_at`: before that step it waits until it may go on. `lr`: another learning rate than the others have.
    """
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    seen = [0, 0]

    def watched(model: Any, batch: Any) -> Any:
        if die_at == tuple(seen):
            tell("dying")
            os.kill(os.getpid(), signal.SIGKILL)
        seen[1] += 1
        return loss_of(model, batch)

    losses = []
    try:
        with potluck.init(potluck.Sync(balance=False), stages=stages, patience_s=patience_s) as fleet:
            model, optimizer = make()
            if lr is not None:
                optimizer.param_groups[0]["lr"] = lr
            model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=loss_of)
            tell(["stands at", fleet.step_number])
            while fleet.step_number < STEPS:
                for batch in loader:
                    if fleet.step_number == wait_at:
                        tell("waiting")
                        tell.listen()
                        wait_at = None
                    seen[:] = [fleet.step_number, seen[1] if seen[0] == fleet.step_number else 0]
                    fleet.train(watched, batch)
                    event = fleet.step()
                    if event is not None:
                        losses.append(event.loss)
                    if fleet.step_number == STEPS:
                        break
            weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
            tell({"losses": losses, "weights": weights})
    except WorkerLost as error:
        tell(["lost", str(error)])
    except StoreError as error:
        tell(["refused", str(error)])


def start(stages: Any, rank: int, folder: Path, env: dict[str, str], **options: Any) -> Worker:
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(WORKERS),
        "POTLUCK_RENDEZVOUS": str(folder / "rendezvous"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    own = [options.get(name, default) for name, default in OPTIONS.items()]
    return Worker(be, stages, *own, env=place | env)


def collect(worker: Worker) -> dict[str, Any]:
    told = worker.hear()
    worker.finish()
    assert isinstance(told, dict), told
    return told | {"weights": {name: torch.from_numpy(array) for name, array in told["weights"].items()}}


@contextmanager
def a_store(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str], Path]]:
    """A url, the environment for it, and the folder behind it."""
    if kind == "file":
        yield f"file://{folder}/run", {}, folder / "run"
        return
    with rclone(folder / "s3") as server:
        yield f"s3://{BUCKET}/run", server.env, folder / "s3" / BUCKET


@pytest.mark.parametrize(
    ("kind", "victim", "die_at", "stands_at"),
    [
        ("file", 0, (3, 1), 2),
        pytest.param("s3", 1, (3, 0), 2, marks=pytest.mark.slow),
        pytest.param("file", 2, (5, 1), 4, marks=pytest.mark.slow),
        pytest.param("file", 1, (0, 2), 0, marks=pytest.mark.slow),
        pytest.param("s3", 0, (3, 1), 2, marks=pytest.mark.slow),
        pytest.param("s3", 2, (5, 1), 4, marks=pytest.mark.slow),
        pytest.param("file", 1, (3, 0), 2, marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_is_killed_and_started_again_goes_on_where_its_inputs_lie(
    kind: str, victim: int, die_at: tuple[int, int], stands_at: int, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        url, env, place = stack.enter_context(a_store(kind, tmp_path))
        stages = DataStore(url=url, micro_batch_size=MICRO, keep_every=2)
        workers = [
            stack.enter_context(start(stages, rank, tmp_path, env, die_at=die_at if rank == victim else None))
            for rank in range(WORKERS)
        ]
        assert [worker.hear() for worker in workers] == [["stands at", 0]] * WORKERS
        assert workers[victim].hear() == "dying"  # the fault fired
        workers[victim].kill()
        workers[victim] = stack.enter_context(start(stages, victim, tmp_path, env))
        assert workers[victim].hear() == ["stands at", stands_at]
        found = [collect(worker) for worker in workers]
        # What rclone itself leaves of a request that broke off is not ours to remove.
        left = [path for path in place.rglob("*") if path.is_file() and not path.name.startswith(".rclone_temp")]
    judge = one_process()
    found[victim]["losses"] = judge["losses"]  # it has seen only the last of them
    assert_same(found, judge)
    assert not left


@pytest.mark.slow
def test_another_run_with_the_url_of_one_that_lives_is_refused_and_the_first_does_not_feel_it(tmp_path: Path) -> None:
    stages = DataStore(url=f"file://{tmp_path}/run", micro_batch_size=MICRO, keep_every=2)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start(stages, rank, tmp_path, {}, wait_at=3 if rank == 0 else None))
            for rank in range(WORKERS)
        ]
        assert [worker.hear() for worker in workers] == [["stands at", 0]] * WORKERS
        assert workers[0].hear() == "waiting"
        others = [stack.enter_context(start(stages, rank, tmp_path, {}, lr=0.5)) for rank in range(WORKERS)]
        for other in others:
            refused, sentence = other.hear()
            assert refused == "refused" and "is where another run meets" in sentence, sentence
            assert "optimizer.lr = " in sentence and "and this one 0.5" in sentence
            other.finish()
        workers[0].say("go on")
        found = [collect(worker) for worker in workers]
        left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert_same(found, one_process())
    assert not left


@pytest.mark.parametrize("protocol", first_of(["pipeline", "datastore"]))
def test_a_stage_that_dies_ends_the_others_wait_by_name(protocol: str, tmp_path: Path) -> None:
    stages: Any = Pipeline(micro_batch_size=MICRO)
    if protocol == "datastore":
        stages = DataStore(url=f"file://{tmp_path}/run", micro_batch_size=MICRO)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start(stages, rank, tmp_path, {}, die_at=(1, 1) if rank == 1 else None, patience_s=4.0))
            for rank in range(WORKERS)
        ]
        assert [worker.hear() for worker in workers] == [["stands at", 0]] * WORKERS
        assert workers[1].hear() == "dying"
        for rank in (0, 2):
            lost, sentence = workers[rank].hear()
            assert lost == "lost"
            assert "Stage 1 " in sentence or "worker 1" in sentence, sentence
