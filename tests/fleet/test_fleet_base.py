"""A frozen base under a host: each worker brings its own, newcomers are sent what is trained, another is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from potluck.fleet import transfers
from potluck.save import checkpoint_folder
from tests import lora
from tests.fleet.fleet import Fleet, wait_until
from tests.quick import first_of

pytestmark = pytest.mark.timeout(120)
EPOCHS = 4


def train(fleet: Any, *, form: str, name: str, folder: str, is_peft: bool = False, seed: int = 3) -> Any:
    losses, _ = lora.train(fleet, form, is_peft=is_peft, seed=seed, epochs=EPOCHS)
    weights = lora.trained_of(dict(fleet.run.prepared().model.named_parameters()))
    torch.save({"losses": losses, "weights": weights}, Path(folder) / f"{name}.done")
    return fleet.run.prepared().model


def add(fleet: Fleet, name: str, form: str, *, is_peft: bool = False, seed: int = 3, **options: Any) -> Any:
    job = partial(train, form=form, name=name, folder=str(fleet.folder), is_peft=is_peft, seed=seed)
    return fleet.add(name, job=job, steps=-1, **options)


def check_run(
    folder: Path, form: str, monkeypatch: pytest.MonkeyPatch, *, is_peft: bool = False, **options: Any
) -> None:
    """The first is killed once the late one has its weights."""
    sizes: list[int] = []

    def seen(header: str) -> list[tuple[str, int]]:
        found = stream_files(header)
        sizes.append(sum(size for _, size in found))
        return found

    stream_files = transfers.stream_files
    monkeypatch.setattr(transfers, "stream_files", seen)
    fleet = Fleet(folder)
    first = add(fleet, "first", form, is_peft=is_peft, hold_at=2)
    fleet.wait_for_step(2, 60)
    add(fleet, "late", form, is_peft=is_peft, slow_s=0.05)
    fleet.let_in("late")
    fleet.wait_for_step(5, 60)
    first.kill()
    finish = fleet.server.wait(60)
    fleet.close()
    assert not list(folder.glob("*.error")), next(folder.glob("*.error")).read_text()
    assert finish is not None and not finish.failed
    found = torch.load(folder / "late.done", weights_only=True)
    losses, judge = plain(form, is_peft=is_peft)
    near = lora.nearness(form, is_peft=is_peft)
    torch.testing.assert_close(found["losses"], losses[-len(found["losses"]) :], **near)
    if form != "bf16":
        weights = {name: weight.detach() for name, weight in found["weights"].items()}
        torch.testing.assert_close(weights, judge, rtol=1e-4, atol=1e-5)
    trained = sum(weight.nbytes for weight in judge.values())
    assert sizes and max(sizes) < 3 * trained + 40_000, "what is trained, its optimizer, and little else"
    newest = checkpoint_folder.found(folder / "checkpoints")[0]
    assert checkpoint_folder.check(newest)["base"]["tensors"] > 0


def plain(form: str, *, is_peft: bool) -> Any:
    epochs, lora.EPOCHS = lora.EPOCHS, EPOCHS
    try:
        return lora.plain_losses(form, is_peft=is_peft)
    finally:
        lora.EPOCHS = epochs


@pytest.mark.parametrize("form", first_of(["bf16", "fp32", "4bit", "int8"]))
def test_a_newcomer_is_sent_what_is_trained_and_the_run_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    pytest.importorskip({"int8": "torchao", "4bit": "bitsandbytes"}.get(form, "torch"))
    check_run(tmp_path, form, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("form", lora.BASES)
def test_peft_does_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    pytest.importorskip("peft")
    check_run(tmp_path, form, monkeypatch, is_peft=True)


def test_a_worker_with_another_base_is_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    add(fleet, "first", "fp32", hold_at=1)
    fleet.wait_for_step(1)
    add(fleet, "other", "fp32", seed=4)
    wait_until((tmp_path / "other.error").exists)
    said = (tmp_path / "other.error").read_text()
    assert "The numbers of your frozen parameters are not those of this run's" in said
    assert "load the same base, in the same form" in said and "potluck join --fetch-base" in said
    (tmp_path / "other.error").unlink()
    (tmp_path / "go").touch()
    finish = fleet.server.wait(60)
    fleet.close()
    assert finish is not None and not finish.failed and (tmp_path / "first.done").exists()
