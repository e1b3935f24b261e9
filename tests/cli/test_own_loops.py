"""A loop of one's own, led by a host: Ctrl-C, --resume and joiners as a person meets them."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from potluck.events import read_events
from potluck.page.fold import Fold
from potluck.page.view import head_of
from potluck.save.checkpoint_folder import best_of, found
from potluck.show.output import read_output
from potluck.words import duration
from tests.cli.test_cli import children, is_alive, run, start, steps, wait_until
from tests.cli.test_host import assert_same, events, invite_of, join, weights
from tests.quick import first_of

pytestmark = pytest.mark.timeout(150)

SCRIPT = """
import sys, time
import torch
import torch.nn.functional as F
import potluck

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
x = torch.randn(200, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
fleet = potluck.init("sync")
model, optimizer, loader = fleet.prepare(model, optimizer, (x, x[:, :1]), batch_size=20, scheduler=scheduler)
fleet.after_step.append(lambda: fleet.state.update(seen=fleet.step_number))
if "--folder" in sys.argv:
    fleet.load("mine")
for epoch in EPOCHS:
    for a, b in loader:
        fleet.backward(F.mse_loss(model(a), b), samples=len(a))
        fleet.step()
        time.sleep(PAUSE)
        if fleet.step_number > 3:
            open("going", "w").close()
print("trained", fleet.step_number, fleet.state["seen"], scheduler.last_epoch, flush=True)
"""


def script(place: Path, *, pause: float = 0.05, epochs: str = "fleet.epochs(6)") -> Path:
    path = place / "own.py"
    path.write_text(SCRIPT.replace("PAUSE", str(pause)).replace("EPOCHS", epochs))
    return path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nobody disturbed."""
    place = tmp_path_factory.mktemp("alone")
    script(place, pause=0.0)
    done = run(place, "host", "--threads", "1", "own.py")
    assert done.returncode == 0 and "Finished 60 steps" in done.stdout and "Saved in" in done.stdout, done
    return weights(place / "runs" / "own")


def started(folder: Path) -> list[dict[str, Any]]:
    return [r for r in read_events(folder / "events.jsonl") if r["event"] == "run_started"]


@pytest.mark.slow
def test_ctrl_c_on_the_host_saves_and_resume_continues_at_the_step_it_names(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    script(tmp_path)
    folder = tmp_path / "runs" / "own"
    host = start(tmp_path, "host", "--threads", "1", "own.py")
    wait_until(lambda: len(steps(folder)) >= 4)
    host.send_signal(signal.SIGINT)
    out, error = host.communicate(timeout=60)
    assert host.returncode == 130 and "Traceback" not in error, error
    told = re.search(r"Stopped after step (\d+)\. Saved in \S+step-0*(\d+)\. Continue with: potluck (.+)", error)
    assert told and told[1] == told[2], error
    assert re.search(r"step \d+/60, loss", out), "the length of the whole run is known"
    script(tmp_path, pause=0.0)
    again = run(tmp_path, *told[3].split())
    assert again.returncode == 0 and "Finished 60 steps" in again.stdout, (again.stdout, again.stderr)
    assert f"from step {told[1]}." in again.stdout and "trained 60 60 60" in again.stdout
    assert [r["from_step"] for r in started(folder)] == [0, int(told[1])]
    assert steps(folder) == list(range(1, 61)), "no step is lost and none is repeated"
    assert_same(weights(folder), expected)


@pytest.mark.slow
def test_a_joiner_with_a_script_sees_the_run_and_leaves_politely(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    script(tmp_path)
    folder = tmp_path / "run"
    host = start(tmp_path, "host", "-n", "0", "--out", "run", "own.py")
    first = join(tmp_path, invite_of(folder), "own.py")
    wait_until(lambda: len(steps(folder)) >= 12)  # in the second epoch
    second = join(tmp_path, invite_of(folder), "own.py")
    wait_until(lambda: sum(r["event"] == "worker_came" for r in events(folder)) == 2)
    first.send_signal(signal.SIGINT)
    out, said = first.communicate(timeout=60)
    assert first.returncode == 130 and "Left the run after step" in said and "Traceback" not in said, said
    assert "Training" in out and "/60, loss" in out, out
    others, _ = second.communicate(timeout=60)
    _, error = host.communicate(timeout=60)
    assert second.returncode == 0 and host.returncode == 0, (others, error)
    assert "trained 60 60 60" in others and steps(folder)[-1] == 60
    went = [r for r in events(folder) if r["event"] == "worker_went"]
    assert went[0]["polite"] is True
    assert_same(weights(folder), expected)


def test_a_joiner_needs_nothing_that_only_unix_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this can be seen here: what Windows lacks is taken away from the joiner and from what it starts."""
    script(tmp_path, pause=0.0)
    folder = tmp_path / "run"
    host = start(tmp_path, "host", "-n", "0", "--out", "run", "own.py")
    invite = invite_of(folder)
    path = [str(Path(__file__).parent / "no_unix"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("USERNAME", "somebody")  # Windows has it, and torch asks for it there
    joiner = join(tmp_path, invite, "own.py")
    out, said = joiner.communicate(timeout=60)
    if joiner.returncode:
        host.kill()
    _, error = host.communicate(timeout=60)
    assert joiner.returncode == 0 and "trained 60 60 60" in out, (out, said, error)
    assert said.count("no Unix") >= 2 and "Traceback" not in said, "the command and its worker"
    assert steps(folder) == list(range(1, 61))


@pytest.mark.slow
def test_what_a_resume_has_lost_is_said(tmp_path: Path) -> None:
    """The host and all of its workers were killed before there was a checkpoint."""
    script(tmp_path)
    folder = tmp_path / "run"
    host = start(tmp_path, "host", "--out", "run", "--threads", "1", "own.py")
    wait_until(lambda: len(steps(folder)) >= 3)
    workers = children(host.pid)
    host.kill()
    host.communicate()
    wait_until(lambda: not any(map(is_alive, workers)))
    done = steps(folder)[-1]
    script(tmp_path, pause=0.0)
    again = run(tmp_path, "host", "--out", "run", "--threads", "1", "--resume", "--patience", "1", "own.py")
    assert again.returncode == 0, again.stderr
    lost = re.search(r"Nobody has the weights of step (\d+) any more\. The run continues from the start", again.stdout)
    assert lost and int(lost[1]) >= done, again.stdout
    assert [r["from_step"] for r in started(folder)] == [0, 0] and "trained 60 60 60" in again.stdout


@pytest.mark.slow
def test_a_loop_that_counts_itself_shows_no_total(tmp_path: Path) -> None:
    script(tmp_path, pause=0.0, epochs="range(2)")
    done = run(tmp_path, "host", "--threads", "1", "own.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"step \d+, loss", done.stdout) and not re.search(r"step \d+/", done.stdout)
    assert started(tmp_path / "runs" / "own")[0]["steps_total"] == 0


@pytest.mark.slow
def test_ctrl_c_under_run_saves_where_load_looked_and_the_rest_is_trained(tmp_path: Path) -> None:
    script(tmp_path)
    process = start(tmp_path, "run", "-n", "2", "own.py", "--folder")
    wait_until((tmp_path / "going").exists)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error, error
    told = re.search(r"Stopped after step (\d+)\. Saved in mine", error)
    assert told and int(told[1]) < 60, error
    script(tmp_path, pause=0.0)
    again = run(tmp_path, "run", "-n", "2", "own.py", "--folder")
    assert again.returncode == 0 and again.stdout.count("trained 60 60 60") == 1, (again.stdout, again.stderr)


ON_RANK_0 = """
import torch
import potluck

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x = torch.randn(200, 4)
fleet = potluck.init("sync")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = fleet.prepare(model, optimizer, (x, x[:, :1]), batch_size=20)
for epoch in fleet.epochs(1):
    for a, b in loader:
        fleet.backward(torch.nn.functional.mse_loss(model(a), b), samples=len(a))
        fleet.step()
        if fleet.step_number == 3 and fleet.rank == 0:
            open("stuck", "w").close()
            fleet.save("mine")
"""


@pytest.mark.slow
def test_one_sigterm_ends_a_group_of_which_one_saves_alone_and_says_who_is_missing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ON_RANK_0)
    running = start(tmp_path, "run", "-n", "2", "own.py")
    wait_until((tmp_path / "stuck").exists)
    running.send_signal(signal.SIGTERM)
    out, error = running.communicate(timeout=60)
    said = f"{out or ''}{error or ''}"
    assert running.returncode == 2 and "Traceback" not in said, said
    assert "fleet.save() was called on worker 0 after step 3 (own.py, line 17), and not on worker 1" in said, said


ENDS = """
import argparse, sys, time
import torch
import torch.nn.functional as F
import potluck

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--way", default="break")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x = torch.randn(40, 4)
fleet = potluck.init("sync")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = fleet.prepare(model, optimizer, (x, x[:, :1]), batch_size=20)
for epoch in fleet.epochs(args.epochs):
    for a, b in loader:
        fleet.backward(F.mse_loss(model(a), b), samples=len(a))
        fleet.step()
        time.sleep(0.02 if args.way == "slowly" else 0.0)
    print(f"epoch {epoch} of {args.epochs}", flush=True)
    print("\\r 10%", "\\r 50%", end="", file=sys.stderr, flush=True)
    print("\\r100%", file=sys.stderr)
    fleet.keep_best(1.0 - epoch if args.way == "better" else 1.0 + epoch)
    if args.way == "break" and epoch == 2:
        break
    if args.way == "finish" and epoch == 2 and fleet.is_main:
        fleet.finish()
    if args.way == "stop" and epoch == 2 and fleet.is_main:
        fleet.request_stop()
    if args.way == "early" and fleet.early_stop(1.0 + epoch, patience=2):
        break
    if args.way == "crash" and epoch == 2:
        raise SystemExit(3)
print("after the loop", fleet.step_number)
if args.way in ("break", "finish", "early"):
    print("looked", fleet.evaluate(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), (x, x[:, :1]), 10))
"""


def test_the_last_epoch_of_a_script_is_kept_as_its_best_though_it_was_kept_before_its_value_was_told(
    tmp_path: Path,
) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    order = ["host", "-n", "2", "--at-least", "2", "--threads", "1", "ends.py", "--epochs", "3", "--way", "better"]
    done, folder = run(tmp_path, *order), tmp_path / "runs" / "ends"
    assert done.returncode == 0 and "Finished 6 steps" in done.stdout, (done.stdout, done.stderr)
    best = best_of(found(folder / "checkpoints"))
    assert best is not None and best.name.startswith("step-00000006")
    kept = load_file(folder / "best.safetensors")
    assert torch.equal(kept["weight"], load_file(best / "model.safetensors")["weight"])


@pytest.mark.parametrize("way", first_of(["early", "break", "finish"]))
def test_a_script_ends_the_run_for_all_with_what_follows_its_loop_and_status_0(way: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    order = ["host", "-n", "2", "--at-least", "2", "--threads", "1", "ends.py", "--epochs", "50", "--way", way]
    done = run(tmp_path, *order)
    folder = tmp_path / "runs" / "ends"
    assert done.returncode == 0 and "Finished " in done.stdout, (done.stdout, done.stderr)
    after = re.findall(r"^\[(host-worker-\d)\] after the loop (\d+)$", done.stdout, re.M)
    assert sorted(worker for worker, _ in after) == ["host-worker-0", "host-worker-1"], done.stdout
    assert 6 <= steps(folder)[-1] <= 8 and {int(step) for _, step in after} <= {6, 7, 8}
    figures = re.findall(r"^\[host-worker-\d\] looked (\d\.\d+)$", done.stdout, re.M)
    assert len(figures) == 2 and float(figures[0]) == pytest.approx(float(figures[1])), (done.stdout, done.stderr)
    plain = torch.nn.Linear(4, 1)
    plain.load_state_dict(load_file(folder / "best.safetensors"))
    best = best_of(found(folder / "checkpoints"))
    assert best is not None and torch.equal(plain.weight, load_file(best / "model.safetensors")["weight"])
    assert [r["reason"] for r in events(folder) if r["event"] == "run_ended"] == ["finished"]
    assert "SCRIPT" not in done.stdout and f"ends.py --epochs 50 --way {way}" in done.stdout
    kept = [(line.worker, line.text) for line in read_output(folder)]
    for worker in ("host-worker-0", "host-worker-1"):
        assert (worker, "epoch 1 of 50") in kept and (worker, "100%") in kept and (worker, " 50%") not in kept
    assert "[host-worker-0] 100%" in done.stderr and "50%" not in done.stderr, "a bar's drafts are no lines"


def test_a_script_stops_the_run_for_all_to_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    order = ["host", "-n", "2", "--at-least", "2", "--threads", "1", "ends.py", "--epochs", "5", "--way"]
    stopped = run(tmp_path, *order, "stop")
    told = re.search(r"Stopped after step (\d+)\..* Continue with: potluck (.+)", stopped.stderr)
    assert stopped.returncode == 130 and told and 6 <= int(told[1]) <= 8, (stopped.stdout, stopped.stderr)
    options = "--workers 2 --threads 1"
    assert told[2] == f"host {options} --out runs/ends --resume ends.py --epochs 5 --way stop"
    assert "after the loop" not in stopped.stdout
    again = run(tmp_path, *told[2].replace("stop", "none").split())
    assert again.returncode == 0 and "after the loop 10" in again.stdout, (again.stdout, again.stderr)


def test_a_worker_that_crashes_ends_the_run_for_nobody_and_the_host_says_what_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    folder = tmp_path / "runs" / "ends"
    host = start(tmp_path, "host", "--threads", "1", "--patience", "10", "ends.py", "--epochs", "4", "--way", "crash")
    wait_until(lambda: any("No worker is left" in r.get("sentence", "") for r in events(folder)))
    joiner = join(tmp_path, str(folder / "invite"), "ends.py", "--epochs", "4")
    out, said = joiner.communicate(timeout=60)
    _, error = host.communicate(timeout=60)
    assert joiner.returncode == 0 and host.returncode == 0, (out, said, error)
    assert (
        "for as long as it takes, until one joins: potluck join" in error
        and "Ctrl-C ends it, with what is saved by now." in error
    )


NEVER = """
import time
print("on my own", flush=True)
time.sleep(600)
"""


def test_a_script_that_never_joins_does_not_keep_the_host_that_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text(NEVER)
    host = start(tmp_path, "host", "--threads", "1", "never.py")
    wait_until(lambda: "on my own" in [line.text for line in read_output(tmp_path / "runs" / "never")])
    host.send_signal(signal.SIGINT)
    out, error = host.communicate(timeout=20)  # the script would take ten minutes, and its host waited 25 s for it
    assert host.returncode == 130 and "Stopped after step 0. Nothing was saved." in out + error, (out, error)


def test_a_joiner_without_arguments_runs_the_script_with_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    host = start(tmp_path, "host", "-n", "0", "--out", "run", "ends.py", "--epochs", "2", "--way", "none")
    joiner = join(tmp_path, invite_of(tmp_path / "run"), "ends.py")
    out, said = joiner.communicate(timeout=60)
    host.communicate(timeout=60)
    assert joiner.returncode == 0 and "epoch 1 of 2" in out and "after the loop 4" in out, (out, said)
    assert "Running ends.py --epochs 2 --way none, with the host's arguments" in said


FIGURES = """
import time
import torch
import torch.nn.functional as F
import potluck

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
x = torch.randn(60, 4)
fleet = potluck.init("sync")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = fleet.prepare(model, optimizer, (x, x[:, :1]), batch_size=20)
for epoch in fleet.epochs(8):
    total = rows = 0
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        fleet.backward(loss, samples=len(a))
        fleet.step()
        total, rows = total + loss.item() * len(a), rows + len(a)
        time.sleep(0.03)
    train = fleet.mean(total / max(1, rows), weight=rows)
    valid = fleet.evaluate(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), (x, x[:, :1]), 10)
    print(f"epoch {epoch}: train {train:.4f}, valid {valid:.4f}", flush=True)
"""


def test_a_joiner_that_leaves_shows_no_figures_that_are_not_the_runs(tmp_path: Path) -> None:
    (tmp_path / "figures.py").write_text(FIGURES)
    folder = tmp_path / "runs" / "figures"
    host = start(tmp_path, "host", "--threads", "1", "--at-least", "2", "figures.py")
    joiner = join(tmp_path, str(wait_for_invite(folder)), "figures.py")
    wait_until(lambda: len(steps(folder)) >= 7)
    joiner.send_signal(signal.SIGINT)
    out, said = joiner.communicate(timeout=60)
    assert joiner.returncode == 130 and "Left the run after step" in said and "Traceback" not in said, (out, said)
    host_out, error = host.communicate(timeout=60)
    assert host.returncode == 0 and "nan" not in out + said + host_out, (out, said, host_out, error)


def wait_for_invite(folder: Path) -> Path:
    wait_until((folder / "invite").exists)
    return folder / "invite"


def test_page_terminal_and_events_of_one_run_have_the_same_figures(tmp_path: Path) -> None:
    """The last figures of each, and those that a person compares: steps, loss, rows, seconds, parameters, epochs."""
    (tmp_path / "ends.py").write_text(ENDS)
    # Slowly, since a record has its time in milliseconds.
    done = run(tmp_path, "host", "--threads", "1", "ends.py", "--epochs", "6", "--way", "slowly")
    folder = tmp_path / "runs" / "ends"
    records = events(folder)
    fold = Fold()
    paces = {}
    for record in records:
        fold.take(record)
        if record["event"] == "step_done":
            paces[record["step"]] = fold.rate, (fold.left_s() or (0.0,))[0]
    line = r"^step (\d+)/12, loss .*?, ([\d,]+) rows/s, (.+?) left"
    lines = re.findall(line, done.stdout, re.M)
    assert lines and int(lines[-1][0]) == 12
    for at, speed, left in lines:  # the page's, as of the same step
        rate, left_s = paces[int(at)]
        assert int(speed.replace(",", "")) == pytest.approx(rate, rel=0.01, abs=1)
        assert left in {duration(left_s + error) for error in (-0.05, 0.0, 0.05)}
    head, (began,), (ended,) = head_of(fold, {}), started(folder), [r for r in records if r["event"] == "run_ended"]
    last = [r for r in records if r["event"] == "step_done"][-1]
    told = re.search(r"Finished (\d+) steps in (.+), loss (\S+)\. Saved in \S+step-0*(\d+)\.", done.stdout)
    assert told is not None, done.stdout
    assert int(told[1]) == int(told[4]) == head["step"] == ended["step"] == last["step"] == head["total"] == 12
    assert told[2] == duration(ended["seconds"])
    assert told[3] == f"{ended['loss']:.4f}" == f"{last['loss']:.4f}" == f"{head['loss']:.4f}"
    assert head["rows"] == last["rows_seen"] == ended["rows_seen"] == 240
    assert 0 < head["trained_s"] <= ended["seconds"]
    shown = re.search(r"Training (\d+) parameters on (\d+) worker .*: (\d+) steps of (\d+) rows", done.stdout)
    assert shown is not None, done.stdout
    figures = began["parameters"], began["workers"], began["steps_total"], began["batch_size"]
    assert tuple(map(int, shown.groups())) == figures == (5, 1, 12, 20)
    proofs = [r["sentence"] for r in records if r["event"] == "epoch_done"]
    assert len(proofs) == 6 == head["epochs"][0] == head["epochs"][1] and all(each in done.stdout for each in proofs)
    assert head["left"] is None and head["ended"]["step"] == 12


@pytest.mark.parametrize(
    ("text", "workers", "ended"),
    [
        ("x = 3", 1, "The worker on this machine has ended without joining: the script came to its end and never"),
        ("import potlukc", 2, "Both workers on this machine have ended without joining (exit code 1), and"),
        ("x = (3]", 1, "The worker on this machine has ended without joining (exit code 1), and"),
    ],
)
def test_a_host_whose_workers_have_all_ended_without_joining_says_so_and_waits_for_others(
    text: str, workers: int, ended: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(text)
    host = start(tmp_path, "host", "-n", str(workers), "--threads", "1", "--page", "off", "own.py")
    said = host.stderr
    assert said is not None
    lines = []
    while "Ctrl-C ends it." not in (line := said.readline()):
        assert line, lines
        lines.append(line)
    assert line.startswith(f"potluck: {ended}")
    assert "until one joins: potluck join runs/own/invite own.py. Ctrl-C ends it." in line
    assert sum("x = (3]" in each for each in lines) == (text == "x = (3]"), "a traceback is shown once"
    host.send_signal(signal.SIGINT)
    _, error = host.communicate(timeout=60)
    assert host.returncode == 130 and "Stopped after step 0" in error, error


LATE = """
import os, threading, time
if os.environ["POTLUCK_NAME"] == "host-worker-1" and "unheard" == WHEN:
    threading.Event().wait()
import torch, potluck
fleet = potluck.init("sync")
if os.environ["POTLUCK_NAME"] == "host-worker-1":
    open("in", "w").close()
    threading.Event().wait()
while "greeted" == WHEN and not os.path.exists("in"):
    time.sleep(0.01)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = fleet.prepare(model, optimizer, (torch.ones(8, 4), torch.ones(8, 1)), batch_size=4)
for epoch in fleet.epochs(1):
    for a, b in loader:
        fleet.backward((model(a) - b).square().mean(), samples=len(a))
        fleet.step()
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["unheard", "greeted"])
def test_a_run_that_ends_waits_for_no_worker_of_its_own_that_comes_too_late(when: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LATE.replace("WHEN", f'"{when}"'))
    done = run(tmp_path, "host", "-n", "2", "--threads", "1", "--page", "off", "own.py")
    assert done.returncode == 0 and "Finished 2 steps" in done.stdout and "trained" in done.stdout, done
    assert "what follows their loops" not in done.stderr and "has not gone" not in done.stdout + done.stderr, done
    went = {r["name"]: r["reason"] for r in events(tmp_path / "runs" / "own") if r["event"] == "worker_went"}
    late = {"host-worker-1": "the run was over before it had built its model"} if when == "greeted" else {}
    assert went == {"host-worker-0": "finished"} | late
