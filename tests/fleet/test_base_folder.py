"""The base model's folder, from a host to a machine that lacks it."""

import json
from pathlib import Path
from typing import Any

import pytest

from potluck.errors import ConfigError, TheirProtocolError, WorkerLost
from potluck.events import Event, WorkerWent
from potluck.fleet import base_folder
from potluck.fleet.base_folder import PIECE_BYTES, BaseFolder, BaseSender, check_files, fetch_base
from potluck.waiting import wait_until
from potluck.wire.messages import BaseFiles, BaseWanted
from tests.fleet.fleet import Fleet, serve

WEIGHTS = bytes(range(256)) * (9 * PIECE_BYTES // 256) + b"and a rest"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    (tmp_path / "blob").write_bytes(WEIGHTS)
    (found / "model.safetensors").symlink_to(tmp_path / "blob")  # as in a cache of the hub's
    (found / "config.json").write_text('{"model_type": "llama"}')
    (found / "empty.txt").write_text("")
    (found / "pytorch_model.bin").write_bytes(b"a pickle")
    (found / ".hidden.json").write_text("{}")
    return found


def serving(place: Path, folder: Path | None, *, encrypted: bool = True) -> Any:
    place.mkdir()
    server, invite, journal = serve(place, encrypted=encrypted)
    if folder is not None:
        server.serve_base(folder)
    server.start()
    return server, invite, journal


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_folder_is_fetched_once_and_without_what_could_run(tmp_path: Path, folder: Path, encrypted: bool) -> None:
    server, invite, journal = serving(tmp_path / "run", folder, encrypted=encrypted)
    heard: list[tuple[int, int]] = []
    events: list[Event] = []
    server.on_event = events.append
    base_folder.TELL_S, before = 0.0, base_folder.TELL_S
    try:
        place = fetch_base(invite, tmp_path / "cache", on_progress=lambda *told: heard.append(told))
        assert place is not None and place.parent == tmp_path / "cache"
        assert sorted(path.name for path in place.iterdir()) == ["config.json", "empty.txt", "model.safetensors"]
        assert (place / "model.safetensors").read_bytes() == WEIGHTS
        total = len(WEIGHTS) + 23
        assert heard[-1] == (total, total) and heard == sorted(heard) and len(heard) > 9
        heard.clear()
        assert fetch_base(invite, tmp_path / "cache", on_progress=lambda *told: heard.append(told)) == place
        assert not heard, "only the list has come again"
        assert wait_until(lambda: len(events) == 2, 10.0)
        assert all(isinstance(event, WorkerWent) and event.polite and "base model" in event.reason for event in events)
    finally:
        base_folder.TELL_S = before
        server.stop()
        journal.close()


def test_a_host_without_one_says_so(tmp_path: Path) -> None:
    server, invite, journal = serving(tmp_path / "run", None)
    assert fetch_base(invite, tmp_path / "cache") is None
    server.stop()
    journal.close()


def test_an_interrupted_fetch_resumes_and_a_wrong_file_is_fetched_anew(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, invite, journal = serving(tmp_path / "run", folder)
    asked: list[int] = []
    piece = BaseFolder.piece

    def counted(self: BaseFolder, wanted: BaseWanted) -> Any:
        asked.append(wanted.start)
        if wanted.start == 5 * PIECE_BYTES and asked.count(wanted.start) == 1:
            raise OSError("the disk fails")
        return piece(self, wanted)

    monkeypatch.setattr(BaseFolder, "piece", counted)
    with pytest.raises(ConfigError, match="cannot be taken from the host: the host sent a BaseFiles"):
        fetch_base(invite, tmp_path / "cache")
    asked.clear()
    asked.append(5 * PIECE_BYTES)
    place = fetch_base(invite, tmp_path / "cache")
    assert place is not None and (place / "model.safetensors").read_bytes() == WEIGHTS
    assert min(asked) == 5 * PIECE_BYTES, "what was here was not asked for again"
    server.stop()
    journal.close()


def test_what_has_another_checksum_is_not_kept(tmp_path: Path, folder: Path) -> None:
    server, invite, journal = serving(tmp_path / "run", folder)
    asked = server._base._folder
    assert asked is not None
    asked._header = asked.header().replace(json.loads(asked.header())[0][2], "0" * 64)
    with pytest.raises(ConfigError, match=r"config.json does not have the checksum that the host told"):
        fetch_base(invite, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]
    server.stop()
    journal.close()


def test_no_room_is_said_before_anything_is_fetched(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, invite, journal = serving(tmp_path / "run", folder)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=r"The base model has .* and .* has room for"):
        fetch_base(invite, tmp_path / "cache")
    server.stop()
    journal.close()


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("[", "not a list of files"),
        ("[]", "lists 0 files"),
        ('[["model.bin", 4, ""]]', "no kind of file"),
        ('[["model.pt", 4, ""]]', "no kind of file"),
        ('[["../model.safetensors", 4, ""]]', "no plain file"),
        ('[["a.json", -1, ""]]', "no plain file"),
        ('[["a.json", 1, ""], ["a.json", 1, ""]]', "a file twice"),
        ('[["a.json", 1]]', "not a list of files"),
    ],
)
def test_a_list_is_checked_before_anything_is_made(header: str, sentence: str) -> None:
    with pytest.raises(TheirProtocolError, match=sentence):
        check_files(header)


def test_a_folder_without_safetensors_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"There are no \.safetensors files"):
        BaseFolder(tmp_path)
    with pytest.raises(ConfigError, match="Cannot read the base model"):
        BaseFolder(tmp_path / "nowhere")


def test_what_one_asks_for_beyond_measure_is_not_answered(folder: Path) -> None:
    sent: list[Any] = []
    sender = BaseSender(BaseFolder(folder), lambda peer, message: sent.append(message))
    for _ in range(1000):
        sender.ask(1, BaseWanted(2, 0))
    sender.ask(2, BaseFiles(""))
    sender.ask(2, BaseWanted(7, 0))
    sender.ask(2, BaseWanted(2, 1 << 60))
    sender.end()
    sender.run()
    assert len(sent) == base_folder.MOST_ASKED + 1 and not sender._waiting


def test_a_host_that_is_gone_is_said(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, encrypted=True)
    monkeypatch.setattr(BaseSender, "ask", lambda self, peer, message: fleet.server._lobby.close(peer))
    with pytest.raises(WorkerLost, match="The host was lost while it sent the base model"):
        fetch_base(fleet.invite, tmp_path / "cache")
    fleet.close()
