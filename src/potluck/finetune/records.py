"""DATA to records: chats, prompts with completions, texts, or texts with labels, each with the place it is from.

Reads JSONL, JSON, CSV and plain text by itself, packed by gzip or not, so that a broken line can be named; Parquet,
folders and hub ids through `datasets`. Knows nothing of tokens.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from potluck.errors import ConfigError
from potluck.finetune.base_files import HUB_ID
from potluck.finetune.libraries import need
from potluck.finetune.messages import check_chat, check_letters, shown
from potluck.finetune.settings import RowsConfig
from potluck.train.text import files_below
from potluck.words import first_line

Form = Literal["chat", "prompt", "text", "label"]
EXPECTED = '{"messages": [...]}, {"prompt": ..., "completion": ...}, {"text": ...}, or {"text": ..., "label": ...}'
TOLD = {
    "chat": "chats (messages)",
    "prompt": "prompts with completions",
    "text": "texts",
    "label": "texts with labels",
}
READ = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".text"}
PACKED = ".gz"
"""Suffix after any of these but .parquet, which packs by itself."""
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
MOST_LETTERS = 1 << 30
"""The most letters of a cell."""
KNOWN = f"{', '.join(sorted(READ))}, and those but .parquet with {PACKED}"
REJECTED = ("false", "0")
"""How a `label` beside an answer says, in small letters, that the answer is a bad one, as in TRL's rows for KTO."""
HELD_OUT = ("validation", "valid", "dev", "eval", "test")
"""Names of splits that are never trained on; the first of them that is there is looked at."""


@dataclass(frozen=True, slots=True)
class TextRecord:
    where: str
    form: Form
    fields: Mapping[str, Any]
    is_held_out: bool = False
    """Whether the data themselves hold it out: they have a split for it."""


def read_records(config: RowsConfig) -> Iterator[TextRecord]:
    """All of one form."""
    first: TextRecord | None = None
    for number, record in enumerate(_all(config.paths)):
        if number == config.limit:
            return
        first = first or record
        if record.form != first.form:
            raise ConfigError(
                f"{record.where} has {TOLD[record.form]}, and {first.where} {TOLD[first.form]}. Give rows of one form:"
                f" {EXPECTED}."
            )
        yield record
    if first is None:
        raise ConfigError(f"There is no row in {', '.join(config.paths)}. Expected is {EXPECTED}.")


def _all(paths: tuple[str, ...]) -> Iterator[TextRecord]:
    for name in paths:
        path = Path(name).expanduser()
        is_id = not path.exists() and HUB_ID.fullmatch(name) and kind_of(path) not in READ
        is_saved = any((path / file).is_file() for file in ("state.json", "dataset_dict.json"))
        if is_saved or is_id:  # what `datasets` has saved, or gets
            yield from _of_datasets(name, path if path.exists() else None)
            continue
        files = files_below(path)
        if path.is_dir():
            files = [file for file in files if kind_of(file) in READ]
        if not files:
            raise ConfigError(f"There is nothing to read in {path}. Known are: {KNOWN}.")
        for file in files:
            yield from _of_file(file)


def kind_of(file: Path) -> str:
    """Return the suffix of what a file holds, by its name; for a packed file, of what is packed."""
    kind = file.suffix.lower()
    return Path(file.stem).suffix.lower() if kind == PACKED else kind


@contextmanager
def _reading(file: Path) -> Iterator[BinaryIO]:
    try:
        with gzip.open(file) if file.suffix.lower() == PACKED else file.open("rb") as opened:
            yield cast(BinaryIO, opened)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"Cannot unpack {file}: {first_line(error)}. Copy it anew.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from None


def _of_file(file: Path) -> Iterator[TextRecord]:
    match kind_of(file):
        case ".jsonl" | ".ndjson":
            yield from _of_lines(file)
        case ".json":
            yield from _of_json(file)
        case ".csv" | ".tsv":
            yield from _of_cells(file)
        case ".parquet":
            yield from _of_datasets(str(file), file)
        case _:
            text = _text(file)
            if text.strip():
                yield TextRecord(str(file), "text", {"text": text})


def _of_lines(file: Path) -> Iterator[TextRecord]:
    with _reading(file) as opened:
        for number, line in enumerate(opened, 1):
            where = f"Line {number:,} of {file}"
            if line.strip():
                yield record_of(_json(line, where), where)


def _of_json(file: Path) -> Iterator[TextRecord]:
    text = _text(file)
    if not text.lstrip().startswith("["):  # lines, whatever they are called
        yield from _of_lines(file)
        return
    for number, fields in enumerate(_json(text.encode(), str(file)), 1):
        where = f"Row {number:,} of {file}"
        yield record_of(fields, where)


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig").strip())
    except json.JSONDecodeError as error:
        why = f"{error.msg}, at character {error.pos + 1:,}"
    except (ValueError, RecursionError) as error:  # no UTF-8, or far too deep
        why = first_line(error)
    raise ConfigError(f"{where} is not valid JSON: {why}. Expected is {EXPECTED}.")


def _text(file: Path) -> str:
    with _reading(file) as opened:
        data = opened.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text in UTF-8. Known are: {KNOWN}.") from None


