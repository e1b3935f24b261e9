"""A run that is tracked, as a person would: the commands, a restart, and what TensorBoard then shows."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from potluck.events import read_events
from tests.cli.test_cli import POTLUCK, children, place, run, start, steps, wait_until  # noqa: F401

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SHORT = ("--set", "fit.max_steps=60", "--set", "workers.threads=1")


def curves(folder: Path) -> dict[str, list[int]]:
    """The steps of each."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [entry.step for entry in found.Scalars(name)] for name in found.Tags()["scalars"]}


def told(folder: Path) -> int:
    """Counts how often the run has said where its curves are."""
    noticed = [r["sentence"] for r in read_events(folder / "events.jsonl") if r["event"] == "noticed"]
    return sum("tensorboard --logdir" in sentence for sentence in noticed)


def test_under_a_host_the_host_alone_reports_and_after_a_kill_it_goes_on(place: Path) -> None:  # noqa: F811
    host = start(place, "host", "tiny.toml", "--track", "tensorboard", "--out", "here", "-n", "2", *SHORT)
    # Both, since a tracker takes seconds to start, and a fast run may have done its twelve steps before that.
    wait_until(lambda: len(steps(place / "here")) >= 12 and told(place / "here") == 1)
    below = children(host.pid)
    tracking = [pid for pid in below if b"potluck.trackers" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    workers = [pid for pid in below if pid not in tracking]
    assert len(tracking) == 1 and len(workers) == 2
    assert not any(b"trackers" in Path(f"/proc/{c}/cmdline").read_bytes() for pid in workers for c in children(pid))
    os.kill(host.pid, signal.SIGKILL)
    host.communicate()
    wait_until(lambda: not Path(f"/proc/{tracking[0]}").exists())  # it hears that, and ends by itself
    again = run(place, "host", "here/run.toml", "--out", "here", "--resume", timeout_s=140)
    assert again.returncode == 0, again.stderr
    assert "tensorboard: see the curves with tensorboard --logdir here/tensorboard" in again.stderr
    found = curves(place / "here")
    assert found["train/loss"] == list(range(1, 61)), "each step once, whatever was done again"
    assert found["validation/loss"] == [20, 40, 60]
    assert "workers/host-worker-0/busy_s" in found and "checkpoint/bytes" in found
    assert told(place / "here") == 2


def test_a_run_that_is_resumed_is_the_same_run_for_its_tracker(place: Path) -> None:  # noqa: F811
    first = run(
        place, "train", "tiny.toml", "--track", "tensorboard", "-n", "1", "--set", "fit.max_steps=30", timeout_s=140
    )
    assert first.returncode == 0, first.stderr
    more = ("--out", "runs/tiny", "--resume", "--set", "fit.max_steps=60")
    second = run(place, "train", "runs/tiny/run.toml", *more, timeout_s=140)
    assert second.returncode == 0, second.stderr
    assert curves(place / "runs" / "tiny")["train/loss"] == list(range(1, 61))


def test_what_is_not_installed_or_not_known_is_refused_at_once(place: Path) -> None:  # noqa: F811
    refused = run(place, "train", "tiny.toml", "--track", "wanb")
    assert refused.returncode == 2 and "track takes 'tensorboard', 'wandb'" in refused.stderr
    refused = run(place, "host", "tiny.toml", "--set", 'fit.track="wandb"')
    assert refused.returncode == 2 and "fit.track is a list of trackers" in refused.stderr
    assert not (place / "runs").exists()


SCRIPT = """
import torch, potluck
from torch import nn
from potluck.events import Event, StepDone, Validated

fleet = potluck.init(potluck.Sync())
fleet.track("tensorboard", folder="mine")
heard = []
fleet.on(StepDone, heard.append)
torch.manual_seed(0)
model = nn.Linear(2, 1)
data = torch.randn(64, 2), torch.randn(64, 1)
model, optimizer, loader = fleet.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=8)
for epoch in fleet.epochs(2):
    for x, y in loader:
        fleet.backward(nn.functional.mse_loss(model(x), y), samples=len(x))
        fleet.step()
    fleet.events.emit(Validated(step=fleet.step_number, loss=None, metrics={"epoch": torch.tensor(float(epoch))}))
is_all = [event.step for event in heard] == list(range(1, 17))
print(f"heard {is_all} {heard[-1].workers}", flush=True)
fleet.close()
"""


def test_a_loop_of_ones_own_is_tracked_by_rank_0_and_heard_on_every_rank(place: Path) -> None:  # noqa: F811
    (place / "loop.py").write_text(SCRIPT)
    done = run(place, "run", "-n", "2", "loop.py")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr  # of the first, and of the others
    assert said.count("heard True (WorkerStep(rank=0,") == 2, said
    found = curves(place / "mine")
    assert found["train/loss"] == list(range(1, 17)) and found["validation/epoch"] == [8, 16]


def test_under_a_host_a_joiner_hears_its_own_view_and_reports_nothing(place: Path) -> None:  # noqa: F811
    (place / "loop.py").write_text(SCRIPT)
    host = subprocess.run(
        [*POTLUCK, "host", "-n", "2", "--at-least", "2", "--out", "here", "--track", "tensorboard", "loop.py"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert host.returncode == 0, host.stderr
    said = host.stdout + host.stderr
    assert said.count("heard True (WorkerStep(") == 2, said
    assert not (place / "mine").exists()
    assert curves(place / "here")["train/loss"] == list(range(1, 17))
