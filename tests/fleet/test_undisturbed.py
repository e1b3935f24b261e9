"""Nobody comes, nobody goes: fleets of 1, 2 and 4 against each other and against plain PyTorch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import potluck
from potluck.data.rows import mix, seed_everything
from potluck.fleet import invite
from potluck.fleet.pipe import Pipe
from potluck.fleet.reading import PeerReader
from potluck.fleet.tree import children, slice_rows
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, SLICES, STEPS, Fleet, assert_same, build
from tests.quick import first_of

Gradients = dict[str, torch.Tensor]


def floating(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]


def moved_by(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return torch.where(now.isfinite() & before.isfinite(), (now - before).float(), 0.0)


def plain_run(
    epochs: int = EPOCHS,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    slices_of_step: int = SLICES,
    rounded: Callable[[Gradients], Gradients] = lambda gradients: gradients,
    make: Callable[[], tuple[Any, Any, Any]] = build,
) -> dict[str, torch.Tensor]:
    """One process and no Potluck: a step's slices one after the other, their gradients added in the tree.

    `rounded`: what arrives of the gradients of a node of the tree, and of their mean. `make`: model, optimizer, data.
    """
    torch.set_num_threads(1)
    model, optimizer, (x, y) = make()
    scheduler = schedule(optimizer) if schedule is not None else None
    step = 0
    for epoch in range(epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, epoch)))
        for row in range(0, ROWS, BATCH):
            rows, step = min(BATCH, ROWS - row), step + 1
            slices = min(slices_of_step, rows // 2)  # BatchNorm takes no mean of a single row
            unit = 2.0**-5
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            found, changes = [], []
            for number, (start, end) in enumerate(slice_rows(row, rows, slices)):
                for name, buffer in model.named_buffers():
                    buffer.set_(before[name].clone())
                seed_everything(mix(1, step, number))
                batch = order[start:end]
                model.zero_grad()
                (F.cross_entropy(model(x[batch]), y[batch]) * ((end - start) * unit)).backward()
                found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                weight = (end - start) * unit
                changes.append({n: moved_by(b, before[n]) * weight for n, b in floating(model)})
                if number == 0:  # what has no mean is the first slice's
                    first = {name: buffer.clone() for name, buffer in model.named_buffers()}

            def add(
                parts: list[Gradients], node: tuple[int, int], arrives: Callable[[Gradients], Gradients]
            ) -> Gradients:
                if node[1] - node[0] == 1:
                    return arrives(parts[node[0]])
                left, right = (add(parts, child, arrives) for child in children(node))
                return arrives({name: left[name] + right[name] for name in left})

            scale = torch.tensor(1 / (rows * unit), dtype=torch.float32)
            total, moves = add(found, (0, slices), rounded), add(changes, (0, slices), lambda change: change)
            mean = rounded({name: value * scale for name, value in total.items()})
            moved = {name: value * scale for name, value in moves.items()}
            for name, parameter in model.named_parameters():
                parameter.grad = mean.get(name)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            for name, buffer in model.named_buffers():
                value = first[name]
                if buffer.is_floating_point() and before[name].isfinite().all():
                    value = torch.where(moved[name] == 0, before[name], before[name] + moved[name])
                buffer.set_(value)
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return plain_run()


@pytest.mark.parametrize("count", first_of([2, 1, 4]))
def test_a_fleet_of_any_size_computes_what_one_process_does(
    count: int, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path, at_least=count)
    for number in range(count):
        fleet.add(f"w{number}")
    assert_same(fleet.finish(), expected)
    assert [record.step for record in fleet.records] == list(range(1, STEPS + 1))
    assert {row["name"] for record in fleet.records for row in record.workers if row["rows"]} == {
        f"w{number}" for number in range(count)
    }


@pytest.mark.slow
def test_a_steps_batch_is_handed_out_in_as_many_slices_as_were_asked_for(tmp_path: Path) -> None:
    """Of 32 rows, 16; of the last 20 of an epoch, 10."""
    fleet = Fleet(tmp_path)
    fleet.add("w0", fit={"epochs": EPOCHS, "slices": 16})
    assert_same(fleet.finish(), plain_run(slices_of_step=16))


def test_slices_are_refused_where_workers_step_by_themselves(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    worker = fleet.add("w0", fit={"epochs": 1, "slices": 3}, policy=potluck.Cadence.published())
    worker.process.join(30)
    assert "Under Cadence each gets rows by its speed: leave batch.slices out." in (tmp_path / "w0.error").read_text()


@pytest.mark.parametrize("shared", first_of([(True,), (True, True), (True, False, True)], are_single=True), ids=len)
def test_workers_that_share_memory_with_the_host_compute_the_same(
    shared: tuple[bool, ...], tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    read = PeerReader._read_part_at
    monkeypatch.setattr(
        PeerReader, "_read_part_at", lambda *told: (shown.append(told[0]._connection.peer), read(*told))[1]
    )
    fleet = Fleet(tmp_path, encrypted=True, at_least=len(shared))  # the others' way is
    for number, is_shared in enumerate(shared):
        fleet.add(f"w{number}", shared=is_shared)
    assert_same(fleet.finish(), expected)
    assert len(set(shown)) == sum(shared)  # and the others sent theirs


@pytest.mark.parametrize("can_seal", first_of([True, False]))
def test_an_encrypted_fleet_computes_the_same(
    can_seal: bool, tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its host can seal what is sent, or leaves all inside TLS."""
    sealed: list[Pipe] = []
    seal = Pipe.seal_receiving
    monkeypatch.setattr(Pipe, "seal_receiving", lambda pipe, key: (sealed.append(pipe), seal(pipe, key))[1])
    monkeypatch.setattr(invite, "can_seal", lambda: can_seal)
    fleet = Fleet(tmp_path, encrypted=True, at_least=2)
    fleet.add("w0")
    fleet.add("w1")
    assert_same(fleet.finish(), expected)
    assert len(sealed) == (2 if can_seal else 0)
