"""A host and those who join it, as a person would: the installed commands, real processes, kill -9 and Ctrl-C."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from potluck.events import read_events
from tests.cli.test_cli import POTLUCK, RECIPE, ROOT, children, start, steps, wait_until

pytestmark = pytest.mark.timeout(150)
TEXT = ("--data", "text")
SETTINGS = ("--set", "fit.max_steps=60", "--set", "workers.threads=1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    (tmp_path / "text").write_text("".join(f"word{i % 97} and{i % 13}\n" for i in range(900))[:10_000])
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run with one worker that nobody disturbed."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "text").write_text("".join(f"word{i % 97} and{i % 13}\n" for i in range(900))[:10_000])
    done = subprocess.run([*POTLUCK, "host", "tiny.toml", *SETTINGS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Finished 60 steps" in done.stdout
    return weights(folder / "runs" / "tiny")


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def invite_of(run: Path) -> str:
    wait_until(lambda: (run / "invite").exists() and (run / "invite").read_text().endswith("\n"))
    return (run / "invite").read_text().strip()


def join(place: Path, *arguments: str, feed: str | None = None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*POTLUCK, "join", "--threads", "1", *arguments],
        cwd=place,
        stdin=subprocess.PIPE if feed is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if feed is not None:
        assert process.stdin is not None
        process.stdin.write(feed + "\n")
        process.stdin.close()
        process.stdin = None
    return process


def arguments_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().replace("\0", " ")
    except OSError:
        return ""


def test_workers_on_other_machines_join_encrypted_leave_and_change_no_bit(
    place: Path, expected: dict[str, torch.Tensor]
) -> None:
    host = start(place, "host", "tiny.toml", "-n", "0", "--host", "0.0.0.0", "--at-least", "2", *SETTINGS)
    run = place / "runs" / "tiny"
    line = invite_of(run)
    secret, _ = line.rsplit("/", 1)[1].split(".")
    first = join(place, *TEXT, line)  # pasted
    second = join(place, *TEXT, "-", feed=line)
    wait_until(lambda: len(steps(run)) >= 5)
    everybody = [host.pid, first.pid, second.pid, *children(first.pid), *children(second.pid)]
    told = " ".join(map(arguments_of, everybody))
    assert "potluck" in told and secret not in told
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130 and "it continues without this worker" in said, said
    out, error = host.communicate(timeout=90)
    _, other = second.communicate(timeout=30)
    assert host.returncode == 0 and second.returncode == 0, (out, error, other)
    assert_same(weights(run), expected)
    assert line in out and "Traceback" not in error + said + other
    assert out.count(secret) == 1 and secret not in error + other + (run / "events.jsonl").read_text()
    assert (run / "invite").stat().st_mode & 0o077 == 0
    went = [r for r in read_events(run / "events.jsonl") if r["event"] == "worker_went"]
    assert went[0]["polite"]


@pytest.mark.slow
def test_a_host_killed_and_started_again_goes_on_with_whoever_is_there(
    place: Path, expected: dict[str, torch.Tensor]
) -> None:
    host = start(place, "host", "tiny.toml", *SETTINGS, "--out", "here")
    run = place / "here"
    worker = join(place, *TEXT, invite_of(run))
    wait_until(lambda: any(r["event"] == "worker_came" and "host" not in r["name"] for r in events(run)))
    wait_until(lambda: len(steps(run)) >= 8)
    second = subprocess.run(
        [*POTLUCK, "host", "tiny.toml", "--out", "here", "--resume"], cwd=place, capture_output=True, text=True
    )
    assert second.returncode == 2 and "Another run is using here right now." in second.stderr
    host.kill()
    host.communicate()
    again = start(place, "host", "here/run.toml", "--out", "here", "--resume", "--threads", "1")
    out, error = again.communicate(timeout=90)
    _, said = worker.communicate(timeout=30)
    assert again.returncode == 0, out + error
    assert worker.returncode == 0 and "joining again" in said, said
    assert_same(weights(run), expected)
    assert steps(run)[-1] == 60 and len(set(steps(run))) >= 59


def events(run: Path) -> list[dict[str, object]]:
    return list(read_events(run / "events.jsonl")) if (run / "events.jsonl").exists() else []


@pytest.mark.slow
def test_ctrl_c_on_the_host_saves_for_all_and_a_wrong_invite_gets_nothing(
    place: Path, expected: dict[str, torch.Tensor]
) -> None:
    host = start(place, "host", "tiny.toml", *SETTINGS, "--at-least", "2")
    run = place / "runs" / "tiny"
    line = invite_of(run)
    before, pin = line.rsplit(".", 1)
    assert len(pin) == 43 and line.startswith("potluck://127.0.0.1:")  # encrypted, on this machine too
    wrong = join(place, f"{before[:-4]}AAAA.{pin}")
    _, said = wrong.communicate(timeout=60)
    assert wrong.returncode == 2 and "secret is not (or no longer) the right one" in said, said
    unasked = join(place, line)  # no terminal, and the recipe names a file: it is not read
    _, said = unasked.communicate(timeout=60)
    assert unasked.returncode == 2 and "names files for this machine to read: 'text'. Nothing was read" in said, said
    right = join(place, *TEXT, line)
    wait_until(lambda: len(steps(run)) >= 3)
    if host.poll() is None:
        host.send_signal(signal.SIGINT)
    _, error = host.communicate(timeout=60)
    right.communicate(timeout=30)
    assert host.returncode in (130, 0) and "Traceback" not in error, error
    if host.returncode == 130:
        found = re.search(r"Stopped after step (\d+)\. Saved in \S+step-0*(\d+)\. Continue with: potluck (.+)", error)
        assert found and found[1] == found[2], error
        again = subprocess.run([*POTLUCK, *found[3].split()], cwd=place, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr
    assert_same(weights(run), expected)


@pytest.mark.slow
def test_a_script_of_ones_own_is_joined_with_a_copy_of_it(place: Path) -> None:
    script = place / "own_loop.py"
    script.write_text((ROOT / "examples" / "own_loop.py").read_text().replace("EPOCHS = 3", "EPOCHS = 2"))
    host = start(place, "host", "--out", "spirals", "--at-least", "2", "--threads", "1", "own_loop.py")
    line = invite_of(place / "spirals")
    worker = join(place, line, "own_loop.py")
    out, error = host.communicate(timeout=90)
    said, _ = worker.communicate(timeout=30)
    assert host.returncode == 0 and worker.returncode == 0, (out, error, said)
    alone = subprocess.run([sys.executable, "own_loop.py"], cwd=place, capture_output=True, text=True)
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+) on", out + said)]
    plain = [float(found) for found in re.findall(r"loss (\d\.\d+) on", alone.stdout)]
    assert losses == pytest.approx(plain, abs=2e-3), (out, said, alone.stdout)
    assert "each of its 2,000 samples was used exactly once" in out


def test_bad_orders_are_refused_with_a_sentence(place: Path) -> None:
    for arguments, sentence in [
        (["host", "tiny.toml", "--resume"], "There is no run to resume in runs/tiny"),
        (["host", "nothing.toml"], "There is no recipe nothing.toml"),
        (["join", "hello"], None),
    ]:
        done = subprocess.run(
            [*POTLUCK, *arguments], cwd=place, capture_output=True, text=True, timeout=60,
            env=os.environ | {"POTLUCK_TEST": "1"},
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.startswith("potluck: "), (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        if sentence:
            assert sentence in done.stderr


NODES = (
    RECIPE.replace('kind = "sync"\nbalance = false', 'kind = "cadence"\nanchor = 1\nmax_anchor = 2')
    + """
