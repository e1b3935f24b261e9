"""As a person would: the installed command, real processes, what they print and how they exit."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from potluck import cli
from potluck.events import read_events
from potluck.train.model import GPT, ModelConfig

ROOT = Path(__file__).parents[2]
POTLUCK = [sys.executable, "-m", "potluck.cli"]
RECIPE = """
name = "tiny"
[model]
dim = 16
layers = 2
heads = 2
context = 16
[data]
paths = ["text"]
validation = 0.1
[batch]
size = 8
[policy]
kind = "sync"
balance = false
[optimizer]
lr = 1e-2
[step]
clip = 1.0
[fit]
validate_every = 20
[fit.schedule]
[fit.checkpoint]
every = 5
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a recipe and a text of 562 rows: 71 steps an epoch, the last of two rows."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    words = [f"word{i % 97} and{i % 13}\n" for i in range(900)]
    (tmp_path / "text").write_text("".join(words)[:10_000])
    return tmp_path


def run(place: Path, *arguments: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*POTLUCK, *arguments], cwd=place, capture_output=True, text=True, timeout=timeout_s)


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*POTLUCK, *arguments], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def steps(folder: Path) -> list[int]:
    events = folder / "events.jsonl"
    return [r["step"] for r in read_events(events) if r["event"] == "step_done"] if events.exists() else []


