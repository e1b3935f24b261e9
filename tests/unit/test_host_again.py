"""A host that is started again in a run's folder: what has changed is said, and its data stay."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from potluck.events import read_events
from potluck.fleet.effects import Describe
from potluck.fleet.journal import Journal
from potluck.launch.host import _Host
from potluck.launch.options import HostOptions, host_args
from tests.fleet.virtual import described


def again(folder: Path, stack: ExitStack) -> _Host:
    (folder / "own.toml").write_text('name = "own"')
    options = HostOptions(what=str(folder / "own.toml"), workers=0, out=str(folder), resume=True, patience_s=1.0)
    return _Host(host_args(options), stack)


def test_settings_that_changed_while_a_host_was_away_are_said_and_its_data_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = described(), described(training={"optimizer.lr": 0.5})
    journal = Journal(tmp_path / "journal.sqlite")
    journal.keep("description", before.to_json())
    journal.close()
    with ExitStack() as stack:
        host = again(tmp_path, stack)
        host.server.start()
        known = host.server.core.description
        assert known is not None and known.difference(now) is None  # another way to train is let in
        assert "what is in them is not the same" in str(
            known.difference(described(data={"origin": "", "marks": {"0": ["another", []]}}))
        )
        host.server._do(Describe(known.completed(now), is_new=False))
        assert host.journal.description == now
    said = "optimizer.lr was 0.1 in this run so far, and is 0.5 from here on."
    assert said in capsys.readouterr().err
    assert [r["sentence"] for r in read_events(tmp_path / "events.jsonl") if r["event"] == "noticed"] == [said]
