"""The ranks of one worker end together, but not before they have handed over what they hold."""

from types import SimpleNamespace
from typing import Any

import pytest

from potluck.errors import Interrupted, WorkerLost
from potluck.launch import processes
from potluck.launch.processes import GRACE_S, Team


def team_of(*codes: int | None) -> Any:
    nothing: Any = None
    ranks: Any = [SimpleNamespace(code=code, is_alive=code is None) for code in codes]
    return Team(ranks, {}, nothing)


@pytest.mark.parametrize(
    ("code", "ends"), [(1, True), (WorkerLost.exit_code, True), (-9, True), (0, False), (Interrupted.exit_code, False)]
)
def test_a_rank_that_failed_ends_the_others_and_one_that_was_asked_to_leave_does_not(
    code: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(processes, "end_workers", lambda ranks, first: ended.append(ranks))
    team = team_of(None, code)
    team.end_with_its_first(100.0)
    assert not ended, "it may end by itself"
    team.end_with_its_first(101.0 + GRACE_S)
    assert ended == ([team.ranks] if ends else [])
