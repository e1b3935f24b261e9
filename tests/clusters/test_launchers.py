"""`potluck up` under torchrun and a real mpirun: the numbers of one machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.runs import POTLUCK, SETTINGS, assert_same, losses, weights, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MPIRUN = ("mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none")
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="Open MPI is not installed. On Debian: apt-get install openmpi-bin"
)


def run(place: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, timeout=150, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_ranks_of_torchrun_train_a_recipe(place: Path, here: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    said = run(place, *torchrun, *POTLUCK, "up", "tiny.toml", "--out", "run", *SETTINGS)
    assert "Found torchrun: this is task 0 of 2" in said and "A fixed group, which torchrun has made." in said
    assert_same(weights(place / "run"), weights(here / "of-2"))


@needs_mpi
def test_tasks_of_mpirun_are_a_group(place: Path, here: Path) -> None:
    said = run(place, *MPIRUN, *POTLUCK, "up", "tiny.toml", "--out", "run", *SETTINGS)
    assert "Found MPI: this is task 0 of 2" in said and "A fixed group, since all 2 nodes are alike" in said
    assert_same(weights(place / "run"), weights(here / "of-2"))


@needs_mpi
def test_tasks_of_mpirun_join_a_host_if_that_is_asked_for(place: Path, here: Path) -> None:
    run(place, *MPIRUN, *POTLUCK, "up", "tiny.toml", "--as", "host", "--at-least", "2", "--out", "run", *SETTINGS)
    assert workers(place / "run") == 2
    assert losses(place / "run") == pytest.approx(losses(here / "of-2"), rel=1e-5)
