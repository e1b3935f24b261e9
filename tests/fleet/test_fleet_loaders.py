"""DataLoaders and streams under a host: workers come, go and are killed, and the losses are those of one process."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch import nn

from tests.fleet.fleet import Fleet, assert_same
from tests.parity import test_any_loader as loaders
from tests.parity import test_any_stream as streams
from tests.quick import first_of


def loop(kind: str, fleet: Any) -> nn.Module:
    model, optimizer = loaders.make()
    model, _, loader = fleet.prepare(model, optimizer, loaders.make_loader(kind), slices=4)
    for _ in fleet.epochs(loaders.EPOCHS):
        for batch in loader:
            fleet.train(loaders.loss_of, batch)
            fleet.step()
    return model


def by_length(fleet: Any) -> nn.Module:
    return loop("by length", fleet)


def streaming(fleet: Any) -> nn.Module:
    model, optimizer = streams.make()
    options = {"batch_size": streams.BATCH, "collate": streams.collate, "slices": 4}
    model, _, loader = fleet.prepare(model, optimizer, streams.make_stream("shuffling", ""), **options)
    for _ in fleet.epochs(streams.EPOCHS):
        for batch in loader:
            fleet.train(streams.loss_of, batch)
            fleet.step()
    return model


def weighted(fleet: Any) -> nn.Module:
    return loop("weighted", fleet)


def weighted_otherwise(fleet: Any) -> nn.Module:
    loaders.ROWS = 25
    return loop("weighted", fleet)


def ended(fleet: Fleet) -> list[float]:
    """The loss of each step, once the run is over."""
    try:
        finish = fleet.server.wait(60)
        errors = [path.read_text() for path in fleet.folder.glob("*.error")]
        assert not errors, errors[0]
        assert finish is not None and not finish.failed, fleet.describe()
        return [record.loss for record in fleet.records]
    finally:
        fleet.close()


KINDS: dict[str, tuple[Any, Any, str]] = {
    "a sampler of batches": (by_length, lambda: loaders.plain("by length"), "56 places in the sampler's order"),
    "a stream": (streaming, lambda: streams.plain("shuffling", ""), "44 places of the stream"),
}


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_two_joiners_and_a_kill_have_the_losses_of_one_process(kind: str, tmp_path: Path) -> None:
    job, plain, places = KINDS[kind]
    expected = plain()
    fleet = Fleet(tmp_path)
    options = {"job": job, "steps": len(expected)}
    fleet.add("stays", hold_at=4, **options)
    fleet.wait_for_step(1)
    killed = fleet.add("killed", hold_at=8, hold_for="never", **options)
    fleet.let_in("killed")
    fleet.wait_for_step(7)
    (tmp_path / "go").unlink()
    killed.kill()
    fleet.add("late", **options)
    fleet.let_in("late")
    assert ended(fleet) == pytest.approx(expected, abs=2e-6)
    proofs = [event.sentence for event in fleet.events if type(event).__name__ == "EpochDone"]
    assert len(proofs) == loaders.EPOCHS
    assert all(f"each of the {places} was used exactly once" in proof for proof in proofs)


def test_a_joiner_whose_sampler_gives_another_order_is_told(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", job=weighted, hold_at=2)
    fleet.wait_for_step(1)
    other = fleet.add("other", job=weighted_otherwise)
    other.process.join(30)
    said = (tmp_path / "other.error").read_text()
    assert "This run has order of rows = in the order of its WeightedRandomSampler, which begins with rows" in said
    (tmp_path / "other.error").unlink()
    (tmp_path / "go").touch()
    assert len(ended(fleet)) == 9


class Noisy(torch.utils.data.Dataset[Any]):
    """Rows that draw random numbers, and tell who has read them."""

    def __len__(self) -> int:
        return 96

    def potluck_fingerprint(self) -> str:
        return "the same for all, whoever has read them"

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return row / 96 + torch.rand(3), os.getpid()


def noisy(fetchers: int, fleet: Any) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(Noisy(), 16, num_workers=fetchers)
    model, _, loader = fleet.prepare(model, optimizer, loader)
    readers: list[bool] = []
    for _ in fleet.epochs(2):
        for x, reader in loader:
            readers += [each != os.getpid() for each in reader.tolist()]
            fleet.backward((model(x) ** 2).mean(), samples=len(x))
            fleet.step()
    share = sum(readers) / len(readers) if readers else 1.0
    Path(os.environ["READ_ELSEWHERE"]).joinpath(f"{os.environ['POTLUCK_NAME']}.share").write_text(str(share))
    return model


def noisy_ahead(fleet: Any) -> nn.Module:
    multiprocessing.set_start_method("fork", force=True)  # as it is where no fork server started us
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return noisy(2, fleet)


def noisy_here(fleet: Any) -> nn.Module:
    return noisy(0, fleet)


def test_rows_are_fetched_ahead_under_a_host_and_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """One worker alone that reads rows itself; and three that fetch ahead, of which one is slow and one is killed."""
    found = []
    for name, job in {"here": noisy_here, "ahead": noisy_ahead}.items():
        place = tmp_path / name
        place.mkdir()
        fleet = Fleet(place)
        options = {"job": job, "steps": 12, "group": {"READ_ELSEWHERE": str(place)}}
        if name == "here":
            fleet.add("alone", **options)
        else:
            fleet.add("stays", hold_at=2, **options)
            fleet.wait_for_step(1)
            killed = fleet.add("killed", hold_at=5, hold_for="never", **options)
            fleet.let_in("killed")
            fleet.wait_for_step(4)
            (place / "go").unlink()
            killed.kill()
            fleet.add("late", slow_s=0.05, **options)
            fleet.let_in("late")
        losses = ended(fleet)
        found.append((losses, [worker.weights for worker in fleet.workers if (place / f"{worker.name}.pt").exists()]))
    (expected, (weights,)), (losses, others) = found
    assert losses == expected
    for other in others:
        assert_same(weights, other)
    assert float((tmp_path / "here" / "alone.share").read_text()) == 0.0
    assert float((tmp_path / "ahead" / "stays.share").read_text()) > 0.5