def children(pid: int) -> list[int]:
    """In order of birth, and so of rank."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                    found.append(int(entry.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


# A whole run


def test_a_recipe_trains_and_tells_all_that_a_person_wants_to_know(place: Path) -> None:
    done = run(place, "train", "tiny.toml", "--set", "fit.tensorboard=true")
    assert done.returncode == 0, done.stderr
    folder = place / "runs" / "tiny"
    said = done.stdout
    assert "Training 16.5k parameters on 2 workers (cpu): 71 steps of 8 rows, in runs/tiny" in said
    assert "Epoch 1: each of its 562 samples was used exactly once; all workers hold the same weights." in said
    assert re.search(r"step 1/71, loss \d\.\d+, [\d,]+ tokens/s, .* left, waiting 0:\d+ % 1:\d+ %", said)
    assert "What the model wrote" in said and "What to try next" in said
    for path in re.findall(r"^  (?:loss curve|checkpoint|weights|events) +(\S+)$", said, re.MULTILINE):
        assert (place / path).exists(), path
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any((folder / "tensorboard").iterdir())
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert steps(folder) == list(range(1, 72))
    losses = [r["loss"] for r in read_events(folder / "events.jsonl") if r["event"] == "step_done"]
    assert losses[-1] < losses[0] - 1, "it did not learn"
    # The exported weights are plain safetensors.
    model = GPT(ModelConfig(dim=16, layers=2, heads=2, context=16))
    model.load_state_dict(load_file(folder / "model.safetensors"))


@pytest.mark.slow
def test_two_runs_at_once_in_one_folder_are_refused(place: Path) -> None:
    first = start(place, "train", "tiny.toml", "-n", "1", "--out", "both", "--set", "fit.epochs=1000")
    wait_until(lambda: len(steps(place / "both")) >= 12)  # it has saved at step 5 by now
    second = run(place, "train", "tiny.toml", "-n", "1", "--out", "both", "--resume")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    assert first.returncode == 130
    assert second.returncode == 2 and "Another run is using both right now." in second.stderr


@pytest.mark.slow
def test_a_second_run_takes_a_folder_of_its_own_and_never_the_firsts(place: Path) -> None:
    short = ("train", "tiny.toml", "-n", "1", "--set", "fit.max_steps=2")
    assert run(place, *short).returncode == 0
    assert run(place, *short).returncode == 0
    assert sorted(path.name for path in (place / "runs").iterdir()) == ["tiny", "tiny-2"]
    refused = run(place, *short, "--out", "runs/tiny")
    assert refused.returncode == 2 and "already holds a run" in refused.stderr


# Bad input

SLOW = pytest.mark.slow
"""Not so slow; but each starts workers to say one sentence."""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "nothing.toml"), "There is no recipe nothing.toml. Built in are: demo"),
        (("train", "tiny.toml", "--set", "model.layer=3"), "Did you mean model.layers?"),
        (("train", "tiny.toml", "--set", "workers.count=x"), "workers.count must be a whole number, not 'x'."),
        pytest.param(("train", "tiny.toml", "--data", "nowhere"), "There is no file or folder nowhere.", marks=SLOW),
        (("train", "tiny.toml", "--set", "batch.size=1"), "A batch of 1 does not fit 2 workers"),
        pytest.param(
            ("train", "tiny.toml", "--out", "/proc/potluck"), "Cannot write to the run folder /proc/potluck", marks=SLOW
        ),
        pytest.param(
            ("train", "tiny.toml", "--set", "model.dim=1000000"), "Make model.dim or model.layers smaller", marks=SLOW
        ),
        pytest.param(("train", "tiny.toml", "--resume"), "There is no run to resume in runs/tiny.", marks=SLOW),
        pytest.param(
            ("train", "tiny.toml", "--set", "policy.kind=sync", "--set", "policy.shares=[1]"),
            "shares has 1 number, and",
            marks=SLOW,
        ),
        (("train", "tiny.toml", "-n", "100000"), "workers: count must be at most 4,096, not 100,000"),
        (("run", "-n", "4000", "tiny.toml"), "4,000 workers on one machine take at least 400 GB of memory"),
        (("host", "tiny.toml", "--set", "name=../x"), "name must be a plain word for a folder"),
        (("trian", "tiny.toml"), "There is no command 'trian'. Did you mean potluck train?"),
        (("demo", "-n", "1"), "needs at least two. For one: potluck train demo -n 1"),
        (("demo", "--set", "policy.kind=async"), "Choose one with: potluck train demo --set policy.kind=cadence"),
        (("run", "nothing.py"), "There is no script nothing.py."),
        (("run", "-n", "0", "tiny.toml"), "count must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence_and_exit_2(
    place: Path,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process, which has torch loaded already; workers that it starts are processes of their own."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", ["potluck", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capfd.readouterr().err
    assert ended.value.code == 2, told
    assert said in told
    assert "Traceback" not in told
    assert len(told.splitlines()) == 1, "said once, not by every worker"


def test_an_unknown_option_is_refused(place: Path) -> None:
    done = run(place, "train", "tiny.toml", "--epochs", "3")
    assert done.returncode == 2 and "--epochs" in done.stderr


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_name(place: Path) -> None:
    assert run(place, "train", "tiny.toml", "--set", "fit.max_steps=2").returncode == 0
    done = run(place, "train", "tiny.toml", "--resume", "--set", "model.dim=32")
    assert done.returncode == 2
    assert "its embedding.weight is (256, 16) float32, and this model's is (256, 32) float32" in done.stderr


def test_help_reads_well(place: Path) -> None:
    done = run(place, "--help")
    assert done.returncode == 0
    for command in ("demo", "train", "run", "doctor"):
        assert f"• {command}" in done.stdout
    rows = done.stdout.splitlines()
    assert len(rows) <= 23 and max(map(len, rows)) <= 80, "it fits a small terminal, with the prompt below it"
    assert sorted(re.findall(r"• ([a-z]+)", done.stdout)) == sorted(cli.COMMANDS), "each command once"
    assert run(place).stdout == done.stdout
    assert run(place, "--version").stdout.startswith("potluck ")


# Stopping and going on


def finished_weights(place: Path, out: str) -> dict[str, torch.Tensor]:
    return load_file(place / out / "model.safetensors")


@pytest.mark.slow
def test_a_run_killed_at_several_points_ends_with_bit_identical_weights(place: Path) -> None:
    assert run(place, "train", "tiny.toml", "--out", "whole").returncode == 0
    kills = 0
    for at_step, whom in [(3, "all"), (7, "parent"), (22, "worker")]:
        resume = ["--resume"] if (place / "part" / "checkpoints").exists() else []
        process = start(place, "train", "tiny.toml", "--out", "part", *resume)
        wait_until(lambda at_step=at_step: max(steps(place / "part"), default=0) >= at_step)  # type: ignore[misc]
        workers = children(process.pid)
        victims = {"all": [process.pid, *workers], "parent": [process.pid], "worker": workers[1:]}[whom]
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        process.communicate(timeout=30)
        wait_until(lambda workers=workers: not any(map(is_alive, workers)), 10)  # type: ignore[misc]
        assert process.returncode != 0
        kills += 1
    assert kills == 3
    assert run(place, "train", "tiny.toml", "--out", "part", "--resume").returncode == 0
    whole, part = finished_weights(place, "whole"), finished_weights(place, "part")
    for name, expected in whole.items():
        assert torch.equal(part[name], expected), name


def test_ctrl_c_finishes_the_step_saves_says_where_and_exits_130(place: Path) -> None:
    process = start(place, "train", "tiny.toml", "--set", "fit.epochs=1000", "--set", "fit.checkpoint.every=100000")
    wait_until(lambda: len(steps(place / "runs" / "tiny")) >= 3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    found = re.search(r"Stopped after step (\d+)\. Saved in (\S+)\.", stderr)
    assert found and (place / found[2] / "manifest.json").exists()
    assert steps(place / "runs" / "tiny")[-1] == int(found[1])
    command = re.search(r"Continue with: potluck (.+)", stderr)
    assert command and "Traceback" not in stderr
    again = run(place, *command[1].split(), "--set", f"fit.max_steps={int(found[1]) + 2}")
    assert again.returncode == 0, again.stderr
    assert f"Continuing from step {int(found[1])}." in again.stdout


@pytest.mark.slow
def test_a_script_without_our_launcher_stops_alike(place: Path) -> None:
    text = (ROOT / "examples" / "trainer.py").read_text().replace("epochs=4", "epochs=4000")
    (place / "script.py").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(steps(place / "runs" / "sines")) >= 3)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert re.fullmatch(r"potluck: Stopped after step \d+\. Saved in runs/sines/checkpoints/step-\d+\.\n", stderr)


@pytest.mark.slow
def test_no_space_for_a_checkpoint_is_said_before_anything_is_computed(place: Path) -> None:
    small = place / "small"
    small.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        done = run(place, "train", "tiny.toml", "--out", "small/run", "--set", "model.dim=128")
        assert done.returncode == 2
        assert re.search(r"The run folder small/run has [\d.]+ MB left, and one checkpoint takes about", done.stderr)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.slow
def test_nobody_leaves_before_the_checkpoint_is_on_the_disk(place: Path) -> None:
    """The disk takes longer than the launcher's patience with stragglers."""
    text = (
        (ROOT / "examples" / "trainer.py")
        .read_text()
        .replace("epochs=4", "epochs=4000")
        .replace("every=100", "every=10**9")
    )
    slow = (
        "import time\nfrom potluck.save import checkpoint\nwrite = checkpoint.write\n"
        "def slow_write(*arguments):\n    time.sleep(5)\n    return write(*arguments)\n"
        "checkpoint.write = slow_write\n"
    )
    (place / "script.py").write_text(slow + text)
    process = start(place, "run", "-n", "2", "script.py")
    wait_until(lambda: len(steps(place / "runs" / "sines")) >= 3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=40)
    assert process.returncode == 130, stderr
    found = re.search(r"Saved in (\S+)\.", stderr)
    assert found and (place / found[1] / "manifest.json").exists()


