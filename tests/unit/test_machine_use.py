"""What a worker uses of its machine: its process and those that it has started, and no others."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from potluck import account
from potluck.machine_use import MIB, MachineUse, UseMeter, UseWatch, card_use
from potluck.page.ranks import find_ranks
from potluck.system import started_at
from potluck.waiting import wait_until

TALKS = "import sys; kept = bytearray(64 << 20); print('here', flush=True); sys.stdin.read()"
CARDS = "GPU-a, 93, 20000, 81559\nGPU-b, 7, 100, 81559\n"


def test_a_process_counts_with_those_that_it_has_started_and_only_while_it_lives() -> None:
    meter = UseMeter(os.getpid())
    assert meter.look() is None  # nothing to compare with yet
    with subprocess.Popen([sys.executable, "-c", TALKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        with_child, alone = meter.look(), UseMeter(child.pid)
        assert alone.look() is None
        of_child = alone.look()
        assert with_child is not None and of_child is not None
        assert of_child.memory_bytes >= 64 * MIB
        assert with_child.memory_bytes >= of_child.memory_bytes
        assert with_child.cores > 0 and 0 <= of_child.cores <= with_child.of_cores + 1
    assert alone.look() is None


def test_a_card_is_told_by_the_processes_that_use_it() -> None:
    held = "GPU-a, 11, 15000\nGPU-b, 12, 90\nGPU-a, 13, 4000"
    assert card_use(CARDS, held, {11, 14}, on_card=True) == (0.93, 15000 * MIB, 81559 * MIB)
    assert card_use(CARDS, held, {11, 12}, on_card=False) == (0.5, 15090 * MIB, 2 * 81559 * MIB)
    assert card_use(CARDS, held, {14}, on_card=True) == (0.0, 0, 0)  # one of the two, and nobody can tell which
    only = CARDS.splitlines()[0]
    for named in ("", "GPU-a, [N/A], 15000", held):  # as in a container, whose processes have other numbers there
        assert card_use(only, named, {14}, on_card=True) == (0.93, 20000 * MIB, 81559 * MIB)
        assert card_use(only, named, {14}, on_card=False) == (0.0, 0, 0)


def test_it_is_measured_beside_the_loop_and_taken_once() -> None:
    watch, taken = UseWatch(on_card=False, every_s=0.01), list[MachineUse]()

    def takes_one() -> bool:
        taken.extend(use for use in [watch.take()] if use is not None)
        return bool(taken)

    assert wait_until(takes_one, 30)
    watch.close()
    assert taken[-1].memory_bytes > 0
    assert wait_until(lambda: "machine use" not in [each.name for each in threading.enumerate()], 30)
    watch.take()
    assert watch.take() is None


def test_ranks_are_found_by_their_run_and_by_the_process_that_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.page.ranks.processes_folder", lambda: tmp_path / "processes")
    run = tmp_path / "run"
    children = [subprocess.Popen([sys.executable, "-c", TALKS], stdin=subprocess.PIPE) for _ in range(4)]
    facts: list[dict[str, object]] = [
        {"name": "0", "parent": 7, "run": str(run)},
        {"name": "1", "parent": 7},
        {"name": "1", "parent": 8},  # of another group
        {"name": "2", "parent": 7, "run": str(tmp_path / "another")},
    ]
    try:
        for child, told in zip(children, facts, strict=True):
            assert wait_until(lambda pid=child.pid: bool(started_at(pid)), 10)  # type: ignore[misc]
            folder = tmp_path / "processes" / str(child.pid)
            folder.mkdir(parents=True)
            known = {"pid": child.pid, "started": started_at(child.pid), "role": "worker"}
            (folder / account.PROCESS).write_text(json.dumps(known | told))
        assert find_ranks(run) == {0: children[0].pid, 1: children[1].pid}
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert find_ranks(run) == {}
