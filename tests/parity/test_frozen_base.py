"""A frozen base is each worker's own: it neither travels nor is saved, in any form. The judge is plain torch."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import potluck
from potluck import Cadence, Direct, FullShard, ShardGradOp, Stages
from potluck.environment import RENDEZVOUS
from potluck.errors import CheckpointError
from potluck.replica.frozen_base import find_base
from potluck.save import checkpoint_folder
from potluck.save.export import export
from potluck.stages import stage_planner
from tests import lora
from tests.quick import first_of
from tests.ranks import RankFailed, run_ranks

GROUPS: dict[str, dict[str, Any]] = {
    "whole": {},
    "zero": {"strategy": ShardGradOp()},
    "full": {"strategy": FullShard()},
    "uneven": {"strategy": FullShard(weights=(3.0, 1.0))},
    "windows": {"policy": Cadence.published(anchor=2, max_anchor=2)},
    "stages": {"stages": Stages(protocol=Direct())},
}


def meet() -> None:
    place, rank, world = f"file://{os.environ[RENDEZVOUS]}", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)


def train_everywhere(folder: str, names: list[str], forms: list[str], is_peft: bool) -> dict[str, Any]:
    """Each an epoch, and the rest of it in another run, which loads what the first has saved."""
    stage_planner.MEASURE_S = 0.0
    meet()
    found: dict[str, Any] = {}
    for name in names:
        for form in forms:
            place, losses = Path(folder) / f"{name}-{form}", []
            for epochs in (1, 2):
                with potluck.init(**GROUPS[name], patience_s=30) as fleet:
                    save = partial(save_adapter, place / "adapter") if is_peft and epochs == 2 else lambda model: None
                    told, state = lora.train(fleet, form, is_peft=is_peft, epochs=epochs, folder=place, then=save)
                    losses += told
            found[f"{name}-{form}"] = {"losses": losses, "state": state}
    dist.destroy_process_group()
    return found


def save_adapter(folder: Path, model: nn.Module) -> None:
    """As a script of peft ends, on every rank."""
    model.save_pretrained(folder)  # type: ignore[operator]


def saved(folder: Path) -> dict[str, Tensor]:
    """Of the newest checkpoint's model."""
    found: dict[str, Tensor] = {}
    for path in checkpoint_folder.found(folder)[0].glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def check_all(folder: Path, names: list[str], forms: list[str], *, is_peft: bool = False) -> None:
    told = run_ranks(2, train_everywhere, str(folder), names, forms, is_peft, timeout_s=150)[0]
    for form in forms:
        judge, weights = lora.plain_losses(form, is_peft=is_peft)
        for name in names:
            run = told[f"{name}-{form}"]
            if name != "windows":
                near = lora.nearness(form, is_peft=is_peft)
                torch.testing.assert_close(run["losses"], judge, **near, msg=f"{name} {form}")
                if form != "bf16":
                    torch.testing.assert_close(run["state"], weights, rtol=1e-4, atol=1e-5)
            if is_peft:
                adapter = load_file(folder / f"{name}-{form}" / "adapter" / "adapter_model.safetensors")
                assert_equal(adapter, {key.replace(".default", ""): each for key, each in run["state"].items()})
            kept = {key.partition("[")[0].partition(":")[0] for key in saved(folder / f"{name}-{form}")}
            assert kept and all(lora.trained_of({key: torch.empty(0)}) for key in kept), f"{name} {form}: {kept}"


@pytest.mark.parametrize("names", first_of(["whole full", "zero uneven windows stages"]))
def test_a_checkpoint_holds_what_is_trained_under_every_strategy(tmp_path: Path, names: str) -> None:
    check_all(tmp_path, names.split(), ["fp32"])


@pytest.mark.parametrize("form", first_of(["bf16", "int8", "4bit", "bf16 given", "int8 given", "4bit given"]))
def test_a_base_may_have_any_form(tmp_path: Path, form: str) -> None:
    pytest.importorskip({"int8": "torchao", "4bit": "bitsandbytes"}.get(form[:4], "torch"))
    check_all(tmp_path, ["full"] if form == "bf16" else ["whole", "zero", "full", "uneven"], [form])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", lora.BASES)
def test_peft_trains_the_same_over_every_form_of_base(tmp_path: Path, form: str) -> None:
    pytest.importorskip("peft")
    check_all(tmp_path, ["whole", "zero", "full", "uneven"], [form], is_peft=True)


def one_epoch(folder: Path | None, *, seed: int = 3, form: str = "fp32", epochs: int = 1) -> dict[str, Tensor]:
    with potluck.init() as fleet:
        return lora.train(fleet, form, seed=seed, folder=folder, epochs=epochs)[1]


