"""A checkpoint that was saved under any strategy and by any number of ranks is loaded under any other, to the bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import potluck
from potluck import cli
from potluck.agree.records import Position
from potluck.errors import CheckpointError
from potluck.events import CheckpointPassedOver
from potluck.link.link import connect
from potluck.save import checkpoint, checkpoint_folder, parts
from potluck.save.checkpoint import Share, Snapshot, new_aside, write_share, write_together
from potluck.sharding.ranges import Ranges
from potluck.sharding.stored import TensorFiles
from potluck.sharding.strategy import FullShard, HybridShard, NoShard, ShardGradOp, ShardingStrategy
from potluck.sharding.uneven import UnevenShards
from tests.gathered import gathered, home
from tests.quick import first_of
from tests.ranks import RankFailed, run_ranks

ROWS = 24
Setup = tuple[int, ShardingStrategy]


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, and buffers of which one is not saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(13, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.tensor(seed))
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(), 0.1)
        return self.head(self.frozen(x))


def make(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """Two groups that alternate in the model's order, the second given first."""
    model = Net(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 1e-2 * seed},
        {"params": [p for p in reversed(trained) if p.dim() > 1], "weight_decay": 0.1 * seed},
    ]
    return model, torch.optim.AdamW(groups, lr=5e-3)


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (2, ROWS), generator=torch.Generator().manual_seed(step))
    return tokens[0].to(home()), tokens[1].to(home())


def train(fleet: potluck.Engine, model: nn.Module, upto: int) -> None:
    mine = slice(fleet.rank * ROWS // fleet.world, (fleet.rank + 1) * ROWS // fleet.world)
    while fleet.step_number < upto:
        x, y = batch(fleet.step_number)
        fleet.backward(F.cross_entropy(model(x[mine]), y[mine]), samples=mine.stop - mine.start)
        fleet.step()


def look_and_save(folder: str) -> list[Tensor]:
    """A forward without a backward leaves parameters gathered, and a save lets go of them."""
    with potluck.init(strategy=FullShard()) as fleet:
        model, optimizer = make(1)
        model, optimizer = fleet.prepare(model, optimizer)
        train(fleet, model, 1)
        fleet.evaluate(lambda m, rows: F.cross_entropy(m(rows[0]), rows[1]), tuple(part.cpu() for part in batch(0)), 4)
        fleet.save(folder)
        train(fleet, model, 2)
        fleet.wait_for_saves()
        return [gathered(parameter) for parameter in model.parameters()]


def test_looking_and_saving_between_two_steps_changes_nothing_on_any_rank(tmp_path: Path) -> None:
    expected = plain(2)
    for found in run_ranks(2, look_and_save, str(tmp_path)):
        for tensor, name in zip(found, dict(make(1)[0].named_parameters()), strict=True):
            torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


def plain(upto: int) -> dict[str, Tensor]:
    """One process that was never interrupted."""
    model, optimizer = make(1)
    model.to(home())
    for step in range(upto):
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: gathered(tensor) for name, tensor in model.state_dict().items()}


def look(fleet: potluck.Engine) -> dict[str, Any]:
    """All that the replica holds: the model whole, and this rank's optimizer state with where it belongs."""
    replica = fleet.run.replica
    assert replica is not None
    sharded = getattr(replica, "sharded", None)
    model = whole(replica.model, sharded)
    found: list[list[Any]] = []
    for run in sharded.runs if sharded is not None else ():
        for key, value in replica.optimizer.state[run.parameter].items():
            found.append([run.span.name, run.span.start, key, value.view(-1).clone() if value.dim() else value.clone()])
    for parameter, each in replica.optimizer.state.items() if sharded is None else ():
        found += [[replica.names[id(parameter)], 0, key, value.clone()] for key, value in each.items()]
    groups = [{k: v for k, v in g.items() if k in ("lr", "weight_decay")} for g in replica.optimizer.param_groups]
    return {"model": model, "state": found, "groups": groups, "step": fleet.step_number}


def whole(model: nn.Module, sharded: Any) -> dict[str, Tensor]:
    """A copy of the state_dict as one process would have it."""
    found = {name: gathered(tensor) for name, tensor in model.state_dict().items()}
    if isinstance(sharded, UnevenShards):  # the model itself holds nothing while it does not compute
        for name, spec in sharded.split.items():
            found[name] = torch.zeros(spec.shape)
            for run in (*sharded.runs, *sharded.rest):
                if run.span.name == name:
                    found[name].view(-1)[run.span.start : run.span.end] = run.parameter.detach().view(-1)
            dist.all_reduce(found[name])
        found |= {name: found["embed.weight"] for name in found if name == "head.weight"}
    return found


