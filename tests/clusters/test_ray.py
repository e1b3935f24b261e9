"""`potluck up` on a real Ray cluster of several nodes on loopback: the numbers of one machine, as nodes come and go."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.runs import (
    LONG,
    POTLUCK,
    SETTINGS,
    STEPS,
    assert_same,
    events,
    files_that_show,
    losses,
    processes_that_show,
    secret_of,
    steps,
    weights,
    workers,
)
from tests.clusters.slurm import wait_for

utilities = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install './potluck[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    made = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        yield made
    finally:
        made.shutdown()


def up(cluster: Any, place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*POTLUCK, "up", *arguments],
        cwd=place,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_group_of_actors_has_the_numbers_of_one_machine(cluster: Any, place: Path, here: Path) -> None:
    job = up(cluster, place, "--as", "group", "tiny.toml", "--out", "run", *SETTINGS)
    said, _ = job.communicate(timeout=150)
    assert job.returncode == 0 and "A fixed group, as asked." in said, said
    assert_same(weights(place / "run"), weights(here / "of-2"))
    assert losses(place / "run") == losses(here / "of-2")


def test_actors_join_a_host_with_the_numbers_of_one_machine_and_the_secret_is_nowhere(
    cluster: Any, place: Path, here: Path
) -> None:
    run = place / "run"
    job = up(cluster, place, "tiny.toml", "--out", "run", "--at-least", "2", *SETTINGS)
    wait_for(lambda: len(steps(run)) >= 2 or job.poll() is not None, "no step", 120)
    secret = secret_of(run)
    shown = processes_that_show(secret)
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 0 and "since Ray does not say how many will come" in said, said
    session = Path(cluster.head_node.get_session_dir_path())
    assert session.is_dir() and list(session.rglob("*.log"))
    assert shown == [] and secret not in said and files_that_show(secret, [session, place]) == []
    assert workers(run) == 2 and len(steps(run)) == STEPS
    assert_same(weights(run), weights(here / "hosted"))
    assert losses(run) == pytest.approx(losses(here / "of-1"), rel=1e-5)


def test_a_run_goes_on_without_a_node_that_is_removed_and_with_one_that_comes(cluster: Any, place: Path) -> None:
    run = place / "run"
    leaving = cluster.add_node(num_cpus=1)
    job = up(cluster, place, "tiny.toml", "--out", "run", "--patience", "5", *LONG)
    try:
        wait_for(lambda: workers(run) == 3 or job.poll() is not None, "three do not come", 120)
        cluster.remove_node(leaving, allow_graceful=False)
        wait_for(lambda: any(each["event"] == "worker_went" for each in events(run)), "nobody is missed")
        before = steps(run)[-1]
        wait_for(lambda: steps(run)[-1] > before + 5, "it stands still")
        coming = cluster.add_node(num_cpus=1)
        wait_for(lambda: workers(run) == 4 or job.poll() is not None, "nobody comes", 90)
    finally:
        said, _ = job.communicate(timeout=200)
    cluster.remove_node(coming)
    assert job.returncode == 0 and workers(run) == 4, said
    done = steps(run)
    assert done[-1] == 400 and len(done) == len(set(done)) == 400
    assert "The workers on" in said and "are lost" in said


def test_where_no_ray_cluster_answers_a_sentence_says_so(place: Path) -> None:
    done = subprocess.run(
        [*POTLUCK, "up", "--on", "127.0.0.1:1", "--patience", "1", "tiny.toml"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "There is no Ray cluster at 127.0.0.1:1" in done.stderr, done.stderr