[strategy]
kind = "hybrid_shard"
intra_node_size = 2
"""
)


@pytest.mark.slow
def test_a_host_starts_all_ranks_of_a_worker_whose_replica_is_split(place: Path) -> None:
    """One node alone, as one worker. Each rank writes its own part of a checkpoint."""
    (place / "nodes.toml").write_text(NODES)
    done = subprocess.run(
        [*POTLUCK, "host", "nodes.toml", "--set", "fit.max_steps=10", "--threads", "1", "--out", "run"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0 and "Finished 10 steps" in done.stdout, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    came = [r for r in events(place / "run") if r["event"] == "worker_came"]
    assert [r["name"] for r in came] == ["host-worker-0"]
    newest = max((place / "run" / "checkpoints").glob("step-*"))
    assert len(list(newest.glob("model-*-of-00002.safetensors"))) == 2


@pytest.mark.slow
def test_workers_of_as_many_ranks_as_each_machine_gives_train_one_recipe(place: Path) -> None:
    """All take each step together; the host's worker has two ranks, and the one that joins has one."""
    (place / "split.toml").write_text(RECIPE + '[strategy]\nkind = "full_shard"\n')
    options = ["--set", "fit.max_steps=6", "--threads", "1", "--ranks", "2", "--at-least", "2", "--out", "run"]
    host = start(place, "host", "split.toml", *options)
    joined = join(place, *TEXT, invite_of(place / "run"))
    _, said = joined.communicate(timeout=90)
    out, error = host.communicate(timeout=60)
    assert host.returncode == joined.returncode == 0 and "Finished 6 steps" in out, (out, error, said)
    assert "Traceback" not in error + said
    assert sum(r["event"] == "worker_came" for r in events(place / "run")) == 2
    refused = join(place, *TEXT, "--ranks", "0", invite_of(place / "run"))
    _, said = refused.communicate(timeout=30)
    assert refused.returncode == 2 and "ranks must be at least 1, not 0" in said


