"""One worker is made slower, by a quota that holds or by pauses in proportion; and nothing of it stays behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from potluck.events import RunEnded, RunStarted
from potluck.train import slowdown
from potluck.train.slowdown import Brake, Pauses, Slowdown, plan_quotas, slowing

STARTED = RunStarted(
    name="x", folder="x", workers=3, device="cpu", parameters=1, unit="rows", batch_size=3, steps_total=1, from_step=0
)
ENDED = RunEnded(reason="finished", step=1, rows_seen=3, seconds=1.0, loss=1.0, validation_loss=None, skipped=0)
SPIN = """
import pathlib, sys, time
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(__import__("os").getpid()))
until, before = time.perf_counter() + 0.6, time.process_time()
while time.perf_counter() < until: pass
print((time.process_time() - before) / 0.6)
"""


def test_quotas_fit_the_machine_and_differ_by_the_factor() -> None:
    fast, other, slow = plan_quotas(3, slow=2, factor=3.0, cores=2)
    assert fast == other == pytest.approx(3 * slow)
    assert fast + other + slow == pytest.approx(1.2), "the rest is for whatever else runs here"
    assert plan_quotas(3, slow=0, factor=2.0, cores=64) == (0.5, 1.0, 1.0), "a worker has one thread"


def test_a_quota_holds_and_nothing_stays_behind() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    with slowing(3, cores=2) as slowed:
        if not slowed.groups:
            pytest.skip(slowed.why_not)
        parent = Path(slowed.groups[0]).parent
        (parent / f"potluck-demo-{dead.pid}-0").mkdir()
        assert "by CPU quotas: it gets 0.17 cores, each other one 0.51." in slowed.sentence
        done = subprocess.run([sys.executable, "-c", SPIN, slowed.groups[2]], capture_output=True, text=True)
        assert 0 < float(done.stdout) < 0.35, done.stderr
    assert not any(Path(group).exists() for group in slowed.groups)
    with slowing(3, cores=2) as slowed:
        assert not (parent / f"potluck-demo-{dead.pid}-0").exists(), "what a killed demo left is removed by the next"
        assert str(os.getpid()) in (Path(slowed.home) / "cgroup.procs").read_text().split()


def test_a_worker_is_slowed_only_while_it_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moves: list[tuple[int, Path]] = []
    monkeypatch.setattr(slowdown, "_move", lambda pid, group: moves.append((pid, group)))
    plan = Slowdown(worker=1, cores=(0.6, 0.2), groups=("/a", "/b"), home="/home")
    brakes = [Brake(plan, rank, has_gpu=False) for rank in range(2)]
    for event in (STARTED, ENDED):
        for brake in brakes:
            brake(event)
    assert moves == [(os.getpid(), Path(group)) for group in ("/a", "/b", "/home", "/home")]
    assert brakes[1].slow(len) is len, "a quota needs no pauses"
    assert capsys.readouterr().out.count("Worker 1 is slowed 3-fold by CPU quotas") == 1


def test_without_control_groups_the_slow_one_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("tmpfs /tmp tmpfs rw 0 0\n")
    monkeypatch.setattr(slowdown, "MOUNTS", tmp_path / "mounts")
    with slowing(3, cores=2) as slowed:
        assert slowed.sentence == (
            "Worker 2 is slowed 3-fold by pausing 2 times as long as it computes. (CPU quotas need control groups with"
            " a CPU controller, and there are none here.)"
        )
    assert Brake(slowed, 0, has_gpu=False).slow(len) is len
    calls: list[str] = []
    brake = Brake(slowed, 2, has_gpu=False)
    brake._pauses = Pauses(3.0, computed_s=lambda: 0.0, sleep=lambda _: calls.append("pause"))
    assert brake.slow(lambda word: calls.append(word) or len(word))("abc") == 3
    assert calls == ["abc", "pause"]


def test_quotas_that_are_refused_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(slowdown, "_find_groups", refuse)
    with slowing(2, cores=2) as slowed:
        assert slowed.sentence.endswith("(CPU quotas were refused: Operation not permitted.)")


def test_a_gpu_is_slowed_by_pauses() -> None:
    plan = Slowdown(worker=1, cores=(0.6, 0.2), groups=("/a", "/b"), home="/home")
    brake = Brake(plan, 1, has_gpu=True)
    assert brake.slow(len) is not len and "A CPU quota does not slow a GPU." in brake.slowdown.sentence


def test_pauses_are_in_proportion_to_compute_alone() -> None:
    """Four batches of uneven cost; the clock is of computing, so that sleeping does not move it."""
    clock = iter([10.0, 10.1, 10.1, 10.4, 11.4])
    slept: list[float] = []
    pauses = Pauses(3.0, computed_s=lambda: next(clock), sleep=slept.append)
    for _ in range(4):
        pauses.pause()
    assert slept == pytest.approx([0.2, 0.0, 0.6, 2.0])


def test_version_2_is_found_beside_our_own_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = tmp_path / "cgroup" / "app.slice" / "shell.scope"
    ours.mkdir(parents=True)
    (ours.parent / "cgroup.subtree_control").write_text("cpu memory pids")
    (tmp_path / "mounts").write_text(f"cgroup2 {tmp_path}/cgroup cgroup2 rw,nsdelegate 0 0\n")
    (tmp_path / "ours").write_text("0::/app.slice/shell.scope\n")
    monkeypatch.setattr(slowdown, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(slowdown, "OURS", tmp_path / "ours")
    assert slowdown._find_groups() == (ours, ours.parent, True)
    slowdown._set_quota(ours, 0.25, is_v2=True)
    assert (ours / "cpu.max").read_text() == "5000 20000"