@pytest.mark.slow
def test_the_first_to_fail_is_named_even_if_another_fails_because_of_it(place: Path) -> None:
    (place / "bad.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "rank = int(os.environ['RANK'])\n"
        "dist.init_process_group('gloo', f\"file://{os.environ['POTLUCK_RENDEZVOUS']}\", rank=rank, world_size=2)\n"
        "if rank == 1: raise KeyError('salt')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    done = run(place, "run", "-n", "2", "bad.py")
    assert "Worker 1 failed, so the others stopped too. Its last words: KeyError: 'salt'" in done.stderr


def test_every_line_of_every_worker_is_heard(place: Path) -> None:
    (place / "talk.py").write_text("for i in range(2000): print('line', i)\n")
    done = run(place, "run", "-n", "3", "talk.py")
    assert done.stdout.count("line") == 2000 and done.stderr.count("line") == 4000


@pytest.mark.slow
def test_a_refused_resume_changes_nothing_and_a_new_setting_takes_effect(place: Path) -> None:
    assert run(place, "train", "tiny.toml", "-n", "1", "--set", "fit.max_steps=2").returncode == 0
    kept = (place / "runs" / "tiny" / "run.toml").read_text()
    again = ("train", "runs/tiny/run.toml", "-n", "1", "--out", "runs/tiny", "--resume")
    assert run(place, *again, "--set", "model.dim=32").returncode == 2
    assert (place / "runs" / "tiny" / "run.toml").read_text() == kept
    (place / "text").write_text((place / "text").read_text()[::-1])
    done = run(place, *again, "--set", "fit.max_steps=3", "--set", "optimizer.lr=0.5", "--set", "fit.seed=7")
    assert done.returncode == 0
    assert "OTHER DATA than those this run was trained on up to step 2" in done.stderr
    assert "begun with seed 0, and keeps it" in done.stderr
    rates = [r["lr"] for r in read_events(place / "runs/tiny/events.jsonl") if r["event"] == "step_done"]
    assert len(rates) == 3 and rates[2] > 0.01


TINY_DEMO = [
    word
    for setting in (
        "model.dim=16",
        "model.layers=1",
        "model.heads=2",
        "model.context=16",
        "fit.max_steps=20",
        "fit.validate_every=5",
    )
    for word in ("--set", setting)
]


@pytest.mark.slow
def test_the_demo_compares_sync_and_cadence(place: Path) -> None:
    done = run(place, "demo", "--data", "text", *TINY_DEMO)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert len(re.findall(r"^Worker 2 is slowed 3-fold: it pauses", said, re.MULTILINE)) == 2
    for policy in ("sync", "cadence"):
        assert re.search(rf"Training .* on 3 workers \(cpu\): 20 steps of 12 rows, in runs/demo-{policy}$", said, re.M)
        policies = (place / "runs" / f"demo-{policy}" / "run.toml").read_text()
        assert f'kind = "{policy}"' in policies
    assert "  In the first 15% of the run all agree in every step: " in said
    assert re.search(r"^To a validation loss of [\d.]+ Cadence took [\d.]+ s, and Sync [\d.]+ s", said, re.M)
    found = re.search(
        r"Cadence took ([\d.]+) s for the same 240 rows, and Sync ([\d.]+) s: ([\d.]+) times as fast", said, re.M
    )
    assert found is not None
    cadence_s, sync_s, gain = map(float, found.groups())  # times are told to a tenth of a second
    assert (sync_s - 0.05) / (cadence_s + 0.05) - 0.05 <= gain <= (sync_s + 0.05) / max(0.01, cadence_s - 0.05) + 0.05
    assert said.count("What the model wrote") == 1 and "What to try next" in said
    assert (place / "runs/demo-cadence/comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ctrl_c_in_the_demo_leaves_nothing_behind(place: Path) -> None:
    process = start(
        place, "demo", "-n", "2", "--data", "text", "--out", "mine", *TINY_DEMO, "--set", "fit.max_steps=100000"
    )
    wait_until(lambda: len(steps(place / "mine" / "sync")) >= 3)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and "Saved in mine/sync/checkpoints/step-" in stderr
    assert not (place / "mine" / "cadence").exists()
    assert len(workers) == 2 and not any(map(is_alive, workers))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_whole_demo_is_short_and_cadence_wins(place: Path) -> None:
    began = time.perf_counter()
    done = run(place, "demo", timeout_s=300)
    print(f"took {time.perf_counter() - began:.0f} s")
    found = re.search(r"and Sync .*: ([\d.]+) times as fast; validation loss ([\d.]+) against ([\d.]+\d)", done.stdout)
    assert found and float(found[1]) > 1.5 and float(found[2]) < float(found[3]) + 0.15 < 2.7
    print(found[0])


def test_a_second_ctrl_c_stops_at_once(place: Path) -> None:
    (place / "stuck.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    process = start(place, "run", "-n", "2", "stuck.py")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_a_worker_that_dies_ends_the_others_within_seconds(place: Path) -> None:
    process = start(place, "train", "tiny.toml", "--set", "fit.epochs=1000")
    wait_until(lambda: len(steps(place / "runs" / "tiny")) >= 3)
    workers = children(process.pid)
    os.kill(workers[1], signal.SIGKILL)
    killed = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - killed < 15
    assert process.returncode == 128 + signal.SIGKILL
    assert "Worker 1 was ended by SIGKILL, so the others stopped too." in stderr
    assert "Traceback" not in stderr
    assert not any(map(is_alive, workers))


@pytest.mark.slow
def test_a_script_that_fails_on_one_worker_has_its_last_words(place: Path) -> None:
    (place / "bad.py").write_text(
        "import potluck, torch\n"
        "fleet = potluck.init()\n"
        "if fleet.rank == 1: raise ValueError('no such flavour')\n"
        "fleet.link.start_sum(torch.ones(3)).wait()\n"
    )
    done = run(place, "run", "-n", "2", "bad.py")
    assert done.returncode == 1
    assert "Worker 1 failed, so the others stopped too. Its last words: ValueError: no such flavour" in done.stderr
    assert "[worker 1] Traceback" in done.stderr  # it is the script's own bug, so its author sees where
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_no_worker_outlives_a_killed_launcher(place: Path) -> None:
    process = start(place, "train", "tiny.toml", "--set", "fit.epochs=1000")
    wait_until(lambda: len(steps(place / "runs" / "tiny")) >= 1)
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_alive, workers)), 10)