SCRIPT = """
import torch
import torch.nn.functional as F
import potluck

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
x = torch.randn(4000, 4)
policy = potluck.Cadence.published(anchor=1, max_anchor=2)
fleet = potluck.init(policy=policy, strategy=potluck.HybridShard(intra_node_size=2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = fleet.prepare(model, optimizer, (x, x[:, :1]), batch_size=8)
for a, b in loader:
    fleet.backward(F.mse_loss(model(a), b), samples=len(a))
    fleet.step()
if fleet.rank == 0:
    print("ended by itself:", not fleet.stopping, fleet.link.world, flush=True)
"""


@pytest.mark.slow
def test_a_script_whose_replicas_are_split_is_joined_by_a_node(place: Path) -> None:
    (place / "own.py").write_text(SCRIPT)
    host = start(place, "host", "-n", "0", "--out", "run", "own.py")
    joined = join(place, invite_of(place / "run"), "own.py")
    out, said = joined.communicate(timeout=90)
    assert joined.returncode == 0 and "ended by itself: True 2" in out, (out, said)
    host.communicate(timeout=30)
    assert host.returncode == 0
    assert any(r["event"] == "epoch_done" and r["used"] == r["total"] == 4000 for r in events(place / "run"))


@pytest.mark.slow
def test_a_rank_killed_ends_its_node_and_no_other_and_the_line_joins_again(place: Path) -> None:
    (place / "nodes.toml").write_text(NODES)
    run = place / "run"
    host = start(place, "host", "nodes.toml", "--set", "fit.epochs=1000", "--threads", "1", "--out", "run")
    line = invite_of(run)

    def names() -> list[str]:
        return [str(r["name"]) for r in events(run) if r["event"] == "worker_came"]

    first = join(place, *TEXT, line)
    wait_until(lambda: len(names()) == 2)
    ranks = children(first.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, said = first.communicate(timeout=30)
    assert first.returncode == 137 and "ended by SIGKILL, which was rank 1 of 2, so that all of it ended" in said, said
    before = len(steps(run))
    wait_until(lambda: len(steps(run)) > before + 2)  # the host's own goes on
    second = join(place, *TEXT, line)
    wait_until(lambda: len(names()) == 3)
    wait_until(lambda: any(r["event"] == "epoch_done" for r in events(run)))
    second.send_signal(signal.SIGINT)
    _, other = second.communicate(timeout=30)
    assert second.returncode == 130 and other.count("it continues without this worker") == 1, other
    host.send_signal(signal.SIGINT)
    out, error = host.communicate(timeout=60)
    assert host.returncode == 130 and "Traceback" not in error + said + other, (out, error, said, other)
    done = steps(run)[-1]
    (place / "tiny.toml").write_text(RECIPE)  # what nodes saved goes on as a plain run of one process
    plain = ["train", "tiny.toml", "--out", "run", "--resume", "-n", "1", "--set", f"fit.max_steps={done + 2}"]
    again = subprocess.run(
        [*POTLUCK, *plain, "--set", "fit.epochs=1000"], cwd=place, capture_output=True, text=True, timeout=90
    )
    assert again.returncode == 0, again.stderr
    assert steps(run)[-2:] == [done + 1, done + 2]
    assert all(r["used"] == r["total"] for r in events(run) if r["event"] == "epoch_done")


@pytest.mark.slow
def test_a_host_with_a_given_identity_is_joined_by_an_invite_that_is_older_than_it_and_says_it_nowhere(
    place: Path, expected: dict[str, torch.Tensor]
) -> None:
    """And started again by the same command, as a cluster would, it resumes what it led."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = run_command(place, "invite", "--address", "127.0.0.1", "--port", str(port), "--out", "made")
    line = (place / "made" / "invite").read_text().strip()
    secret, _ = line.rsplit("/", 1)[1].split(".")
    led = ("host", "tiny.toml", "-n", "0", "--identity", "made", "--out", "here", "--or-resume", *SETTINGS)
    worker = join(place, *TEXT, "made/invite")  # before there is a host
    host = start(place, *led)
    wait_until(lambda: len(steps(place / "here")) >= 8)
    host.kill()
    before, _ = host.communicate()
    out, error = start(place, *led).communicate(timeout=90)
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0 and "Finished 60 steps" in out, out + error + said
    assert_same(weights(place / "here"), expected)
    assert f"127.0.0.1:{port}/..." in out and secret not in made + before + out + error + said
    assert not (place / "here" / "identity").exists()


def run_command(place: Path, *arguments: str) -> str:
    done = subprocess.run([*POTLUCK, *arguments], cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


class UnreadOutput:
    """What a host prints, to a pipe that is full: as with Ctrl-S, or `potluck host | less`."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self._read, self._write = os.pipe()
        fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, 4096)
        command = [*POTLUCK, "host", "tiny.toml", *arguments]
        self.host = subprocess.Popen(command, cwd=place, stdout=self._write, stderr=subprocess.STDOUT)
        wait_until((place / "runs" / "tiny" / "now.json").exists)  # all that comes before the first worker is printed
        self.text = os.read(self._read, 4096)
        os.set_blocking(self._write, False)
        for piece in (b"x" * 4096, b"x"):
            try:
                while True:
                    os.write(self._write, piece)
            except BlockingIOError:
                pass
        os.set_blocking(self._write, True)

    def __enter__(self) -> "UnreadOutput":
        return self

    def __exit__(self, *_: object) -> None:
        self.host.kill()
        self.host.wait()

    def read_all(self) -> str:
        os.close(self._write)
        while piece := os.read(self._read, 65536):
            self.text += piece
        os.close(self._read)
        return self.text.decode()