def merge(told: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Optimizer state of all ranks, by parameter and key, flat."""
    whole: dict[str, Tensor] = {}
    for rank in told:
        for name, start, key, value in rank["state"]:
            size = told[0]["model"][name].numel() if value.dim() else 1
            flat = whole.setdefault(f"{name}/{key}", torch.full((size,), float("nan")))
            flat[start if value.dim() else 0 :][: value.numel()] = value.reshape(-1)
    return whole


def start(strategy: ShardingStrategy, folder: str, saves: list[int]) -> dict[str, Any]:
    with potluck.init(strategy=strategy) as fleet:
        model, optimizer = make(1)
        fleet.prepare(model, optimizer)
        for step in saves:
            train(fleet, model, step)
            fleet.save(folder, keep_last=3)
        fleet.wait_for_saves()
        return look(fleet)


def go_on(strategy: ShardingStrategy, folder: str, upto: int) -> dict[str, Any]:
    with potluck.init(strategy=strategy) as fleet:
        passed: list[str] = []
        fleet.events.listeners.append(
            lambda event: passed.append(event.reason) if isinstance(event, CheckpointPassedOver) else None
        )
        model, optimizer = make(2)  # nothing is right by accident
        fleet.prepare(model, optimizer)
        train(fleet, model, 1)  # there is optimizer state already, of something else
        fleet.run.progress.seek(Position())
        assert fleet.load(folder)
        loaded = look(fleet)
        train(fleet, model, upto)
        return {"loaded": loaded, "end": look(fleet)["model"], "passed": passed}


NO_1: Setup = (1, NoShard())
NO_2: Setup = (2, NoShard())
FULL_2: Setup = (2, FullShard())
FULL_3: Setup = (3, FullShard())
ZERO_2: Setup = (2, ShardGradOp())
ZERO_3: Setup = (3, ShardGradOp(weights=(3.0, 0.0, 1.0)))
UNEVEN_3: Setup = (3, FullShard(weights=(2.0, 0.0, 1.0)))
HYBRID_4: Setup = (4, HybridShard(intra_node_size=2))
ALONE: Setup = (1, FullShard())


SLOW = pytest.mark.slow
"""Others of their kind are drawn by tests/differential."""


@pytest.mark.parametrize(
    ("saved", "loaded"),
    first_of(
        [
            (NO_1, FULL_2),
            (FULL_2, ZERO_3),
            pytest.param(ZERO_3, NO_1, marks=SLOW),
            (HYBRID_4, FULL_3),
            pytest.param(FULL_3, NO_2, marks=SLOW),
            pytest.param(NO_2, ZERO_2, marks=SLOW),
            pytest.param(ZERO_2, HYBRID_4, marks=SLOW),
            (FULL_2, UNEVEN_3),
            pytest.param(UNEVEN_3, FULL_2, marks=SLOW),
            (ALONE, ZERO_2),
        ]
    ),
    ids=lambda setup: f"{setup[1].kind}-{setup[0]}",
)
def test_what_is_loaded_is_what_was_saved_and_training_goes_on(tmp_path: Path, saved: Setup, loaded: Setup) -> None:
    before = run_ranks(saved[0], start, saved[1], str(tmp_path), [3])
    after = run_ranks(loaded[0], go_on, loaded[1], str(tmp_path), 6)
    expected = merge(before)
    assert len(expected) == 7 * 3 and not any(value.isnan().any() for value in expected.values())
    for rank in after:
        assert rank["loaded"]["step"] == 3 and rank["loaded"]["groups"] == before[0]["groups"]
        for name, tensor in before[0]["model"].items():
            assert torch.equal(rank["loaded"]["model"][name], tensor), name
            torch.testing.assert_close(rank["end"][name], plain(6)[name], atol=1e-5, rtol=1e-4, msg=name)
    found = merge([rank["loaded"] for rank in after])
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_each_rank_writes_its_own_files_and_nodes_that_hold_the_same_do_not(tmp_path: Path) -> None:
    run_ranks(4, start, HYBRID_4[1], str(tmp_path), [1])
    (place,) = tmp_path.iterdir()
    assert sorted(file.name for file in place.iterdir()) == [
        "manifest.json",
        "model-00000-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
        "optimizer-00000-of-00002.safetensors",
        "optimizer-00001-of-00002.safetensors",
        "random.safetensors",
    ]
    assert load_file(place / "model-00001-of-00002.safetensors")["embed.weight[78:143]"].shape == (65,)


# Any optimizer, and any files


class Odd(nn.Module):
    """A parameter without a dimension, one without a number, one of a single number, and one that nobody uses."""

    def __init__(self, seed: int, *, bare: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.5) if bare else torch.tensor([1.5]))
        self.nothing = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.gain + self.nothing.sum()
        return x


ELEMENTWISE: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
}


def hand_over(folder: str, first: ShardingStrategy, second: ShardingStrategy) -> dict[str, dict[str, Any]]:
    """Each rank keeps its part in a file of its own, and a new model is filled from all of them, without a manifest."""
    connect(torch.device("cpu"), 60.0)
    rank, told = dist.get_rank(), {}
    bare = isinstance(first, ShardGradOp) and isinstance(second, ShardGradOp)  # fully_shard splits only dimensions
    for name, make_optimizer in ELEMENTWISE.items():
        model = Odd(1, bare=bare)
        one = potluck.shard(model, make_optimizer(list(model.parameters())), first)
        step_by_hand(model, one, 3)
        saved = whole(model, one)
        kept = {"model": parts.model_part(one), "optimizer": parts.optimizer_part(one)}
        for stem, pieces in kept.items():
            file = Path(folder) / name / str(rank) / f"{stem}.safetensors"
            file.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_tensors(file, pieces.tensors, pieces.notes)
        dist.barrier()
        other = Odd(2, bare=bare)
        two = potluck.shard(other, make_optimizer(list(other.parameters())), second)
        files = [sorted(Path(folder, name).rglob(f"{stem}.safetensors")) for stem in kept]
        with Ranges(files[0]) as weights, Ranges(files[1]) as state:
            parts.check_part(two, weights, state, state.notes, "it")
            parts.load_model_part(two, weights)
            parts.load_optimizer_part(two, state, state.notes)
        two.share()
        loaded = whole(other, two)
        step_by_hand(model, one, 2)
        step_by_hand(other, two, 2)
        told[name] = {"saved": saved, "loaded": loaded, "expected": whole(model, one), "found": whole(other, two)}
    return told


def step_by_hand(model: nn.Module, sharded: Any, steps: int) -> None:
    for step in range(steps):
        rows = torch.full((2, 5), 0.3 * step + 0.1 * dist.get_rank() + 0.1, device=home())
        model(rows).square().mean().backward()
        sharded.step()
        sharded.share()


@pytest.mark.parametrize(
    ("first", "second"),
    first_of(
        [
            (FullShard(), ShardGradOp(weights=(1.0, 2.0))),
            (FullShard(), FullShard()),
            (FullShard(weights=(1.0, 2.0)), FullShard(weights=(3.0, 1.0))),
            (ShardGradOp(), ShardGradOp(weights=(3.0, 1.0))),
            (ShardGradOp(weights=(0.0, 1.0)), FullShard()),
        ]
    ),
    ids=lambda strategy: strategy.kind,
)
def test_every_optimizer_goes_on_as_before_from_files_wherever_they_are(
    tmp_path: Path, first: ShardingStrategy, second: ShardingStrategy
) -> None:
    for rank in run_ranks(2, hand_over, str(tmp_path), first, second):
        for optimizer, told in rank.items():
            for name, saved in told["saved"].items():
                assert torch.equal(told["loaded"][name], saved), f"{optimizer}: {name}"
                torch.testing.assert_close(
                    told["found"][name], told["expected"][name], atol=1e-6, rtol=1e-5, msg=f"{optimizer}: {name}"
                )


# Damage, and ranks that die


@pytest.mark.parametrize("loaded", first_of([FULL_2, NO_1], are_single=True), ids=lambda setup: setup[1].kind)
@pytest.mark.parametrize("stem", first_of(["model", "optimizer"]))
def test_damage_to_one_ranks_file_is_found_and_the_one_before_is_used(tmp_path: Path, loaded: Setup, stem: str) -> None:
    run_ranks(2, start, FullShard(), str(tmp_path), [1, 2])
    file = tmp_path / "step-00000002" / f"{stem}-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    told = run_ranks(loaded[0], go_on, loaded[1], str(tmp_path), 1)
    assert [rank["loaded"]["step"] for rank in told] == [1] * loaded[0]
    assert f"{file.name} does not match its checksum" in told[0]["passed"][0]
    for name, tensor in plain(1).items():
        torch.testing.assert_close(told[0]["end"][name], tensor, atol=1e-5, rtol=1e-4)


def die_while_writing(folder: str) -> None:
    with potluck.init(strategy=FullShard()) as fleet:
        model, optimizer = make(1)
        fleet.prepare(model, optimizer)
        train(fleet, model, 1)
        fleet.save(folder)
        fleet.wait_for_saves()
        train(fleet, model, 2)
        if fleet.rank == 1:

            def write_half(file: Path, *arguments: Any) -> None:
                file.write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)

            checkpoint.write_tensors = write_half  # type: ignore[assignment]
        fleet.save(folder)
        fleet.wait_for_saves()


def test_a_rank_that_is_killed_while_it_writes_leaves_the_one_before_whole(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 died without a word"):
        run_ranks(2, die_while_writing, str(tmp_path))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[-1] == "step-00000001" and all(name.startswith(".writing-step-00000002") for name in left[:-1])
    told = run_ranks(3, go_on, FullShard(), str(tmp_path), 2)
    assert told[0]["loaded"]["step"] == 1 and not told[0]["passed"]
    run_ranks(2, start, ShardGradOp(), str(tmp_path), [1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000001-2"]


def shares(folder: Path, world: int) -> tuple[list[Share], list[Snapshot]]:
    aside = new_aside(folder, 7)
    all_shares = [Share(rank, world, aside) for rank in range(world)]
    snapshots = []
    for share in all_shares:
        files = {share.stem("model"): {}, share.stem("optimizer"): {}}
        snapshots.append(Snapshot({"step": 7}, files))  # type: ignore[arg-type]
    return all_shares, snapshots


def test_rank_0_names_those_who_did_not_write_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PATIENCE_S", 0.1)
    ours, snapshots = shares(tmp_path, 4)
    write_share(ours[2], snapshots[2])
    with pytest.raises(CheckpointError, match=r"nothing came from workers 1, 3 within .* on a disk that they share"):
        write_together(tmp_path, ours[0], snapshots[0], lambda: False)
    assert not list(tmp_path.iterdir())


def test_rank_0_does_not_wait_long_for_one_that_is_known_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "GRACE_S", 0.05)
    ours, snapshots = shares(tmp_path, 2)
    with pytest.raises(CheckpointError, match="nothing came from worker 1 within 0 s"):
        write_together(tmp_path, ours[0], snapshots[0], lambda: True)


def test_what_one_rank_could_not_write_is_told_by_rank_0_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    ours, snapshots = shares(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_tensors", full)
        with pytest.raises(CheckpointError, match=r"step 7 .*No space left on device"):
            write_share(ours[1], snapshots[1])
    with pytest.raises(CheckpointError, match="worker 1 says: No space left on device"):
        write_together(tmp_path, ours[0], snapshots[0], lambda: False)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_rank_0_completes_at_once_is_no_failure_for_the_one_who_wrote_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, snapshots = shares(tmp_path, 2)
    rename, places = Path.replace, []

    def then_complete(self: Path, target: Path) -> Path:
        renamed = rename(self, target)
        if target == ours[1].done(1):
            places.append(write_together(tmp_path, ours[0], snapshots[0], lambda: False))
        return renamed

    monkeypatch.setattr(Path, "replace", then_complete)
    write_share(ours[1], snapshots[1])
    assert list(tmp_path.iterdir()) == places


# Refusals: on every rank alike, and before anything is changed


def refused(folder: str, what: str) -> dict[str, Any]:
    with potluck.init(strategy=FullShard()) as fleet:
        model, optimizer = make(2)
        if what == "model":
            model.layers[2] = nn.Linear(13, 13, bias=False)
        if what in ("model", "groups"):
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        if what == "class":
            optimizer = torch.optim.SGD(optimizer.param_groups, lr=0.1)
        fleet.prepare(model, optimizer)
        before = look(fleet)["model"]
        said = ""
        where = Path(folder) / (str(fleet.rank) if what.startswith("unshared") else ".")
        try:
            fleet.save(where) if what == "unshared save" else fleet.load(where)
        except CheckpointError as error:
            said = str(error)
        after = look(fleet)["model"]
        return {"said": said, "same": all(torch.equal(after[name], before[name]) for name in before)}


@pytest.mark.parametrize(
    ("what", "sentence"),
    first_of(
        [
            ("model", "is of another model: its parameter layers.2.bias is not in this one."),
            ("groups", "The checkpoint's optimizer has other parameter groups than this run's."),
            ("class", "The checkpoint holds the state of AdamW, and this run uses SGD."),
            ("unshared save", "Worker 1 does not see in"),
            ("unshared load", "Worker 1 does not see in"),
        ]
    ),
)
def test_a_refusal_is_the_same_sentence_on_all_and_changes_nothing(tmp_path: Path, what: str, sentence: str) -> None:
    place = tmp_path / "0"
    run_ranks(1, start, NoShard(), str(place), [1])
    for rank in run_ranks(2, refused, str(tmp_path if what.startswith("unshared") else place), what):
        assert sentence in rank["said"] and rank["same"]


# Memory


def large(strategy: ShardingStrategy, folder: str, *, saves: bool) -> dict[str, float]:
    """How much more memory a rank has at most while it loads, and how much it reads, in MB."""
    with potluck.init(strategy=strategy) as fleet:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        fleet.prepare(model, torch.optim.AdamW(model.parameters()))
        if saves:
            fleet.backward(model(torch.ones(1, 1024)).square().mean(), samples=1)
            fleet.step()
            fleet.save(folder)
            fleet.wait_for_saves()
            return {}
        sizes: list[int] = []
        read_bytes = TensorFiles.read_bytes

        def counted(self: TensorFiles, buffer: memoryview, name: str, at: int) -> None:
            sizes.append(len(buffer))
            read_bytes(self, buffer, name, at)

        TensorFiles.read_bytes = counted  # type: ignore[method-assign]
        check = checkpoint_folder.check
        checkpoint_folder.check = lambda *arguments: _unmeasured(check, *arguments)
        before = _memory_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        fleet.load(folder)
        return {"grew": _memory_mb("VmHWM") - before, "read": sum(sizes) / 1e6}


def _unmeasured(check: Any, *arguments: Any) -> Any:
    """Comparing checksums maps a file, whose pages are the system's and not ours, but count as ours."""
    body = check(*arguments)
    Path("/proc/self/clear_refs").write_text("5")
    return body


def _memory_mb(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024 / 1e6


def save_large(strategy: ShardingStrategy, folder: str) -> dict[str, float]:
    return large(strategy, folder, saves=True)


def load_large(strategy: ShardingStrategy, folder: str) -> dict[str, float]:
    return large(strategy, folder, saves=False)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_nobody_holds_more_than_its_share_and_a_block(tmp_path: Path) -> None:
    """33.6 MB of parameters and twice as much state: of 101 MB, each of four ranks has 25."""
    run_ranks(2, save_large, FullShard(), str(tmp_path))
    for rank in run_ranks(4, load_large, FullShard(), str(tmp_path)):
        assert rank["read"] < 25.3  # its share to the byte, and a few counters of steps and random generators
        assert rank["grew"] < 16.8 + 4.2 + 1.0  # its state, since parameters are there already; a layer; and noise


# One plain file


@pytest.mark.parametrize("saved", first_of([FULL_3, ZERO_3, NO_1], are_single=True), ids=lambda setup: setup[1].kind)
def test_an_export_is_the_state_of_one_process(
    tmp_path: Path, saved: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run_ranks(saved[0], start, saved[1], str(tmp_path / "run" / "checkpoints"), [2])
    monkeypatch.setattr("potluck.save.export.BLOCK_BYTES", 64)
    out = tmp_path / "model.safetensors"
    assert command(monkeypatch, "export", str(tmp_path / "run"), str(out)) == 0
    assert "12 tensors of 1,018 numbers, as they were after step 2" in capsys.readouterr().err
    found = load_file(out)
    assert set(found) == set(told[0]["model"]) == set(Net(1).state_dict())
    for name, tensor in told[0]["model"].items():
        assert torch.equal(found[name], tensor), name
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]
    assert command(monkeypatch, "export", str(tmp_path / "run"), str(out)) == 2
    assert "is there already, and is not overwritten" in capsys.readouterr().err


def test_an_export_of_a_damaged_checkpoint_takes_the_one_before_or_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        checkpoint.write(tmp_path, Snapshot({"step": step}, {"model": {"a": torch.ones(3) * step}}))
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    out = tmp_path / "out.safetensors"
    assert command(monkeypatch, "export", str(tmp_path / "step-00000002"), str(out)) == 2
    assert "does not match its checksum" in capsys.readouterr().err and not out.exists()
    assert command(monkeypatch, "export", str(tmp_path), str(out)) == 0
    assert torch.equal(load_file(out)["a"], torch.ones(3))
    assert command(monkeypatch, "export", str(tmp_path / "nowhere"), str(tmp_path / "x")) == 2
    assert "There is no checkpoint in" in capsys.readouterr().err


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr("sys.argv", ["potluck", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code
