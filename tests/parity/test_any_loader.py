"""A DataLoader of torch given to prepare(): the losses are those of one process that iterates over it."""

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

import potluck
from potluck.errors import ConfigError, Interrupted, PotluckError
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, EPOCHS = 26, 3


class Rows(Dataset[Any]):
    """Rows of many lengths."""

    def __init__(self, broken: int | None = None, rows: int = ROWS) -> None:
        numbers = torch.Generator().manual_seed(4)
        self.sizes = [1 + row * 7 % 5 for row in range(rows)]
        self.rows = [(torch.rand(size, 3, generator=numbers), torch.rand(2, generator=numbers)) for size in self.sizes]
        self.broken = broken

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if row == self.broken:
            os._exit(3)
        return self.rows[row]


def padded(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    longest = max(len(x) for x, _ in rows)
    x = torch.stack([nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x, _ in rows])
    mask = torch.tensor([[place < len(x) for place in range(longest)] for x, _ in rows])
    return {"name": "padded", "x": x, "mask": mask, "y": torch.stack([y for _, y in rows])}


class ByLength(Sampler[list[int]]):
    """Rows of like length together, in batches of many sizes, the batches shuffled by `random`."""

    def __init__(self, rows: Rows, epoch_is_longer: bool = False) -> None:
        self.rows, self.epoch, self.grows = rows, 0, epoch_is_longer

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.rows)), key=lambda row: (self.rows.sizes[row], row))
        cuts = [0, 1, 4, 9, 11, 17, 25, len(order)] + ([3] if self.grows and self.epoch == 2 else [])
        cuts.sort()
        batches = [order[a:b] for a, b in itertools.pairwise(cuts)]
        random.shuffle(batches)
        return iter(batches)


def make_loader(kind: str) -> "DataLoader[Any]":
    rows, numbers = Rows(), torch.Generator().manual_seed(11)
    match kind:
        case "shuffled":
            return DataLoader(rows, 8, shuffle=True, generator=numbers, collate_fn=padded, num_workers=1)
        case "weighted":
            sampler = WeightedRandomSampler(torch.arange(ROWS).float(), 21, generator=numbers)
            return DataLoader(rows, 8, sampler=sampler, collate_fn=padded)
        case "by length":
            return DataLoader(rows, batch_sampler=ByLength(rows), collate_fn=padded)
        case "growing":
            return DataLoader(rows, batch_sampler=ByLength(rows, epoch_is_longer=True), collate_fn=padded)
        case "shorter on one":
            rows = Rows(rows=ROWS - 2 * int(os.environ.get("RANK", "0")))
        case "seeded by rank":
            numbers.manual_seed(int(os.environ.get("RANK", "0")))
        case "dying":
            return DataLoader(Rows(broken=3), 8, collate_fn=padded, num_workers=1)
    return DataLoader(rows, 8, shuffle=True, generator=numbers, collate_fn=padded, drop_last=True)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = (((model(batch["x"]) * batch["mask"][..., None]).sum(1) - batch["y"]) ** 2).mean()
    return loss


def plain(kind: str) -> list[float]:
    """One process; what its sampler draws from no generator of its own is seeded for each epoch, as ours is."""
    model, optimizer = make()
    loader, losses = make_loader(kind), []
    for epoch in range(EPOCHS):
        random.seed(epoch)
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def train(
    kind: str, strategy: Any = potluck.NoShard(), policy: Any = potluck.Sync(), folder: str = "", stop_at: int = 0
) -> dict[str, Any]:
    multiprocessing.set_start_method("fork", force=True)  # as it is where no fork server started us
    with potluck.init(policy, strategy, patience_s=30) as fleet:
        model, optimizer = make()
        model, _, loader = fleet.prepare(model, optimizer, make_loader(kind))
        losses, proofs = [], []
        loaded = bool(folder) and fleet.load(folder)
        try:
            for _ in fleet.epochs(EPOCHS, folder or None):
                for batch in loader:
                    fleet.train(loss_of, batch)
                    if fleet.step() is not None:
                        assert fleet.last_step is not None
                        losses.append(fleet.last_step.loss)
                    if stop_at and fleet.step_number == stop_at:
                        fleet.request_stop()
                assert fleet.last_epoch is not None
                proofs.append(fleet.last_epoch.sentence)
        except Interrupted:
            pass
        held = fleet.evaluate(loss_of, make_loader("weighted")) if not stop_at else 0.0
        return {"losses": losses, "proofs": proofs, "loaded": loaded, "held": held, "step": fleet.step_number}