# Scripts


def test_a_scripts_arguments_are_its_own(place: Path) -> None:
    (place / "show.py").write_text("import sys, os\nprint(os.environ['RANK'], sys.argv[1:], __name__, flush=True)\n")
    done = run(place, "run", "-n2", "show.py", "-n", "7", "--lr=3", "--help")
    assert done.returncode == 0, done.stderr
    assert "0 ['-n', '7', '--lr=3', '--help'] __main__" in done.stdout
    assert "[worker 1] 1 ['-n', '7', '--lr=3', '--help'] __main__" in done.stderr


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\d+\.\d+)", text)


@pytest.mark.slow
def test_the_own_loop_example_gives_the_same_losses_however_it_is_started(place: Path) -> None:
    example = str(ROOT / "examples" / "own_loop.py")
    alone = subprocess.run([sys.executable, example], capture_output=True, text=True, cwd=place, timeout=60)
    ours = run(place, "run", "-n", "3", example)
    torchrun = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example],
        capture_output=True, text=True, cwd=place, timeout=60,
    )  # fmt: skip
    assert ours.returncode == torchrun.returncode == alone.returncode == 0, ours.stderr + torchrun.stderr
    assert len(losses(alone.stdout)) == 3
    for found in (ours, torchrun):
        for mine, theirs in zip(losses(found.stdout), losses(alone.stdout), strict=True):
            assert abs(float(mine) - float(theirs)) < 2e-3
    assert ours.stdout.count("each of its 2,000 samples was used exactly once; all workers hold the same weights") == 3