def test_steps_continue_while_nobody_reads_what_the_host_prints(place: Path, expected: dict[str, torch.Tensor]) -> None:
    run = place / "runs" / "tiny"
    with UnreadOutput(place, "-n", "0", *SETTINGS) as unread, join(place, *TEXT, invite_of(run)) as worker:
        wait_until(lambda: any(r["event"] == "run_ended" for r in events(run)), 90)
        out = unread.read_all()
        assert unread.host.wait(30) == 0 and worker.wait(30) == 0
    assert steps(run) == list(range(1, 61))
    assert "joined (" in out and "Finished 60 steps" in out  # all of it, once somebody reads again
    assert_same(weights(run), expected)


@pytest.mark.slow
def test_a_minute_in_which_nobody_reads_makes_no_step_late_and_the_host_ends_all_the_same(place: Path) -> None:
    many = ("--set", "fit.epochs=100000", "--set", "workers.threads=1")
    run = place / "runs" / "tiny"
    with UnreadOutput(place, "-n", "0", *many) as unread, join(place, *TEXT, invite_of(run)) as worker:
        wait_until(lambda: len(steps(run)) > 1, 90)
        time.sleep(60)
        unread.host.send_signal(signal.SIGINT)
        assert unread.host.wait(90) == 130 and worker.wait(30) == 130  # nobody has read a word of it
        at = [float(str(record["time"])) for record in events(run) if record["event"] == "step_done"]
        assert max(later - earlier for earlier, later in pairwise(at)) < 10, "of 30 s patience"
        assert [record["event"] for record in events(run)].count("run_ended") == 1
        assert "Stopped after step" not in unread.read_all()