def _of_cells(file: Path) -> Iterator[TextRecord]:
    """Cells are what they say: 007, NA and None may be answers."""
    csv.field_size_limit(MOST_LETTERS)
    try:
        with _reading(file) as opened, io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as text:
            separator = "\t" if kind_of(file) == ".tsv" else ","
            yield from _of_rows(map(_named, csv.DictReader(text, delimiter=separator, strict=True)), str(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {file}: {first_line(error)}.") from None


def _named(cells: dict[Any, Any]) -> dict[str, Any]:
    """A label may be a number, and where its cell is empty there is none."""
    label = cells.get("label") or ""
    found: str | int | None = int(label) if WHOLE.fullmatch(label) else label.strip() or None
    return {name: cell for name, cell in cells.items() if name is not None} | {"label": found}


def _of_datasets(name: str, path: Path | None) -> Iterator[TextRecord]:
    """`path`: a file of Parquet, or a folder that `datasets` has saved; None: the name is an id on the hub."""
    library = need("datasets")
    library.disable_progress_bars()
    try:
        if path is None:
            dataset = _from_hub(library, name)
        else:
            dataset = (library.Dataset.from_parquet if path.is_file() else library.load_from_disk)(str(path))
    except Exception as error:  # of pyarrow or datasets; or whatever a network can do
        if path is not None:
            raise ConfigError(f"Cannot read {path}: {first_line(error.__cause__ or error)}.") from None
        raise ConfigError(
            f"{name} is no file or folder here, and could not be had from the Hugging Face hub: {first_line(error)}."
            f" Check the name; or get it where there is a network, with hf download --repo-type dataset {name}, and"
            " name its files, or point HF_HOME to a cache that has it."
        ) from None
    if not isinstance(dataset, dict):  # one split
        yield from _of_rows(dataset, name)
        return
    held_out = next((split for split in HELD_OUT if split in dataset), None)
    trained = "train" if "train" in dataset else next(split for split in dataset if split != held_out)
    yield from _of_rows(dataset[trained], f"{name} ({trained})")
    if held_out is not None and held_out != trained:
        yield from _of_rows(dataset[held_out], f"{name} ({held_out})", is_held_out=True)


def _from_hub(library: Any, name: str) -> Any:
    """Load from the hub, from what `datasets` has kept of it, or from the files that `hf download` has put in the
    cache."""
    try:
        return library.load_dataset(name)
    except Exception:
        try:
            files = need("huggingface_hub").snapshot_download(name, repo_type="dataset", local_files_only=True)
        except Exception:  # they are not there either: what is said is why the hub did not answer
            files = None
        if files is None:
            raise
        return library.load_dataset(files)


def _of_rows(table: Any, name: str, *, is_held_out: bool = False) -> Iterator[TextRecord]:
    for number, fields in enumerate(table, 1):
        where = f"Row {number:,} of {name}"
        found = record_of({key: value for key, value in fields.items() if value is not None}, where)
        yield TextRecord(found.where, found.form, found.fields, is_held_out)


def record_of(fields: Any, where: str) -> TextRecord:
    """One row, checked; a ConfigError says where it is, and what was expected."""
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is no table of fields. Expected is {EXPECTED}.")
    _check_is_wanted(fields, where)
    if "messages" in fields:
        check_chat(fields, where)
        return TextRecord(where, "chat", fields)
    if "prompt" in fields and "completion" in fields:
        _check_text(fields, "prompt", where, may_be_empty=True)
        _check_text(fields, "completion", where)
        return TextRecord(where, "prompt", fields)
    if "text" in fields:
        _check_text(fields, "text", where)
        if "label" not in fields:
            return TextRecord(where, "text", fields)
        if not isinstance(fields["label"], str | int):
            raise ConfigError(f"{where}: label is a word or a whole number, not {shown(fields['label'])}.")
        if isinstance(fields["label"], bool):  # as JSON has it, and not the numbers that Python takes it for
            fields = fields | {"label": str(fields["label"]).lower()}
        return TextRecord(where, "label", fields)
    has = ", ".join(map(str, list(fields)[:8])) or "no fields"
    raise ConfigError(f"{where} has {has}. Expected is {EXPECTED}.")


def _check_is_wanted(fields: dict[str, Any], where: str) -> None:
    """Refuse rows with answers that a model should not give: here, every answer in a row is learnt."""
    answer = fields.get("completion", fields.get("messages"))
    if answer is not None and str(fields.get("label")).strip().lower() in REJECTED:
        raise ConfigError(
            f"{where}: label is {shown(fields['label'])}, so its answer was rejected, and potluck finetune learns every"
            " answer that it is given. Remove the rows whose label is false; or learn from both kinds with TRL's"
            " KTOTrainer on one worker, or DPOTrainer with potluck.hf.Elastic (docs/guide/other-trainers.md)."
        )
    if "rejected" in fields and (answer is None or answer != fields.get("chosen")):
        raise ConfigError(
            f"{where} is a pair of answers, of which one was rejected, and potluck finetune learns every answer that it"
            ' is given. Keep the chosen ones as {"prompt": ..., "completion": ...} or {"messages": [...]}; or learn'
            " from the pairs with TRL's DPOTrainer and potluck.hf.Elastic (docs/guide/other-trainers.md)."
        )


def _check_text(fields: dict[str, Any], name: str, where: str, *, may_be_empty: bool = False) -> None:
    if not isinstance(fields[name], str):
        raise ConfigError(f"{where}: {name} is text, not {shown(fields[name])}.")
    if not fields[name].strip() and not may_be_empty:
        raise ConfigError(f"{where}: {name} is empty.")
    check_letters(fields[name], where)
