"""The testbed of the benchmarks: its limits hold, and whatever ends it, nothing stays behind.

Skipped, with the missing right as the reason, where there are no control groups and network namespaces to be had.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import testbed
from bench.testbed import network, partition, programs, quota, reaper
from bench.testbed.bed import Machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a testbed needs Linux")

ROOT = Path(__file__).parents[2]
BUSY = ["/bin/sh", "-c", "while :; do :; done"]
BOTH = Machine(cpu=0.5, mbit=100)
LEAVES_A_CHILD = "setsid sleep 1000 & echo up; wait"


@pytest.fixture(scope="module")
def rights() -> None:
    if (lack := testbed.Testbed.lacks([BOTH])) is not None:
        pytest.skip(lack)


def traces(name: str) -> list[str]:
    """Whatever there is of a testbed, looked for by its name alone."""
    hierarchy = quota.find_hierarchy()
    folders = [network.LINKS, network.NAMESPACES, Path(tempfile.gettempdir()), *([hierarchy.root] if hierarchy else [])]
    found = [str(path) for folder in folders if folder.is_dir() for path in folder.glob(f"{name}*")]
    return found + [f"process {pid}" for mark in (name, f"{name}-mps") for pid in programs.marked(mark)]


def wait_until(holds: Callable[[], bool], what: object = "") -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0, out
    return out


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, in a process group of its own, and the name of its testbed."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-m", "bench.testbed", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        with process:
            yield process, f"tb{process.pid}a"
    finally:
        process.kill()


@pytest.mark.usefixtures("rights")
def test_a_quota_holds_and_can_be_changed_while_a_process_runs() -> None:
    with testbed.Testbed([Machine(cpu=0.2), Machine()]) as bed:
        processes = [bed.start(index, BUSY) for index in (0, 1)]
        wait_until(lambda: bed.throttled(0) >= 3)
        assert bed.throttled(1) == 0
        bed.set_cpu(1, 0.1)
        wait_until(lambda: bed.throttled(1) >= 3)
        assert bed.address(0) == bed.parent_address == "127.0.0.1"
        assert bed.interface == "lo"
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    assert not traces(bed.name)


@pytest.mark.usefixtures("rights")
def test_a_process_is_inside_with_its_children_from_the_start() -> None:
    with testbed.Testbed([Machine(), Machine(cpu=0.5)]) as bed:
        look = ["/bin/sh", "-c", "cat /proc/$$/cgroup; sh -c 'cat /proc/$$/cgroup'; env"]
        lines = output(bed.start(1, look, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, text=True))
        assert sum(line.endswith(f"/{bed.name}-1") for line in lines.splitlines()) == 2
        assert {"TESTBED_MACHINE=1", "TESTBED_ADDRESS=127.0.0.1", "OMP_NUM_THREADS=1"} <= set(lines.splitlines())


@pytest.mark.usefixtures("rights")
def test_machines_reach_each_other_and_us_and_testbeds_live_side_by_side() -> None:
    greet = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2]))).recv(9).decode())"
    serve = (
        "import os, socket; server = socket.create_server(('', 0)); print(server.getsockname()[1], flush=True)\n"
        "for _ in range(2): server.accept()[0].send(os.environ['TESTBED_MACHINE'].encode())"
    )
    python = [sys.executable, "-S", "-c"]
    with testbed.Testbed([BOTH, Machine()]) as bed, testbed.Testbed([Machine()], network=True) as other:
        server = bed.start(0, [*python, serve], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = bed.start(1, [*python, greet, bed.address(0), port], stdout=subprocess.PIPE, text=True)
        assert output(client) == "0\n"
        with socket.create_connection((bed.address(0), int(port)), timeout=20) as ours:
            assert ours.recv(9) == b"0"
        with socket.create_server((bed.parent_address, 0)) as listening:
            port = str(listening.getsockname()[1])
            client = bed.start(1, [*python, greet, bed.parent_address, port], stdout=subprocess.PIPE, text=True)
            connection, (address, _) = listening.accept()
            connection.send(b"hello")
            connection.close()
            assert (output(client), address) == ("hello\n", bed.address(1))
        assert other.address(0) not in (bed.address(0), bed.address(1), bed.parent_address)
    assert bed.name != other.name
    assert not traces(bed.name) + traces(other.name)


@pytest.mark.usefixtures("rights")
def test_a_limited_link_has_a_token_bucket_at_both_ends() -> None:
    tc = programs.find("tc", network.IPROUTE)
    with testbed.Testbed([Machine(mbit=20), Machine()]) as bed:
        inside = [tc, "qdisc", "show", "dev", bed.interface]
        ends = [output(bed.start(index, inside, stdout=subprocess.PIPE, text=True)) for index in (0, 1)]
        ends += [programs.run([tc, "qdisc", "show", "dev", f"{bed.name}-{index}"], "") for index in (0, 1)]
    assert ["tbf" in end and "rate 20Mbit" in end for end in ends] == [True, False, True, False]


@pytest.mark.usefixtures("rights")
def test_kill_9_of_the_whole_process_group_leaves_nothing_behind() -> None:
    with command("--cpu", "0.5", "--mbit", "100", "--", "/bin/sh", "-c", LEAVES_A_CHILD) as (process, name):
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] up\n"
        wait_until(lambda: sum("process" in trace for trace in traces(name)) >= 2)  # the child may come after the word
        before = traces(name)
        assert sum(name in trace for trace in before) == 4, before  # a group, a namespace, a link and the bridge
        os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: not traces(name), traces(name))


@pytest.mark.usefixtures("rights")
def test_kill_9_while_it_is_being_made_leaves_nothing_behind() -> None:
    with command("--cpu", "0.5", "--mbit", "100", "--", "/bin/true") as (process, name):
        wait_until(lambda: bool(traces(name)))
        process.kill()
        process.communicate()  # the reaper holds the pipe until it is done
        assert not traces(name)


@pytest.mark.usefixtures("rights")
def test_a_command_that_is_asked_to_end_has_cleared_away_before_it_does() -> None:
    with command("--cpu", "0.5", "--", "/bin/sh", "-c", LEAVES_A_CHILD) as (process, name):
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] up\n"
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
        assert not traces(name)


@pytest.mark.usefixtures("rights")
def test_the_command_runs_on_every_machine_and_ends_with_the_first_failure() -> None:
    script = 'echo "$RANK of $WORLD_SIZE"; test $RANK = 0 && exec sleep 1000; exit 3'
    with command("--cpu", "0.5", "none", "--", "/bin/sh", "-c", script) as (process, name):
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 3
        assert sorted(out.splitlines()) == [
            "[0] 0 of 2",
            "[1] 1 of 2",
            "testbed: machine 1 ended with exit code 3, so the others are ended",
        ]
        assert not traces(name)


def test_missing_rights_are_one_sentence_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lacks = testbed.Testbed.lacks
    monkeypatch.setattr(quota, "MOUNTS", tmp_path / "mounts")
    assert "not mounted here: as root, `mount -t cgroup" in str(lacks([Machine(cpu=0.5)]))
    (tmp_path / "mounts").write_text(f"cgroup {tmp_path / 'nowhere'} cgroup rw,cpu,cpuacct 0 0\n")
    assert f"cannot be made in {tmp_path / 'nowhere'} (No such file or directory): run it as root" in str(
        lacks([Machine(cpu=0.5)])
    )
    assert lacks([Machine()]) is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lacks([Machine(mbit=10)]) == "Network namespaces need root: run it as root, or leave out `mbit`."
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "SBIN", "")
    for lack, machine in (("ip", Machine(mbit=10)), (partition.PROGRAM, Machine(gpu=50))):
        assert str(lacks([machine])).startswith(f"The program `{lack}` is not installed here: install ")
    with testbed.Testbed([Machine()]) as bed, pytest.raises(testbed.TestbedError, match="give at least one"):
        bed.set_cpu(0, 0.5)
    with testbed.Testbed([Machine()]) as bed, pytest.raises(testbed.TestbedError, match="make it with network=True"):
        bed.unplug(0)
    assert capfd.readouterr() == ("", "")


def test_what_is_no_machine_is_refused() -> None:
    for wrong in ({"cpu": 0.0}, {"mbit": -1.0}, {"gpu": 101.0}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is a "):
            Machine(**wrong)


def test_control_groups_of_version_2_get_the_same_quotas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quota, "MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    quotas = quota.Quotas("tb", 3)
    quotas.make([0.5, None, 0.01])
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    found = [(tmp_path / f"tb-{index}" / "cpu.max").read_text() for index in range(3)]
    assert found == ["10000 20000", "max 20000", "1000 100000"]
    (tmp_path / "tb-0" / "cpu.stat").write_text("usage_usec 9\nnr_periods 8\nnr_throttled 7\nthrottled_usec 6\n")
    assert quotas.throttled(0) == 7


def test_parts_of_a_gpu_come_from_a_daemon_of_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only which programs are called, and how: the daemon is a script that leaves a process behind, as the real one."""
    log, program = tmp_path / "log", tmp_path / partition.PROGRAM
    program.write_text(
        "#!/bin/sh\n"
        f'test "$1" = -d && setsid sleep 1000 & words=$(cat); echo "$CUDA_MPS_PIPE_DIRECTORY $1$words" >> {log}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = "$CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE ${CUDA_VISIBLE_DEVICES-all}"
    show = ["/bin/sh", "-c", f"echo {words}"]
    with testbed.Testbed([Machine(gpu=30), Machine(), Machine(gpu=0)]) as bed:
        pipes = f"{tempfile.gettempdir()}/{bed.name}-mps/pipe"
        seen = [output(bed.start(index, show, stdout=subprocess.PIPE, text=True)) for index in range(3)]
        assert programs.marked(f"{bed.name}-mps")
    assert seen == [f"{pipes} 30 all\n", f"{pipes} all\n", "\n"]
    assert log.read_text().splitlines() == [f"{pipes} -d", f"{pipes} get_server_list", f"{pipes} quit"]
    assert not traces(bed.name)


@pytest.mark.usefixtures("rights")
def test_a_testbed_whose_reaper_was_killed_clears_away_by_itself() -> None:
    with testbed.Testbed([BOTH]) as bed:
        bed.start(0, BUSY)
        bed._reaper._process.kill()
    assert not traces(bed.name)


def test_clearing_away_what_was_never_made_is_no_error() -> None:
    assert reaper.clear(f"tb{os.getpid()}z", 3) == []
