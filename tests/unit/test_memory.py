"""What those who are left can go on from, after a loss."""

import json
from pathlib import Path

import pytest

from potluck.save import memory
from potluck.save.memory import NEIGHBOUR, OWN, STANDING, Recovery, Start, numbered, rank_folder


def keep(start: Start, number: int, step: int, ranks: tuple[int, ...] | None = None) -> None:
    """A refresh, as all ranks write it; or as far as some of them came."""
    for rank in range(len(start.ranks)) if ranks is None else ranks:
        for kind in (OWN, NEIGHBOUR):
            place = numbered(rank_folder(start.folder, rank) / kind, number)
            place.mkdir(parents=True)
            (place / STANDING).write_text(json.dumps({"step": step}))


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path / "start-0", (0, 1, 2, 3))


def plan(start: Start, *lost: int) -> Recovery:
    start.lose(lost)
    recovery = start.plan_recovery(lost)
    assert isinstance(recovery, Recovery), recovery
    return recovery


def test_a_lost_part_is_its_neighbours_copy(start: Start) -> None:
    keep(start, 1, step=10)
    recovery = plan(start, 3)
    assert recovery.step == 10 and recovery.ranks == (0, 1, 2) and recovery.lost == (3,)
    parts = [str(Path(part).relative_to(start.folder)) for part in recovery.parts]
    assert parts == [f"rank-{rank}/own-00000001" for rank in range(3)] + ["rank-0/neighbour-00000001"]
    assert not rank_folder(start.folder, 3).exists()


def test_the_newest_refresh_that_is_whole_counts(start: Start) -> None:
    keep(start, 1, step=10)
    keep(start, 2, step=20)
    keep(start, 3, step=30, ranks=(0, 2))
    assert plan(start, 1).step == 20


def test_a_refresh_is_whole_if_only_the_lost_one_had_not_ended_it(start: Start) -> None:
    keep(start, 1, step=10)
    keep(start, 2, step=20, ranks=(0, 2, 3))
    assert plan(start, 1).step == 20


def test_several_may_be_lost_unless_two_of_them_are_neighbours(start: Start) -> None:
    keep(start, 1, step=10)
    assert start.plan_recovery((3, 0)) == "Worker 0, which kept a copy of worker 3's part, was lost with it."
    assert start.plan_recovery((0, 1, 2, 3)) == ""
    assert plan(start, 0, 2).ranks == (1, 3)


def test_where_nothing_was_kept_nothing_is_said(start: Start) -> None:
    assert start.plan_recovery((1,)) == ""


def test_a_second_loss_needs_a_later_step(start: Start) -> None:
    keep(start, 1, step=10)
    second = start.next(plan(start, 1))
    assert second.folder.name == "start-1" and second.ranks == (0, 2, 3)
    keep(second, 1, step=10)
    assert second.plan_recovery((2,)) == "They had continued from step 10 before, and had kept no later step since."
    keep(second, 2, step=20)
    assert plan(second, 2).ranks == (0, 2)


def test_the_next_start_is_told_and_forgets_the_one_before(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(start, 1, step=10)
    recovery = plan(start, 1)
    second = start.next(recovery)
    monkeypatch.setenv(memory.MEMORY, str(second.folder))
    assert memory.my_recovery() == recovery
    assert recovery.of_those_left((4.0, 3.0, 2.0, 1.0)) == (4.0, 2.0, 1.0)
    assert recovery.of_those_left(()) == ()
    recovery.forget()
    assert not start.folder.exists() and second.folder.exists()


def test_what_a_run_kept_is_gone_when_it_ends() -> None:
    with memory.first_start(2) as start:
        assert start is not None
        keep(start, 1, step=0)
    assert not start.folder.parent.exists()


def test_what_a_killed_run_left_in_memory_is_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PLACE", tmp_path)
    left = tmp_path / "potluck-left"
    left.mkdir()
    (left / "held").touch()  # nobody has it locked
    with memory.first_start(2) as mine, memory.first_start(2) as other:
        assert mine is not None and other is not None
        assert not left.exists()
        assert mine.folder.exists() and other.folder.exists()  # the second has not swept away the first
    assert list(tmp_path.iterdir()) == []