@pytest.mark.slow
def test_the_trainer_example_trains_and_resumes(place: Path) -> None:
    example = str(ROOT / "examples" / "trainer.py")
    done = run(place, "run", "-n", "2", example)
    assert done.returncode == 0, done.stderr
    found = re.search(r"validation loss (\d\.\d{5}), saved in (\S+)", done.stdout)
    assert found and float(found[1]) < 0.05 and (place / found[2]).is_dir()
    again = run(place, "run", "-n", "2", example, "--resume")
    assert again.returncode == 0 and "Continuing from step 252." in again.stdout


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.slow
def test_the_doctor_tells_what_the_machine_brings(place: Path) -> None:
    done = run(place, "doctor")
    assert done.returncode == 0, done.stdout
    assert re.search(r"float32 matmul +[\d.]+ TFLOP/s", done.stdout)
    assert re.search(r"memory rate +[\d.]+ GB/s", done.stdout)
    assert re.search(r"gloo, 2 workers +works, averages", done.stdout)
    assert "Nothing is wrong." in done.stdout


@pytest.mark.slow
def test_the_doctor_names_what_is_wrong_and_the_fix(place: Path) -> None:
    done = subprocess.run(
        [*POTLUCK, "doctor"], cwd=place, capture_output=True, text=True, timeout=90,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "nothing0"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot talk over gloo" in done.stdout and "GLOO_SOCKET_IFNAME" in done.stdout


@pytest.mark.slow
def test_the_run_folder_holds_the_whole_recipe(place: Path) -> None:
    assert run(place, "train", "tiny.toml", "--set", "fit.max_steps=1", "-n", "1").returncode == 0
    text = (place / "runs" / "tiny" / "run.toml").read_text()
    assert "max_steps = 1" in text and "count = 1" in text
    manifest = json.loads((place / "runs/tiny/checkpoints/step-00000001/manifest.json").read_text())
    assert manifest["body"]["workers"] == 1
