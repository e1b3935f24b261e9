"""What is on the disk is whole or not there, whatever happens while it is written."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from potluck.errors import CheckpointError
from potluck.save import checkpoint_folder, parts, state
from potluck.save.checkpoint import CheckpointWriter, Snapshot, write
from potluck.save.checkpoint_folder import check, newest, prune
from potluck.sharding.ranges import Ranges


def snapshot(step: int, size: int = 10) -> Snapshot:
    tensors = {"a": torch.full((size,), float(step)), "b": torch.arange(4, dtype=torch.int64)}
    return Snapshot({"step": step}, {"model": tensors})


def found(folder: Path) -> tuple[int | None, list[str]]:
    passed: list[str] = []
    best = newest(checkpoint_folder.found(folder), check, lambda path, error: passed.append(f"{path.name}: {error}"))
    return (best[1]["step"] if best else None), passed


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    place = write(tmp_path, snapshot(7))
    assert place.name == "step-00000007"
    assert found(tmp_path) == (7, [])
    assert torch.equal(load_file(place / "model.safetensors")["a"], torch.full((10,), 7.0))


def test_the_newest_is_the_highest_step_not_the_last_name(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        write(tmp_path, snapshot(step))
    assert found(tmp_path)[0] == 100_000_000


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: (p / "model.safetensors").unlink(), "No such file"),
        (lambda p: (p / "model.safetensors").write_bytes(b""), "does not match its checksum"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json"),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json"),
        (lambda p: (p / "manifest.json").unlink(), "No such file"),
        (
            lambda p: (p / "manifest.json").write_text(
                (p / "manifest.json").read_text().replace('"step": 2', '"step": 3')
            ),
            "does not match its own checksum",
        ),
    ],
)
def test_any_damage_is_found_and_the_one_before_is_used(tmp_path: Path, damage: object, said: str) -> None:
    write(tmp_path, snapshot(1))
    damage(write(tmp_path, snapshot(2)))  # type: ignore[operator]
    step, passed = found(tmp_path)
    assert step == 1
    assert len(passed) == 1 and said in passed[0] and "step-00000002" in passed[0]


def test_a_manifest_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    place = write(tmp_path, snapshot(1))
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["body"]["files"] = {"../../etc/passwd": {"bytes": 1, "sha256": "0"}}
    manifest["sha256"] = checkpoint_folder.body_sha256(manifest["body"])
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a file in it"):
        check(place)


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    places = [write(tmp_path, snapshot(step)) for step in range(1, 6)]
    (tmp_path / ".writing-step-00000009-1").mkdir()
    prune(tmp_path, keep_last=2, newest=places[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_the_one_just_written_always_stays_and_what_comes_after_it_is_not_ours_to_remove(tmp_path: Path) -> None:
    for step in (10, 20, 40, 50):
        write(tmp_path, snapshot(step))
    prune(tmp_path, keep_last=2, newest=write(tmp_path, snapshot(30)))
    assert [path.name[-2:] for path in sorted(tmp_path.iterdir())] == ["20", "30", "40", "50"]


def test_a_step_that_is_saved_again_takes_a_place_of_its_own_and_is_the_newer(tmp_path: Path) -> None:
    first = write(tmp_path, snapshot(3))
    again = Snapshot({"step": 3, "again": True}, snapshot(3).files)
    second = write(tmp_path, again)
    assert (first.name, second.name) == ("step-00000003", "step-00000003-2")
    assert newest(checkpoint_folder.found(tmp_path), check, lambda path, error: None)[1]["again"]  # type: ignore[index]
    prune(tmp_path, keep_last=1, newest=second)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003-2"]


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    assert found(tmp_path) == (None, [])
    assert found(tmp_path / "nowhere") == (None, [])


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from potluck.save.checkpoint import Snapshot, write
from potluck.save.checkpoint_folder import prune
generator = random.Random(0)
for attempt in range(100):
    folder, (heard, said) = Path(sys.argv[1]) / str(attempt), os.pipe()
    process = os.fork()
    step = 0
    while process == 0:
        step += 1
        place = write(folder, Snapshot({"step": step}, {"model": {"a": torch.full((300_000,), float(step))}}))
        prune(folder, 2, place)
        os.write(said, f"{step}\\n".encode())
    os.close(said)
    lines = os.fdopen(heard)
    for _ in range(3):
        last = int(lines.readline())
    time.sleep(generator.uniform(0, 0.02))  # into the middle of a later write, not to wait for anything
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    print(max([last, *map(int, lines.read().split())]))
    if attempt >= 5 and any(Path(sys.argv[1]).glob("*/.*")):
        break  # one of them at least fell into a write: on a busy machine it may not be one of the first
"""


