"""`potluck up` in jobs of a real SLURM: the numbers of one machine, and runs that outlive nodes and requeues."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.runs import (
    LONG,
    POTLUCK,
    SETTINGS,
    STEPS,
    alone,
    assert_same,
    files_that_show,
    losses,
    processes_that_show,
    secret_of,
    steps,
    weights,
    workers,
)
from tests.clusters.slurm import Cluster, missing, slurm, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing() or "SLURM is here"),
]
SRUN = ("srun", "--ntasks-per-node=1", "-c2", "-w", "n1,n2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The third node is smaller than the others."""
    with slurm({"n1": 2, "n2": 2, "n3": 1}) as made:
        yield made


@pytest.fixture(autouse=True)
def is_idle(cluster: Cluster) -> None:
    wait_for(lambda: cluster.idle() == set(cluster.cores), "a job is still there")


def test_nodes_that_are_alike_are_a_group_with_the_numbers_of_one_machine(
    cluster: Cluster, place: Path, here: Path
) -> None:
    done = cluster.run(*SRUN, *POTLUCK, "up", "tiny.toml", "--out", "run", *SETTINGS, cwd=place)
    assert done.returncode == 0, done.stderr
    assert "Found SLURM: this is task 0 of 2, on n1. A fixed group, since all 2 nodes are alike: 2 cores" in done.stderr
    assert "on 2 workers" in done.stdout
    assert_same(weights(place / "run"), weights(here / "of-2"))
    assert losses(place / "run") == losses(here / "of-2")
    assert losses(place / "run") == pytest.approx(losses(here / "of-1"), rel=1e-5)


def test_nodes_that_differ_join_a_host_with_the_numbers_of_one_machine_and_the_secret_is_nowhere(
    cluster: Cluster, place: Path, here: Path
) -> None:
    run = place / "run"
    batch(place, "#SBATCH -N3", "#SBATCH --no-requeue", "up", "tiny.toml", "--out", "run", "--at-least", "3", *SETTINGS)
    submit(cluster, place)
    wait_for(lambda: len(steps(run)) >= 2, lambda: said(place))
    secret = secret_of(run)
    shown = processes_that_show(secret)
    told = cluster.run("scontrol", "show", "job", "-dd").stdout + cluster.run("scontrol", "show", "step").stdout
    told += cluster.run("squeue", "-a", "-o", "%all").stdout
    wait_for(lambda: "ended with 0" in said(place), lambda: said(place))
    assert "since nodes differ: n3 has 1 core of" in said(place)
    assert shown == [] and "JobId=" in told and secret not in told + said(place)
    assert files_that_show(secret, [cluster.folder, place]) == []
    assert workers(run) == 3 and len(steps(run)) == STEPS
    assert_same(weights(run), weights(here / "hosted"))
    assert losses(run) == pytest.approx(losses(here / "of-1"), rel=1e-5)


def test_a_script_of_ones_own_gets_its_arguments_and_a_heterogeneous_job_is_one_run(
    cluster: Cluster, place: Path
) -> None:
    alone(place, "run", "-n", "1", "own.py", "alone.txt")
    batch(place, "#SBATCH -N1 -w n1", "#SBATCH hetjob", "#SBATCH -N1 -w n3", "up", "--as", "group", "own.py", "het.txt")
    submit(cluster, place)
    wait_for(lambda: ended(place), lambda: said(place), 120)
    assert "ended with 0" in said(place), said(place)
    (world, total), (_, expected) = ((place / name).read_text().split() for name in ("het.txt", "alone.txt"))
    assert world == "2" and float(total) == pytest.approx(float(expected), rel=1e-6)


