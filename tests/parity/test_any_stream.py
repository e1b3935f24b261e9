"""Streams given to prepare(): the losses are those of one process that reads them."""

import io
import itertools
import json
import multiprocessing
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import potluck
from potluck.errors import Interrupted, PotluckError
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS = 44, 8, 3
EACH_SHARD = 11


def row(number: int) -> list[float]:
    return [number % 7 / 7, number % 5 / 5, number % 3 / 3]


def written(number: int) -> dict[str, Any]:
    return {"x": row(number), "name": f"row {number}"}


class Shuffling(IterableDataset[Any]):
    """Draws its order from the process's random numbers, as many do."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(ROWS))
        random.shuffle(order)
        return (written(number) for number in order)


def generate() -> Iterator[Any]:
    for number in range(ROWS):
        yield written(number)


def of_rank() -> Iterator[Any]:
    """Not the same stream on all workers, from some row on."""
    for number in range(ROWS):
        yield written(number + (number > 20) * int(os.environ.get("RANK", "0")))


def write_shards(folder: Path) -> None:
    for shard in range(ROWS // EACH_SHARD):
        with tarfile.open(folder / f"{shard}.tar", "w") as file:
            for number in range(shard * EACH_SHARD, (shard + 1) * EACH_SHARD):
                text = json.dumps(written(number)).encode()
                member = tarfile.TarInfo(f"{number:04}.json")
                member.size = len(text)
                file.addfile(member, io.BytesIO(text))


def make_stream(kind: str, folder: str) -> Any:
    match kind:
        case "datasets":
            import datasets

            made = datasets.Dataset.from_list([written(number) for number in range(ROWS)])
            return made.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5)
        case "webdataset":
            import webdataset

            urls = [str(path) for path in sorted(Path(folder).glob("*.tar"))]
            made = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=None, empty_check=False)
            return made.decode().map(lambda sample: sample["json"])
        case "loader":
            return DataLoader(Shuffling(), BATCH, collate_fn=collate, num_workers=2)
    return {"generator": generate, "shuffling": Shuffling(), "of rank": of_rank}[kind]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": [each["name"] for each in rows], "x": torch.tensor([each["x"] for each in rows])}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = ((model(batch["x"]) - batch["x"][:, :2]) ** 2).mean()
    return loss


def plain(kind: str, folder: str) -> list[float]:
    """One process. What the stream draws from no generator of its own is seeded as ours is, by its position."""
    model, optimizer = make()
    losses, stream = [], make_stream(kind, folder)
    stream = stream.dataset if isinstance(stream, DataLoader) else stream
    for epoch in range(EPOCHS):
        random.seed(epoch * 1_000_003)  # mix(seed 0, the epoch, row 0)
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        rows = iter(stream() if callable(stream) else stream)
        while some := list(itertools.islice(rows, BATCH)):
            loss = loss_of(model, collate(some))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def train(
    kind: str, data: str, policy: Any = potluck.Sync(), folder: str = "", stop_at: int = 0, fetchers: int = 0
) -> dict[str, Any]:
    from potluck.data import stream as streams

    streams.EVERY = 4
    multiprocessing.set_start_method("fork", force=True)  # as it is where no fork server started us
    with potluck.init(policy, patience_s=30) as fleet:
        model, optimizer = make()
        options = {"collate": collate, "batch_size": BATCH, "fetchers": fetchers} if kind != "loader" else {}
        model, _, loader = fleet.prepare(model, optimizer, make_stream(kind, data), **options)
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
        return {"losses": losses, "proofs": proofs, "loaded": loaded, "step": fleet.step_number}


@pytest.mark.parametrize("kind", first_of(["loader", "datasets", "webdataset", "generator"]))
def test_two_workers_have_the_losses_of_one_process_also_resumed_in_the_middle(kind: str, tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    write_shards(data)
    pytest.importorskip(kind) if kind in ("datasets", "webdataset") else None
    expected = plain(kind, str(data))
    first = run_ranks(2, train, kind, str(data), potluck.Sync(), str(folder), 8)
    again = run_ranks(2, train, kind, str(data), potluck.Sync(), str(folder))
    for begun, rest in zip(first, again, strict=True):
        assert rest["loaded"] and len(begun["losses"]) == 9
        assert begun["losses"] + rest["losses"] == pytest.approx(expected, abs=2e-6)
        assert "each of the 44 places of the stream was used exactly once" in rest["proofs"][-1]
        assert "of them were the same for all workers" in rest["proofs"][-1]


def test_windows_and_processes_that_fetch_use_each_place_once(tmp_path: Path) -> None:
    for found in run_ranks(2, train, "shuffling", "", potluck.Cadence(anchor=2), "", 0, 1):
        assert found["step"] == EPOCHS * -(-ROWS // BATCH)
        assert all("each of the 44 places of the stream was used exactly once" in proof for proof in found["proofs"])


def refused(kind: str) -> str:
    try:
        return str(train(kind, "")["proofs"])
    except PotluckError as error:
        return str(error)


def test_workers_whose_streams_differ_are_told_at_the_end_of_the_epoch() -> None:
    for said in run_ranks(2, refused, "of rank"):
        assert (
            "The stream gave worker 1 other rows than worker 0 in epoch 1" in said and "seed what it shuffles" in said
        )