def test_another_base_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    one_epoch(tmp_path)
    model, optimizer = lora.build("fp32", seed=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with potluck.init() as fleet:
        fleet.prepare(model, optimizer, lora.rows(is_peft=False), batch_size=8)
        with pytest.raises(CheckpointError, match=r"another frozen base .*: 6 tensors of .*Nothing was"):
            fleet.load(tmp_path)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_checkpoint_that_holds_the_whole_model_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions wrote it, and as one is written whose base was too small to be left out."""
    with monkeypatch.context() as patched:
        patched.setattr("potluck.engine.engine.find_base", lambda model: None)
        one_epoch(tmp_path / "old")
        assert len(saved(tmp_path / "old")) == 12, "all of it"
    one_epoch(tmp_path / "new")
    assert len(saved(tmp_path / "new")) == 6
    judge = lora.plain_losses("fp32")[1]
    for name in ("old", "new"):
        assert_equal(one_epoch(tmp_path / name, epochs=2), judge)
        assert len(saved(tmp_path / name)) == 6, "what is the same base is left out from now on"
    # Another base comes with an old checkpoint, and is saved with the next, since it is not what this script builds.
    with monkeypatch.context() as patched:
        patched.setattr("potluck.engine.engine.find_base", lambda model: None)
        one_epoch(tmp_path / "other")
    assert_equal(one_epoch(tmp_path / "other", seed=4, epochs=2), judge)
    assert len(saved(tmp_path / "other")) == 12


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_is_changed_by_hand_is_saved(tmp_path: Path) -> None:
    """Such as a layer whose weights follow those of another."""
    model, optimizer = lora.build("fp32")
    with potluck.init() as fleet:
        model, _, loader = fleet.prepare(model, optimizer, lora.rows(is_peft=False), batch_size=8)
        follower = model.layers[1].layer.weight  # type: ignore[index, union-attr]
        fleet.after_step.append(lambda: follower.data.mul_(0.5))
        for batch in loader:
            fleet.train(lora.loss_of, batch)
            fleet.step()
        fleet.save(tmp_path)
        fleet.wait_for_saves()
    kept = saved(tmp_path)
    assert len(kept) == 7 and torch.equal(kept["layers.1.layer.weight"], follower)
    again, optimizer = lora.build("fp32")
    with potluck.init() as fleet:
        fleet.prepare(again, optimizer, lora.rows(is_peft=False), batch_size=8)
        assert fleet.load(tmp_path)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def differ(form: str) -> list[str]:
    rank = int(os.environ["RANK"])
    with potluck.init() as fleet:
        model, optimizer = lora.build(form, seed=3 + rank)
        heard: list[str] = []
        fleet.run.say = heard.append
        fleet.prepare(model, optimizer, lora.rows(is_peft=False), batch_size=8)
        assert fleet.run.base is None
        weight = model.layers[1].layer.weight.flatten()  # type: ignore[index, union-attr]
        return [*heard, str(weight[:3].tolist())]


def test_workers_whose_bases_differ_take_the_first_ones_or_are_told_so(tmp_path: Path) -> None:
    (first, *_), (second, *_) = told = run_ranks(2, differ, "fp32")
    assert "differ between worker 0 and worker 1, first in layers.0.layer.weight. All take worker 0's" in first
    assert first == second and told[0][-1] == told[1][-1]


@pytest.mark.slow
def test_what_cannot_be_sent_must_be_the_same() -> None:
    pytest.importorskip("torchao")
    with pytest.raises(RankFailed, match="They cannot be sent: load the same base, in the same form"):
        run_ranks(2, differ, "int8")


def test_what_is_smaller_than_what_is_trained_is_no_base() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    assert find_base(model) is None
    model[1].bias.requires_grad_(False)
    found = find_base(model)
    assert found is not None and set(found.hashes) == {"0.weight", "0.bias", "1.bias"}
    model[0].weight.data[0, 0] += 1
    changed = find_base(model)
    assert changed is not None and changed.hash != found.hash
    assert changed.hash_of(["0.bias", "1.bias"]) == found.hash_of(["1.bias", "0.bias"])


def test_an_export_is_what_was_trained_and_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = one_epoch(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "plain.safetensors")
    assert_equal(load_file(tmp_path / "plain.safetensors"), weights)
    said = capsys.readouterr().err
    assert "It is what was trained. The frozen base below it (6 tensors of" in said


def test_a_tied_frozen_parameter_takes_its_bytes_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 6, bias=False))
    model[0].weight.requires_grad_(False)
    model[1].weight = model[0].weight
    assert find_base(model) is None
    model[2].weight.requires_grad_(False)
    found = find_base(model)
    assert found is not None and set(found.hashes) == {"0.weight", "1.weight", "2.weight"}