def test_a_batch_job_outlives_a_node_and_what_was_saved_at_its_signal_resumes_when_it_is_requeued(
    cluster: Cluster, place: Path
) -> None:
    run = place / "run"
    batch(place, "#SBATCH -N3", "up", "tiny.toml", "--out", "run", *LONG)
    job = submit(cluster, place)
    wait_for(lambda: workers(run) == 3 and len(steps(run)) > 5, lambda: said(place))
    cluster.kill_node("n3")
    before = steps(run)[-1]
    wait_for(lambda: steps(run)[-1] > before + 10, lambda: said(place))
    assert "A host on the first node, which the others join, since SLURM may take the nodes away" in said(place)
    cluster.start_node("n3")
    cluster.run("scontrol", "update", "nodename=n3", "state=resume")
    cluster.run("scancel", "--signal=TERM", job)
    wait_for(lambda: "ended with 130" in said(place), lambda: said(place))
    found = re.search(r"Stopped after step (\d+)\. Saved in \S+step-0*(\d+)\.", said(place))
    assert found and found[1] == found[2], said(place)
    wait_for(lambda: "ended with 0" in said(place), lambda: said(place), 150)
    assert "run holds a run, which resumes." in said(place)
    assert f"Continuing from step {found[1]}." in said(place)
    done = steps(run)
    assert done[-1] == 400 and len(done) == len(set(done)) == 400  # nothing twice, nothing left out
    assert "Traceback" not in said(place)


def test_a_group_stops_at_the_jobs_signal_and_resumes_when_it_is_requeued(cluster: Cluster, place: Path) -> None:
    run = place / "run"
    batch(place, "#SBATCH -N2", "up", "--as", "group", "tiny.toml", "--out", "run", *LONG)
    job = submit(cluster, place)
    wait_for(lambda: len(steps(run)) > 5, lambda: said(place))
    cluster.run("scancel", "--signal=TERM", job)
    wait_for(lambda: "ended with 130" in said(place), lambda: said(place))
    wait_for(lambda: "ended with 0" in said(place), lambda: said(place), 150)
    assert "run holds a run, which resumes." in said(place)
    done = steps(run)
    assert done[-1] == 400 and len(done) == len(set(done)) == 400
    assert "Traceback" not in said(place)


def test_a_job_whose_first_node_dies_is_requeued_and_resumes(cluster: Cluster, place: Path) -> None:
    run = place / "run"
    batch(place, "#SBATCH -N2", "up", "tiny.toml", "--out", "run", "--patience", "5", *LONG)
    submit(cluster, place)
    wait_for(lambda: workers(run) == 2 and len(steps(run)) > 5, lambda: said(place))
    cluster.kill_node("n1")  # the host's, and the batch script's
    wait_for(lambda: "run holds a run, which resumes." in said(place), lambda: said(place))
    wait_for(lambda: "ended with 0" in said(place), lambda: said(place), 150)
    assert steps(run)[-1] == 400
    cluster.start_node("n1")
    cluster.run("scontrol", "update", "nodename=n1", "state=resume")


def test_a_node_that_cannot_reach_the_host_says_so_within_patience_by_name_and_port(
    cluster: Cluster, place: Path
) -> None:
    options = ("--as", "host", "--address", "::1", "--patience", "3", "--out", "run", *SETTINGS)
    started = time.monotonic()
    done = cluster.run(*SRUN, *POTLUCK, "up", "tiny.toml", *options, cwd=place)
    assert re.search(r"n2 cannot reach the first node at ::1 port \d+: Connection refused, for 3 s", done.stderr)
    assert time.monotonic() - started < 60
    assert len(steps(place / "run")) == STEPS  # the first node's own worker needs nobody


# Batch jobs

SCRIPT = """#!/bin/bash
#SBATCH --exclusive --no-kill --open-mode=append --output=out
{options}
{command}
code=$?
echo "ended with $code"
if [ $code -eq 130 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def batch(place: Path, *words: str) -> None:
    options = [word for word in words if word.startswith("#SBATCH")]
    command = [*POTLUCK, *(word for word in words if not word.startswith("#SBATCH"))]
    (place / "job.sh").write_text(SCRIPT.format(options="\n".join(options), command=" ".join(command)))


def submit(cluster: Cluster, place: Path) -> str:
    done = cluster.run("sbatch", "--parsable", "job.sh", cwd=place)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("+")[0]


def said(place: Path) -> str:
    return (place / "out").read_text(errors="replace") if (place / "out").exists() else ""


def ended(place: Path) -> bool:
    return "ended with" in said(place)
