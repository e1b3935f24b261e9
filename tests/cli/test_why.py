"""A run that hangs says who waits for whom, while it hangs and offline, the morning after."""

import os
import re
import signal
import time
import zlib
from pathlib import Path

import pytest

from potluck.events import read_events
from potluck.fleet.flight import FLIGHT, segments
from tests.cli.test_cli import RECIPE, children, run, start, steps, wait_until
from tests.cli.test_host import invite_of

pytestmark = pytest.mark.timeout(150)
LOOP = """
import ctypes, os, time
import torch
import potluck

def stare():
    if "IN_A_LIBRARY" in os.environ:
        mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    time.sleep(9)

torch.manual_seed(0)
fleet = potluck.init()
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(640, 4), torch.randn(640, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = fleet.prepare(model, optimizer, data, batch_size=8)
count = 0
for _ in fleet.epochs(1):
    for x, y in loader:
        fleet.backward(((model(x) - y) ** 2).mean(), samples=len(x))
        fleet.step()
        count += 1
        if count == 5 and fleet.rank == 1:
            print("staring", flush=True)
            stare()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    (tmp_path / "text").write_text("".join(f"word{i % 97} and{i % 13}\n" for i in range(900))[:10_000])
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


def test_a_worker_that_hangs_under_a_host_is_named_while_it_does_and_by_a_replay(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_LOG", f"debug:{place}/log")
    host = start(place, "host", "tiny.toml", "-n", "2", "--at-least", "2", "--patience", "120", "--threads", "1")
    folder = place / "runs" / "tiny"
    wait_until(lambda: len(steps(folder)) >= 3)
    stopped = children(host.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    wait = r"The host and 1 other worker wait for host-worker-1, which is .+, for \d+ s"
    try:
        time.sleep(1.0)  # the other one ends what it can
        said = run(place, "why", str(folder)).stdout
        assert re.match(wait, said), said
        assert f"worker host-worker-1 (process {stopped}):\n  It is stopped, as by SIGSTOP" in said, said
        assert "host-worker-0 waits for the host at 127.0.0.1" in said and "Stacks of potluck host" in said, said
    finally:
        host.kill()
        os.kill(stopped, signal.SIGKILL)
        host.communicate()
    wait_until(lambda: not children(host.pid))
    done = run(place, "replay", str(folder))
    assert done.returncode == 0 and "the same decisions as then." in done.stdout, done.stdout + done.stderr
    # What was heard does not tell whose gradient the host left unread until the other's came, so both may be named.
    both = r"The host waits for host-worker-\d and host-worker-\d, each of which is sending its gradient"
    assert re.search(f"At its end: ({wait}|{both})", done.stdout), done.stdout
    assert "potluck replay" in run(place, "why", str(folder)).stdout
    text = b"".join(zlib.decompressobj(wbits=31).decompress(path.read_bytes()) for _, path in segments(folder / FLIGHT))
    secret = invite_of(folder).rsplit("/", 1)[1].split(".")[0]
    assert b"SliceReport" in text and b"word7 and" not in text and secret.encode() not in text
    logged = (place / "log").read_text()
    assert "Hello of peer 1 -> Send Welcome" in logged and "heard Work of step 1" in logged and secret not in logged


@pytest.mark.slow
def test_a_worker_that_is_stuck_tells_the_host_where_before_it_is_given_up(place: Path) -> None:
    host = start(place, "host", "-n", "2", "--at-least", "2", "--patience", "6", "--out", "run", "loop.py")
    said = host.communicate(timeout=90)
    assert host.returncode == 0, said
    stalled = [each for each in read_events(place / "run" / "events.jsonl") if each["event"] == "stalled"]
    where = LOOP.splitlines().index("    time.sleep(9)") + 1
    assert any(each["stack"].startswith(f"loop.py:{where} in stare\n") for each in stalled), stalled


@pytest.mark.slow
def test_the_ranks_of_a_group_say_who_waits_for_whom_and_ctrl_backslash_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IN_A_LIBRARY", "1")
    group = start(place, "run", "-n", "2", "loop.py")
    try:
        assert group.stderr is not None
        while "staring" not in group.stderr.readline():
            pass
        time.sleep(4.0)
        line = LOOP.splitlines().index("        library.pthread_mutex_lock(mutex)") + 2
        wait = rf"Worker 0 waits in fleet.step\(\) for worker 1, for \d+ s; worker 1 was last at loop.py, line {line}\."
        said = run(place, "why").stdout
        assert re.match(wait, said) and f"loop.py:{line} in stare" in said, said
        assert re.search(r"For \d+ s the round has waited for: The sums of a step's gradients, on their way\.", said), (
            said
        )
        group.send_signal(signal.SIGQUIT)
        assert re.match(wait, group.stderr.readline())
    finally:
        group.kill()
        group.communicate()
