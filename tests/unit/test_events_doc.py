"""docs/events.md is made from the classes of events, and what it has published does not change unnoticed.

`python -m tests.unit.test_events_doc` writes it anew, unless something published is gone and SCHEMA is still the same.
"""

import ast
import inspect
import json
import re
import types
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from potluck import events
from potluck.events import SCHEMA, Event, EventFile, RunStarted, WorkerStep, name_of, read_events

DOCUMENT = Path(__file__).parents[2] / "docs" / "events.md"
WORDS = {int: "whole number", float: "number", str: "string", bool: "true or false", type(None): "null"}
RESERVED = {"event", "time", "schema"}

HEAD = """# Events

What happens in a run, as records. This page is made from `src/potluck/events.py` by
`python -m tests.unit.test_events_doc`.

**Schema {schema}.** The run folder has them in `events.jsonl`, one JSON object a line, in the order in which they
happened. Each has `event`, its name; `time`, in seconds since 1970; and `schema`, the version of this page. The version
is raised when an event or a field is removed, or means something else than before; not when one is added, so pass over
what you do not know. Potluck passes over lines of a newer version than its own, and says so. Numbers that are not
finite are the strings `"nan"`, `"inf"` and `"-inf"`. A line that a crash cut short is not valid JSON: skip it.

In Python they are the classes of `potluck.events`, which `fleet.on(StepDone, callback)` and the `callbacks` of
`Trainer` hear. Who hears what:

- A run of one, `potluck run SCRIPT` and `potluck train`: every worker hears of steps, decisions, epochs, validations of
  `Trainer`, and of its own beginning and end. Rank 0 alone hears of checkpoints; its events are in `events.jsonl`.
- Under a host, a worker hears its own view: of each step that it applies, with all workers' parts of it, of epochs,
  validations and notices. Who comes and goes, stalls, or saves is told to the host; its `events.jsonl` has all of it.
- Where replicas step by themselves (Cadence, Async), a `StepDone` is told when all agree, for all steps of the window.
"""


@dataclass(frozen=True)
class Published:
    """What a page says of itself."""

    schema: int
    types: dict[tuple[str, str], str]
    """By event and field."""


def kinds() -> list[type]:
    return [*Event.__subclasses__(), WorkerStep]


def type_in_words(hint: Any) -> str:
    if hint in WORDS:
        return WORDS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        return " or ".join(map(type_in_words, inner))
    if origin is tuple:
        return f"list of {type_in_words(inner[0])}"
    if origin is dict:
        return f"object of {type_in_words(inner[1])}"
    return f"`{name_of(hint)}`"


def meanings(kind: type) -> dict[str, str]:
    """The docstring below each field."""
    found, body = {}, ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    for field, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            is_told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[field.target.id] = " ".join(after.value.value.split()) if is_told else ""
    return found


def page() -> str:
    parts = [HEAD.format(schema=SCHEMA)]
    for kind in kinds():
        said, rows = meanings(kind), []
        for field in fields(kind):
            rows.append(f"| `{field.name}` | {type_in_words(field.type)} | {said[field.name]} |\n")
        title = f"## {kind.__name__}\n\n" + (f"`{name_of(kind)}`. " if issubclass(kind, Event) else "")
        table = f"\n| field | type | what it is |\n|---|---|---|\n{''.join(rows)}" if rows else ""
        parts.append(f"{title}{' '.join((inspect.getdoc(kind) or '').split())}\n{table}")
    return "\n".join(parts)


def published(text: str) -> Published:
    version = re.search(r"\*\*Schema (\d+)\.\*\*", text)
    assert version is not None
    found = {}
    for part in text.split("\n## ")[1:]:
        for field, kind in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", part, re.MULTILINE):
            found[part.split("\n", 1)[0], field] = kind
    return Published(int(version[1]), found)


def broken(before: Published, now: Published) -> list[str]:
    """What was promised and does not hold any more, without a new version."""
    if now.schema > before.schema:
        return []
    same = [f"{event}.{name}" for (event, name), kind in before.types.items() if now.types.get((event, name)) != kind]
    return same + (["the version went back"] if now.schema < before.schema else [])


def test_the_page_is_that_of_the_classes() -> None:
    """`python -m tests.unit.test_events_doc` writes it anew."""
    assert DOCUMENT.read_text(encoding="utf-8") == page()


def test_what_is_published_holds_until_the_version_is_raised() -> None:
    before = published(DOCUMENT.read_text(encoding="utf-8"))
    assert broken(before, published(page())) == [], "Raise potluck.events.SCHEMA, or keep these fields as they were."
    assert len(before.types) > 60
    without = Published(before.schema, {key: kind for key, kind in before.types.items() if key != ("StepDone", "loss")})
    other = Published(before.schema, before.types | {("StepDone", "loss"): "string"})
    more = Published(before.schema, before.types | {("StepDone", "new"): "number"})
    assert broken(before, without) == broken(before, other) == ["StepDone.loss"]
    assert broken(before, more) == broken(before, Published(before.schema + 1, {})) == []


@pytest.mark.parametrize("kind", kinds())
def test_every_field_says_what_it_is_and_none_hides_what_every_record_has(kind: type) -> None:
    assert [name for name, said in meanings(kind).items() if not said] == []
    assert not RESERVED & set(meanings(kind))


def test_lines_of_a_newer_version_are_passed_over_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    started = RunStarted(
        name="a",
        folder="b",
        workers=1,
        device="cpu",
        parameters=1,
        unit="rows",
        batch_size=1,
        steps_total=1,
        from_step=0,
    )
    file = EventFile(path)
    file(started)
    file.close()
    assert json.loads(path.read_text())["schema"] == SCHEMA
    newer = json.dumps({"event": "run_started", "time": 1.0, "schema": SCHEMA + 1})
    path.write_text(f"{path.read_text()}{newer}\n{newer}\n" + json.dumps({"event": "noticed", "time": 2.0}) + "\n")
    assert [record["event"] for record in read_events(path)] == ["run_started", "noticed"]
    said = capsys.readouterr().err
    assert said.count("was written by a newer Potluck") == 1 and f"reads {SCHEMA} at most" in said


if __name__ == "__main__":
    if DOCUMENT.exists() and (gone := broken(published(DOCUMENT.read_text(encoding="utf-8")), published(page()))):
        raise SystemExit(f"{', '.join(gone)}: published, and not so any more. Raise SCHEMA in {events.__file__}.")
    DOCUMENT.write_text(page(), encoding="utf-8")
