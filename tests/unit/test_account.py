"""A process says what it does when it is asked by SIGQUIT, wherever it stands; and only such a one is asked."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from potluck.account import PROCESS, processes_folder
from potluck.errors import ConfigError
from potluck.launch.why import find_processes, tell_all, why
from potluck.logs import configure_logs
from potluck.system import started_at
from tests.cli.test_cli import wait_until

pytestmark = pytest.mark.timeout(60)
BEGIN = """
import ctypes, sys, threading, time
from potluck import account
account.begin("worker", "tester")
account.know(run=sys.argv[1])
account.tell_with("a part", lambda: ("tester waits for nobody, for 1 s.", ["It owes nothing."]))
def deadlock(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("there", flush=True)
    library.pthread_mutex_lock(mutex)
"""
STUCK = {
    "python": "print('there', flush=True)\nthreading.Event().wait()",
    "a library": "deadlock(ctypes.CDLL(None))",
    "a library that holds the interpreter": "deadlock(ctypes.PyDLL(None))",
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@contextmanager
def process(script: str, run: Path) -> Iterator[subprocess.Popen[str]]:
    found = subprocess.Popen(
        [sys.executable, "-c", script, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert found.stdout is not None and found.stdout.readline() == "there\n"
    try:
        yield found
    finally:
        found.kill()
        found.communicate()


@pytest.mark.parametrize("where", STUCK)
def test_a_process_that_is_stuck_says_where(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process(BEGIN + STUCK[where], tmp_path) as stuck:
        assert why(str(tmp_path)) == 0
        said = capsys.readouterr().out
        assert stuck.poll() is None
        assert f"worker tester (process {stuck.pid})" in said
        if where == "python":
            assert said.startswith("tester waits for nobody, for 1 s.\n") and "It owes nothing." in said
            assert "threading.py" in said.partition("MainThread")[2]
        elif where == "a library":
            assert said.startswith("tester waits for nobody, for 1 s.\n")
            assert re.search(r"<string>:\d+ in deadlock", said)
        else:
            assert "It answers nothing." in said and re.search(r'File "<string>", line \d+ in deadlock', said)


def test_by_hand_it_says_so_on_its_terminal(tmp_path: Path) -> None:
    with process(BEGIN + STUCK["a library"], tmp_path) as stuck:
        stuck.send_signal(signal.SIGQUIT)
        assert stuck.stderr is not None
        said = [stuck.stderr.readline() for _ in range(6)]
        assert said[0] == f"worker tester (process {stuck.pid}):\n"
        assert said[1] == "  tester waits for nobody, for 1 s.\n" and any("deadlock" in line for line in said), said


def test_a_stopped_process_is_said_to_be_stopped_and_is_not_asked(tmp_path: Path) -> None:
    with process(BEGIN + STUCK["python"], tmp_path) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        wait_until(lambda: "T" in Path(f"/proc/{stopped.pid}/stat").read_text().rsplit(")", 1)[1].split()[0])
        assert "It is stopped, as by SIGSTOP or Ctrl-Z" in tell_all(find_processes())
        stopped.send_signal(signal.SIGCONT)
        assert "tester waits for nobody" in tell_all(find_processes())


def test_a_stranger_with_the_number_of_one_that_has_ended_is_neither_found_nor_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be ended by the signal."""
    with process("print('there', flush=True)\nimport time\ntime.sleep(60)", tmp_path) as stranger:
        folder = processes_folder() / str(stranger.pid)
        folder.mkdir(parents=True)
        told = {"pid": stranger.pid, "parent": 1, "role": "worker", "run": str(tmp_path.resolve())}
        (folder / PROCESS).write_text(json.dumps(told | {"started": "1"}))
        assert find_processes() == []
        # Even where it is the very process: it does not answer the signal, and so gets none.
        (folder / PROCESS).write_text(json.dumps(told | {"started": started_at(stranger.pid)}))
        assert why(str(tmp_path)) == 0
        assert "It cannot be asked." in capsys.readouterr().out
        assert stranger.poll() is None
    assert started_at(stranger.pid) == "" and find_processes() == []


def test_others_runs_are_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with process(BEGIN + STUCK["python"], tmp_path):
        why(str(other))
        assert "No process of the run in" in capsys.readouterr().out
        why(None)
        assert "tester waits for nobody" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="There is no run folder"):
        why("nowhere")


def test_a_run_that_has_ended_is_said_to_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"event": "run_ended", "reason": "finished", "step": 7, "time": 1.0, "schema": 1}
    (tmp_path / "events.jsonl").write_text(json.dumps(ended) + "\n")
    why(str(tmp_path))
    assert "has ended at step 7: finished." in capsys.readouterr().out


def test_the_folder_goes_with_its_process_and_is_its_users_alone(tmp_path: Path) -> None:
    end = BEGIN + "import os, pathlib\nplace = account.processes_folder() / str(os.getpid())\n"
    end += "print(oct(place.stat().st_mode & 0o777), oct(place.parent.stat().st_mode & 0o777))"
    done = subprocess.run([sys.executable, "-c", end, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "0o700 0o700\n"
    assert list(processes_folder().iterdir()) == []


def test_one_variable_turns_logs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "from potluck.logs import configure_logs; configure_logs(); configure_logs(); import logging;"
    script += "[getattr(logging.getLogger('potluck.part'), each)('a ' + each) for each in ('debug', 'info', 'warning')]"

    def said(value: str) -> str:
        environment = os.environ | {"POTLUCK_LOG": value, "POTLUCK_NAME": "100%d"}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        return done.stderr

    assert said("info").count("potluck.part: ") == 2 and "100%d INFO potluck.part: a info" in said("info")
    assert "a debug" in said("debug") and "a info" not in said("warning")
    file = tmp_path / "log"
    assert said(f"info:{file}") == "" and file.read_text().count("\n") == 2
    monkeypatch.setenv("POTLUCK_LOG", "loud")
    with pytest.raises(ConfigError, match="POTLUCK_LOG is debug, info, warning, or one of them and a file"):
        configure_logs()
