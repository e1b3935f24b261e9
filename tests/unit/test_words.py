"""What a peer says is fit to be shown, wherever it comes in."""

import io
import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from potluck.events import RunStarted, StepDone, WorkerCame, WorkerStep
from potluck.fleet.client import Client
from potluck.fleet.description import Description
from potluck.show.progress import Progress
from potluck.wire.messages import (
    NAME,
    SENTENCE,
    Applied,
    Heartbeat,
    Hello,
    JoinRequest,
    Leave,
    Message,
    Ready,
    Refusal,
    Saved,
    Welcome,
)
from potluck.wire.words import clean, clean_all, heard
from potluck.words import shown_arguments
from tests.fleet.fleet import Fleet, wait_until
from tests.unit.test_journal import DESCRIBED

pytestmark = pytest.mark.timeout(60)
NASTY = "a\x1b[2J\x1b]0;owned\x07b\r\nFinished\u202e\u2066\u2028\x9b\x7f\0\ud800z"
PLAIN = "a?[2J?]0;owned?b??Finished???????z"


def test_nothing_that_moves_a_cursor_or_turns_a_line_is_left() -> None:
    assert clean(NASTY) == PLAIN
    assert clean("größe 日本 🙂 e\u0301") == "größe 日本 🙂 e\u0301"


@given(st.text(max_size=300), st.integers(4, 200))
def test_whatever_is_said_is_short_and_can_be_seen(text: str, most: int) -> None:
    said = clean(text, most)
    assert len(said) <= most and not any(unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp") for letter in said)
    assert clean(said, most) == said
    if len(text) <= most and text.isascii() and text.isprintable():
        assert said == text


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "secret\n", NASTY, NASTY),
        JoinRequest(NASTY, 0, NASTY),
        Refusal(1, NASTY),
        Leave(0, NASTY),
        Applied(1, "digest", 0.1, 0.2, NASTY),
        Saved(1, NASTY, NASTY),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_word_for_people_is_cleaned_and_nothing_else(message: Message) -> None:
    cleaned = heard(message)
    words = [value for value in vars(cleaned).values() if isinstance(value, str)]
    assert PLAIN in words and NASTY not in words
    changed = {name for name, value in vars(message).items() if value != getattr(cleaned, name)}
    assert changed == {name for name, value in vars(message).items() if value == NASTY}


def test_what_programs_read_stays_as_it_came() -> None:
    for message in (Welcome(1, 1, "a = 1\nb = 2\n"), Heartbeat("x\n", 1), Ready("{\n}", 1, "", 0)):
        assert heard(message) is message


def test_absurd_lengths_are_cut() -> None:
    long = heard(Hello(1, "", "n" * 4000, "k" * 4000))
    assert isinstance(long, Hello) and (len(long.name), len(long.kind)) == (NAME, SENTENCE)


def test_what_a_description_tells_people_is_cleaned_too() -> None:
    described = replace(DESCRIBED, told={"name": NASTY, "deep": [{NASTY: NASTY, "steps_total": 5}]})
    told = Description.from_json(described.to_json()).told
    assert told == {"name": PLAIN, "deep": [{PLAIN: PLAIN, "steps_total": 5}]}
    assert clean_all(json.loads('{"loss": 1.5, "none": null}')) == {"loss": 1.5, "none": None}


def test_a_workers_name_reaches_the_hosts_events_cleaned(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    client = Client(fleet.invite, name="a\x1b[2J\nb", kind="cpu\x1b[31m", say=lambda sentence: None)
    client.connect()
    client.description = DESCRIBED
    client.send(Ready(DESCRIBED.to_json(), 0, "digest", 0))
    wait_until(lambda: any(isinstance(event, WorkerCame) for event in fleet.events))
    (came,) = [event for event in fleet.events if isinstance(event, WorkerCame)]
    assert (came.name, came.kind) == ("a?[2J?b", "cpu?[31m")
    client.close()
    fleet.close()


def test_a_hosts_refusal_reaches_the_joiner_cleaned(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.server.core.finished = "over\x1b[2J"
    client = Client(fleet.invite, name="w", kind="cpu", say=lambda sentence: None)
    with pytest.raises(Exception, match=r"The run has ended: over\?\[2J"):
        client.connect()
    fleet.close()


@pytest.mark.parametrize("name", ["[/]", "[bold]x", "[link=https://example.org]here[/link]", "[red"])
def test_a_name_with_brackets_is_shown_as_it_is(name: str) -> None:
    """A table would read them as instructions, and one that closes nothing would end the run."""
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200, force_terminal=True, color_system=None))
    try:
        progress(
            RunStarted(name="x", folder="x", workers=1, device="cpu", parameters=1, unit="[/]rows",
                       batch_size=8, steps_total=4, from_step=0)
        )  # fmt: skip
        worker = WorkerStep(rank=0, rows=4, samples=4.0, busy_s=0.3, wait_s=0.1, name=name)
        progress(
            StepDone(step=1, epoch=0, rows_seen=8, samples=8.0, loss=1.0, lr=1e-3, grad_norm=1.0, seconds=0.4,
                     workers=(worker,))
        )  # fmt: skip
        progress.console.print(progress._picture())
    finally:
        progress.close()
    assert name in out.getvalue()


def test_secrets_in_a_scripts_arguments_are_not_shown() -> None:
    words = ["train.py", "--epochs", "12", "--api-key", "abc", "--hf-token=def", "a b", "--max-tokens", "5", "--key"]
    shown = shown_arguments([*words, "--quiet", "https://me:word@example.org/", "potluck://1.2.3.4:5/secret.pin"])
    assert shown == "train.py --epochs 12 --api-key ... --hf-token=... 'a b' --max-tokens 5 --key --quiet ... ..."
