"""Runs that an older Potluck left in the middle: checkpoints of groups, and folders of hosts that were killed.

`python -m tests.parity.old_runs --write COMMIT`, in a tree of that commit, makes some, resumes each from a copy, and
writes both as tests/vectors/runs-COMMIT.tar.xz: the folders, and in numbers.json the losses of the resumed steps.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from potluck import Cadence, Sync
from potluck.events import StepDone, read_events
from tests import ranks
from tests.cli import test_cli
from tests.fleet import fleet as fleets
from tests.parity import bits

VECTORS = Path(__file__).parents[1] / "vectors"
NUMBERS = "numbers.json"
GROUPS = {case.name: case for case in bits.CASES if case.stop_at is not None}
HOSTS: dict[str, Any] = {"a host, sync": Sync(), "a host, cadence": Cadence(anchor=1, max_anchor=1, together=0.0)}
COMMANDS = {"potluck host, sync": "sync", "potluck host, cadence": "cadence"}
KINDS = [*GROUPS, *HOSTS, *COMMANDS]
STOP_AT = 6


def begin(name: str, folder: Path) -> None:
    """Trains some steps, and is stopped (a group) or killed (a host)."""
    if name in GROUPS:
        ranks.run_ranks(GROUPS[name].world, bits.train, GROUPS[name], str(folder), False)
        shutil.rmtree(folder / "end")
    elif name in HOSTS:
        _kill_host(folder, HOSTS[name])
    else:
        _kill_command(folder, COMMANDS[name])


def resume(name: str, folder: Path) -> list[float]:
    """The losses of all steps or windows until the run's end."""
    if name in GROUPS:
        case = GROUPS[name]
        found: list[float] = ranks.run_ranks(case.world_after or case.world, bits.train, case, str(folder), True)[0]
        return found
    return _resume_host(folder, HOSTS[name]) if name in HOSTS else _resume_command(folder)


# A host in a process of the test, with a journal and checkpoints


def train(engine: Any) -> Any:
    """What the last worker heard is in losses.json."""
    model, optimizer, data = fleets.build()
    model, _, loader = engine.prepare(model, optimizer, data, batch_size=fleets.BATCH, seed=1)
    losses: list[float] = []
    engine.on(StepDone, lambda event: losses.append(event.loss))
    for _ in engine.epochs(fleets.EPOCHS):
        for x, y in loader:
            engine.backward(F.cross_entropy(model(x), y), samples=len(x))
            engine.step()
    Path(os.environ["POTLUCK_TEST_LOSSES"]).write_text(json.dumps(losses))
    return model


def _options(folder: Path, policy: Any) -> dict[str, Any]:
    return {"job": train, "policy": policy, "group": {"POTLUCK_TEST_LOSSES": str(folder / "losses.json")}}


def _kill_host(folder: Path, policy: Any) -> None:
    host, invite = fleets.start_coordinator(folder, at_least=2)
    # A window may end at any step: only under Sync does a checkpoint lie some steps back.
    save_every, least = (4, STOP_AT) if policy.steps_together else (1, 3)
    options = _options(folder, policy) | {"save_every": save_every, "slow_s": 0.05}
    workers = [fleets.Worker(invite, folder, f"w{number}", None, options) for number in range(2)]
    fleets.wait_until(lambda: fleets.step_of(folder) >= least and any((folder / "checkpoints").glob("step-*")))
    for process in (host, *(worker.process for worker in workers)):
        process.kill()
        process.join()
    for path in [path for path in folder.iterdir() if path.name not in ("checkpoints", *_journal_files())]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _journal_files() -> list[str]:
    return [f"journal.sqlite{part}" for part in ("", "-wal", "-shm")]


def _resume_host(folder: Path, policy: Any) -> list[float]:
    fleet = fleets.Fleet(folder, patience_s=4)  # for as long it waits for the two that it knew
    fleet.add("again", **_options(folder, policy))
    fleet.finish()
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


# The command, with all that it writes into a run's folder


def _kill_command(folder: Path, policy: str) -> None:
    window = "\nanchor = 1\nmax_anchor = 1" if policy == "cadence" else ""
    recipe = test_cli.RECIPE.replace('kind = "sync"\nbalance = false', f'kind = "{policy}"{window}').replace("16", "8")
    (folder / "tiny.toml").write_text(recipe)
    (folder / "text").write_text("".join(f"word{i % 97} and{i % 13}\n" for i in range(300)))
    sizes = (
        "--set",
        "fit.max_steps=24",
        "--set",
        "fit.checkpoint.every=4",
        "--set",
        "workers.threads=1",
        "--out",
        "run",
        "-n",
        "2",
        "--at-least",
        "2",
    )
    host = subprocess.Popen(
        [*test_cli.POTLUCK, "host", "tiny.toml", *sizes],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    saved = folder / "run" / "checkpoints"
    test_cli.wait_until(lambda: any(saved.glob("step-*")) and max(test_cli.steps(folder / "run")) >= STOP_AT)
    os.killpg(host.pid, signal.SIGKILL)
    host.wait()
    shutil.rmtree(folder / "run" / "identity")
    for name in ("invite", "page.json"):
        (folder / "run" / name).unlink(missing_ok=True)


def _resume_command(folder: Path) -> list[float]:
    known = len(list(read_events(folder / "run" / "events.jsonl")))
    done = test_cli.run(folder, "host", "run/run.toml", "--out", "run", "--resume", "-n", "1", "--threads", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    records = list(read_events(folder / "run" / "events.jsonl"))[known:]
    assert records[-1]["event"] == "run_ended", records[-1]
    return [record["loss"] for record in records if record["event"] == "step_done"]


def archives() -> list[Path]:
    return sorted(VECTORS.glob("runs-*.tar.xz"))


def numbers_in(archive: Path) -> dict[str, list[float]]:
    with tarfile.open(archive) as tar:
        file = tar.extractfile(NUMBERS)
        assert file is not None
        numbers: dict[str, list[float]] = json.loads(file.read())
        return numbers


def extract(archive: Path, name: str, folder: Path) -> None:
    """The folder of one run."""
    with tarfile.open(archive) as tar:
        own = [member for member in tar.getmembers() if member.name.startswith(f"{name}/")]
        assert own, f"{archive.name} has no run {name!r}"
        for member in own:
            member.name = member.name.removeprefix(f"{name}/")
        tar.extractall(folder, own, filter="data")


def write(commit: str, names: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="potluck-old-") as made:
        numbers = {}
        for name in names or KINDS:
            kept, copy = Path(made) / "kept" / name, Path(made) / "copies" / name
            kept.mkdir(parents=True)
            begin(name, kept)
            shutil.copytree(kept, copy)
            numbers[name] = resume(name, copy)
            print(f"{name}: {len(numbers[name])} losses, {sum(p.stat().st_size for p in kept.rglob('*.*'))} bytes")
        (Path(made) / "kept" / NUMBERS).write_text(json.dumps(numbers))
        with tarfile.open(VECTORS / f"runs-{commit}.tar.xz", "w:xz", preset=9) as tar:
            tar.add(Path(made) / "kept", arcname="", filter=_of_nobody)


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", metavar="COMMIT", required=True)
    parser.add_argument("names", nargs="*", help="only these runs")
    asked = parser.parse_args()
    write(asked.write, asked.names)


if __name__ == "__main__":
    from tests.parity import old_runs  # the ranks find functions by this name

    sys.exit(old_runs.main())
