"""`potluck up` where it cannot begin: the installed command, with a scheduler's variables and without a scheduler."""

import os
import subprocess
from pathlib import Path

from potluck.save.run_folder import hold, make_run_folder
from tests.cli.test_cli import POTLUCK, RECIPE


def start(place: Path, task: int) -> subprocess.Popen[str]:
    told = {"OMPI_COMM_WORLD_RANK": str(task), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    command = [*POTLUCK, "up", "tiny.toml", "--as", "host", "--out", "run"]
    return subprocess.Popen(command, cwd=place, env=os.environ | told, stderr=subprocess.PIPE, text=True)


def test_where_the_first_node_cannot_begin_it_says_why_and_the_others_do_not_wait(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    make_run_folder(tmp_path / "run")
    with hold(tmp_path / "run"):
        tasks = [start(tmp_path, task) for task in (1, 0)]
        (_, other), (_, first) = (task.communicate(timeout=60) for task in tasks)
    assert "Another run is using run right now." in first and tasks[1].returncode == 2, first
    assert "the first node could not begin" in other and tasks[0].returncode == 75, other


def test_without_a_scheduler_a_sentence_says_which_were_looked_for(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RAY", "PMI", "OMPI"))}
    done = subprocess.run([*POTLUCK, "up", "demo"], cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "No scheduler started this. Looked for: torchrun" in done.stderr
