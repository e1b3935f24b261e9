"""A base and rows by their ids: from a hub, which is a server on loopback, and then from the cache without one."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_cli import POTLUCK
from tests.finetune.hub import serving
from tests.finetune.made import chats, make_place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOLD = ("--set", "fit.epochs=1", "--set", "workers.threads=1", "--set", "optimizer.lr=1e-2")


def tune(place: Path, out: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*POTLUCK, "finetune", "some/base", "some/rows", "--out", out, *TOLD]
    own = os.environ | {"HF_HOME": str(place / "home")} | env
    return subprocess.run(command, cwd=place, env=own, capture_output=True, text=True, timeout=120)


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["event"] == "step_done"]


def test_ids_are_fetched_from_a_hub_once_and_found_in_the_cache_without_one(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    place = make_place(tmp_path)
    (place / "rows").mkdir()
    for split, rows in {"train": chats(20), "test": chats(4)}.items():
        (place / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(some__base=place / "base", datasets__some__rows=place / "rows") as (hub, asked):
        first = tune(place, "first", HF_ENDPOINT=hub)
        assert first.returncode == 0, first.stderr
        assert any("/some/base/resolve/" in each for each in asked) and any("train.jsonl" in each for each in asked)
        assert "20 rows to train on, 4 to validate with" in first.stderr, first.stderr
        lacking = tune(place, "other", HF_ENDPOINT=hub, HF_HOME=str(place / "empty"), HF_HUB_OFFLINE="1")
        assert lacking.returncode == 2 and "hf download some/base" in lacking.stderr, lacking.stderr
    second = tune(place, "second", HF_HUB_OFFLINE="1")
    assert second.returncode == 0, second.stderr
    shutil.rmtree(place / "home" / "datasets")  # as `hf download` leaves it, which `datasets` alone does not look at
    third = tune(place, "third", HF_HUB_OFFLINE="1")
    assert third.returncode == 0, third.stderr
    assert losses(place / "first") == losses(place / "second") == losses(place / "third") != []