def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    reported = [int(line) for line in done.stdout.split()]
    assert len(reported) >= 6
    leftovers = 0
    for attempt, last in enumerate(reported):
        folder = tmp_path / str(attempt)
        step, passed = found(folder)
        assert step is not None and step >= last, "a checkpoint that was reported as written is gone"
        assert not passed
        saved = load_file(folder / f"step-{step:08d}" / "model.safetensors")["a"]
        assert torch.equal(saved, torch.full_like(saved, float(step)))
        leftovers += any(path.name.startswith(".") for path in folder.iterdir())
    assert leftovers, "no kill fell into a write, so this proved nothing"


def test_the_writer_reports_what_went_wrong_at_the_next_wait(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    writer = CheckpointWriter(blocked / "checkpoints", keep_last=2)
    writer.start(lambda: write(writer.folder, snapshot(1)), lambda place: None)
    with pytest.raises(CheckpointError, match=r"Cannot write the checkpoint of step 1 .*: Not a directory"):
        writer.wait()
    writer.wait()  # said once


def test_whatever_goes_wrong_in_the_background_is_raised_in_the_foreground(tmp_path: Path) -> None:
    def broken(place: Path) -> None:
        raise RuntimeError("nobody listens")

    writer = CheckpointWriter(tmp_path, keep_last=2)
    writer.start(lambda: write(writer.folder, snapshot(1)), broken)
    with pytest.raises(RuntimeError, match="nobody listens"):
        writer.wait()


def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_stays_whole(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        write(small, snapshot(1, size=100_000))
        with pytest.raises(CheckpointError, match=r"4,000,\d+ bytes are needed and [\d,]+ are free"):
            write(small, snapshot(2, size=1_000_000))
        assert found(small) == (1, [])
        assert [path.name for path in small.iterdir()] == ["step-00000001"]
    finally:
        subprocess.run(["umount", small], check=True)


# State as tensors and JSON


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.AdamW([{"params": [p[0]], "lr": 1e-2}, {"params": [p[1]]}], lr=torch.tensor(1e-3)),
    ],
)
def test_any_optimizers_state_survives_json_and_safetensors(make: object, tmp_path: Path) -> None:
    def stepped(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], times: int) -> None:
        for i in range(times):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.1 * (i + 1))
            optimizer.step()

    def fresh() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, dict[int, str]]:
        parameters = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(4))]
        return parameters, make(parameters), {id(parameters[0]): "x", id(parameters[1]): "y"}  # type: ignore[operator]

    parameters, optimizer, names = fresh()
    stepped(optimizer, parameters, 3)
    saved = parts.optimizer_part(parts.WholeModel(nn.Module(), optimizer, names))
    place = write(tmp_path, Snapshot({"step": 1, "optimizer": saved.notes}, {"optimizer": saved.tensors}))
    others, other, other_names = fresh()
    for mine, theirs in zip(others, parameters, strict=True):
        mine.data.copy_(theirs.data)
    with Ranges([place / "optimizer.safetensors"]) as source:
        whole = parts.WholeModel(nn.Module(), other, other_names)
        parts.load_optimizer_part(whole, source, check(place)["optimizer"])
    stepped(optimizer, parameters, 2)
    stepped(other, others, 2)
    for mine, theirs in zip(others, parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_an_optimizer_with_a_function_in_it_is_refused_by_name() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(CheckpointError, match="groups/0/hook is a builtin_function_or_method"):
        parts.optimizer_part(parts.WholeModel(nn.Module(), optimizer, {id(parameter): "x"}))


def test_every_generator_goes_on_from_where_it_was() -> None:
    def draw() -> tuple[Tensor, float, float]:
        return torch.rand(3), random.gauss(0, 1), float(np.random.standard_normal())

    draw()
    saved, older = state.random_state(), as_saved_by_earlier_versions()
    first = draw()
    draw()
    for data in (saved, older):
        state.set_random_state(data)
        again = draw()
        assert torch.equal(first[0], again[0]) and first[1:] == again[1:]
    assert len(saved) < 9000, "beside a small adapter it is not little"


def as_saved_by_earlier_versions() -> bytes:
    kind, keys, *rest = np.random.get_state(legacy=True)
    texts = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}
    tensors = {name: torch.tensor(list(json.dumps(each).encode()), dtype=torch.uint8) for name, each in texts.items()}
    return save({"torch": torch.get_rng_state(), **tensors})
