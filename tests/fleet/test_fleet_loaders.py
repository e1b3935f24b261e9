"""DataLoaders and streams under a host: workers come, go and are killed, and the losses are those of one process."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.fleet.fleet import Fleet
from tests.parity import test_any_loader as loaders


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


@pytest.mark.parametrize("kind", ["by length"])
def test_two_joiners_and_a_kill_have_the_losses_of_one_process(kind: str, tmp_path: Path) -> None:
    expected = loaders.plain(kind)
    fleet = Fleet(tmp_path)
    options = {"job": by_length, "steps": len(expected)}
    fleet.add("stays", hold_at=4, **options)
    killed = fleet.add("killed", hold_at=8, hold_for="never", **options)
    fleet.let_in("killed")
    fleet.wait_for_step(7)
    killed.kill()
    fleet.add("late", **options)
    assert ended(fleet) == pytest.approx(expected, abs=2e-6)
    proofs = [event.sentence for event in fleet.events if type(event).__name__ == "EpochDone"]
    assert len(proofs) == loaders.EPOCHS
    assert all("each of the 56 places in the sampler's order was used exactly once" in proof for proof in proofs)


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
