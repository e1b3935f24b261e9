"""A store is one run's: another leaves it alone, with a sentence that names both."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from potluck.errors import StoreError
from potluck.store.sessions import ABOUT, Tenant, move_in
from potluck.store.store import Store
from tests.unit.test_datastore import files

FIRST = Tenant(
    name="tiny",
    settings={"optimizer.lr": 0.1, "model": "a hash", "rows": 9},
    data={"origin": "", "marks": {"0": ["aa", []], "8": ["bb", [0.1, 0.2, 0.3]]}},
    out="runs/a",
)


def store_in(folder: Path) -> Store:
    return Store(f"file://{folder}/store", run="link", generation=1, patience_s=5.0)


def test_the_workers_of_one_run_are_at_home_also_when_they_come_again(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    found = move_in(store, FIRST, 0)
    assert [move_in(store_in(tmp_path), FIRST, rank) for rank in (1, 0, 1)] == [found] * 3
    elsewhere = replace(FIRST, out="/another/machine")
    assert move_in(store_in(tmp_path), elsewhere, 2) == found  # where a worker keeps its folder is its own affair
    assert move_in(store_in(tmp_path), replace(FIRST, out=None), 0) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "other"}, "and this is other: it has name = tiny, and this one other."),
        ({"settings": FIRST.settings | {"optimizer.lr": 0.2}}, "it has optimizer.lr = 0.1, and this one 0.2."),
        ({"settings": FIRST.settings | {"model": "more"}}, "its model has other parameters."),
        (
            {"data": {"origin": "", "marks": {"0": ["cc", []], "8": ["bb", [0.1, 0.2, 0.3]]}}},
            "its data have as many rows, but what is in them is not the same: row 0 is another.",
        ),
        ({"out": "runs/b"}, "its folder is runs/a, and this one's runs/b."),
    ],
    ids=["name", "setting", "model", "data", "folder"],
)
def test_another_run_is_refused_and_nothing_is_touched(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = move_in(store_in(tmp_path), FIRST, 0)
    before = {path: (tmp_path / "store" / path).read_bytes() for path in files(tmp_path / "store")}
    with pytest.raises(StoreError) as refused:
        move_in(store_in(tmp_path), replace(FIRST, **change), 0)
    sentence = str(refused.value)
    assert f"is where another run meets: tiny ({found}, begun 20" in sentence and said in sentence
    assert "stages.protocol.url" in sentence and "set stages.protocol.generation to 2" in sentence
    assert {path: (tmp_path / "store" / path).read_bytes() for path in files(tmp_path / "store")} == before


def test_of_two_runs_that_begin_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second looks before the first has written, and writes after it."""
    second = store_in(tmp_path)
    get, looks = second.get_bytes, []

    def blind_at_first(key: str) -> bytes | None:
        looks.append(key)
        if len(looks) == 1:
            move_in(store_in(tmp_path), FIRST, 0)
            return None
        return get(key)

    monkeypatch.setattr(second, "get_bytes", blind_at_first)
    with pytest.raises(StoreError, match="another run meets: tiny"):
        move_in(second, replace(FIRST, name="other"), 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 60_000, json.dumps({"id": 1, "name": [], "settings": {}})])
def test_what_is_no_run_is_a_sentence(text: str, tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put_bytes(f"{ABOUT}/run", text.encode())
    with pytest.raises(StoreError, match="cannot be read"):
        move_in(store, FIRST, 0)


def test_what_another_has_written_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    move_in(store_in(tmp_path), replace(FIRST, name="\x1b[2Jtiny"), 0)
    with pytest.raises(StoreError) as refused:
        move_in(store_in(tmp_path), FIRST, 0)
    assert "\x1b" not in str(refused.value)