@pytest.mark.parametrize("kind", first_of(["shuffled", "weighted", "by length"]))
def test_two_workers_have_the_losses_of_one_process(kind: str) -> None:
    expected = plain(kind)
    for found in run_ranks(2, train, kind):
        assert found["losses"] == pytest.approx(expected, abs=2e-6)
        counted = {"weighted": "the 21 places in the sampler's order", "by length": "the 56 places in the sampler's"}
        told = counted.get(kind, "its 26 samples")
        assert all(f"each of {told}" in proof and "used exactly once" in proof for proof in found["proofs"])


def test_batches_by_length_go_through_split_models_and_windows() -> None:
    expected = plain("by length")
    for found in run_ranks(2, train, "by length", potluck.FullShard()):
        assert found["losses"] == pytest.approx(expected, abs=2e-6)
    for found in run_ranks(2, train, "by length", potluck.NoShard(), potluck.Cadence(anchor=2)):
        assert found["step"] == len(expected) and found["held"] > 0
        assert all("each of the 56 places in the sampler's order was used exactly" in each for each in found["proofs"])


@pytest.mark.parametrize("kind", first_of(["weighted", "by length"]))
def test_a_run_that_is_stopped_in_the_third_epoch_resumes_there(kind: str, tmp_path: Path) -> None:
    expected = plain(kind)
    at = 2 * len(expected) // 3 + 1
    first = run_ranks(2, train, kind, potluck.NoShard(), potluck.Sync(), str(tmp_path), at)[0]
    again = train(kind, folder=str(tmp_path))
    assert again["loaded"] and len(first["losses"]) == at + 1
    assert first["losses"] + again["losses"] == pytest.approx(expected, abs=2e-6)


def refused(kind: str, folder: str = "") -> str:
    try:
        train(kind, folder=folder)
    except PotluckError as error:
        return str(error)
    return ""


def test_loaders_that_differ_between_workers_are_told_in_a_sentence() -> None:
    for said in run_ranks(2, refused, "shorter on one"):
        assert "The data differs between workers" in said and "24 rows in batches of 8" in said
    for said in run_ranks(2, refused, "seeded by rank"):
        assert "has 24 rows in batches of 8, in the order of its RandomSampler, which begins with rows" in said
        assert "in the same order; it is shared out here" in said


def test_a_sampler_that_grows_is_told_of_after_what_is_done_is_saved(tmp_path: Path) -> None:
    for said in run_ranks(2, refused, "growing", str(tmp_path)):
        assert "The sampler ByLength gave 64 places in epoch 3, and 56 in the first epoch" in said
    fleet = potluck.init()
    model, optimizer = make()
    fleet.prepare(model, optimizer, make_loader("by length"))
    assert fleet.load(tmp_path) and fleet.run.progress.position.epoch == 2 and fleet.run.progress.position.row == 0


def test_a_process_that_dies_while_it_fetches_is_a_sentence(tmp_path: Path) -> None:
    said = refused("dying")
    assert "A process that fetches rows has ended by itself" in said and "num_workers=0" in said


def test_a_checkpoint_is_not_continued_in_another_order(tmp_path: Path) -> None:
    train("weighted", folder=str(tmp_path), stop_at=4)
    fleet = potluck.init()
    model, optimizer = make()
    sampler = WeightedRandomSampler(torch.ones(ROWS), 21, generator=torch.Generator().manual_seed(12))
    fleet.prepare(model, optimizer, DataLoader(Rows(), 8, sampler=sampler, collate_fn=padded))
    with pytest.raises(ConfigError, match=r"in the middle of epoch 2, and the sampler now gives that epoch in another"):
        fleet.load(tmp_path)


def test_the_trainer_takes_loaders_for_training_and_for_looking(tmp_path: Path) -> None:
    model, optimizer = make()
    trainer = potluck.Trainer(
        model,
        optimizer,
        make_loader("shuffled"),
        loss=loss_of,
        folder=tmp_path / "run",
        validation=make_loader("weighted"),
        config=potluck.FitConfig(epochs=EPOCHS, progress=False),
    )
    summary = trainer.fit()
    assert summary.loss == pytest.approx(plain("shuffled")[-1], abs=1e-6) and summary.validation_loss is not None
    assert trainer.batch.size == 8 and trainer.batch.fetchers == 1
