"""What runs under every scheduler are compared with."""

from pathlib import Path

import pytest

from tests.clusters.runs import SETTINGS, alone, furnish


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return furnish(tmp_path / "place")


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on this machine: of one worker, of two, and led by a host."""
    place = furnish(tmp_path_factory.mktemp("here"))
    for count in ("1", "2"):
        alone(place, "train", "tiny.toml", "-n", count, "--out", f"of-{count}", *SETTINGS)
    alone(place, "host", "tiny.toml", "--out", "hosted", *SETTINGS)
    return place
