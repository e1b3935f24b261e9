"""Benchmarks of CPU ranks are just that on a machine with a GPU, too: the processes that they start see none.

Where there was a GPU, Potluck took it and the bare loop beside it did not, so that their weights could not be compared.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BY_DEFAULT
from bench.ranks import ROOT, run_ranks
from bench.stars import Actor, on_stage


class Eyes:
    def gpus(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def test_ranks_see_no_gpu_and_what_is_measured_next_does() -> None:
    assert run_ranks("tests.unit.test_bench_devices") == [{"gpus": ""}] * 2
    assert Eyes().gpus() == "0"


def test_actors_see_no_gpu() -> None:
    with on_stage() as actors:
        actors.append(Actor(Eyes))
        assert actors[0].call("gpus") == ""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_every_benchmark_of_make_bench_still_runs(name: str) -> None:
    """elastic_step did not, and nobody knew: what a benchmark calls had changed."""
    done = subprocess.run([sys.executable, "-m", "bench", name, "--quick"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":  # as a rank of run_ranks
    Path(sys.argv[1], f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"gpus": Eyes().gpus()}))
