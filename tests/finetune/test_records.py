"""Rows of every form are read, and what is wrong with one is said, with its place and what was expected."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from potluck.errors import ConfigError
from potluck.finetune.records import TextRecord, read_records
from potluck.finetune.rows import names_of
from potluck.finetune.settings import RowsConfig
from potluck.finetune.token_rows import pack

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def read(*paths: Path | str, **options: Any) -> list[TextRecord]:
    return list(read_records(RowsConfig(paths=tuple(map(str, paths)), **options)))


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


BAD = {
    "broken": (
        lines(CHAT, CHAT, '{"messages": [{'),
        r"Line 3 of .*rows\.jsonl is not valid JSON: .*Expected is",
    ),
    "a list": (lines([1, 2]), r"Line 1 of .* is no table of fields\. Expected is"),
    "other fields": (lines({"question": "a", "reply": "b"}), r"Line 1 of .* has question, reply\. Expected is"),
    "no answer": (lines(CHAT, {"messages": CHAT["messages"][:1]}), r"Line 2 of .* is a chat without an answer"),
    "empty answer": (
        lines({"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": " "}]}),
        "is a chat without an answer",
    ),
    "no messages": (lines({"messages": []}), r"messages is a list of messages, not \[\]"),
    "no role": (lines({"messages": [{"content": "x"}]}), r'a message is {"role": \.\.\., "content": \.\.\.}, not'),
    "a picture": (lines({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "of a message is text, not"),
    "a number": (lines({"prompt": 1, "completion": "b"}), r"Line 1 of .*: prompt is text, not 1"),
    "empty": (lines({"text": "  "}), r"Line 1 of .*: text is empty"),
    "a label of many": (lines({"text": "a", "label": [1]}), r"label is a word or a whole number, not \[1\]"),
    "mixed": (lines(CHAT, {"text": "a"}), r"Line 2 of .* has texts, and Line 1 of .* chats .*Give rows of one form"),
    "nothing": ("\n\n", r"There is no row in .*rows\.jsonl"),
    "half an emoji": (
        lines({"prompt": "a", "completion": "b \ud83d"}),
        r"Line 1 of .* has \\ud83d, which is half of a",
    ),
    "half an emoji in a chat": (lines({"messages": [{"role": "user", "content": "\ude00"}]}), r"has \\ude00, which is"),
    "no call": (lines({"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]}), r"tool_calls is a list of \{"),
    "no content": (lines({"messages": [{"role": "assistant", "content": None}]}), "of a message is text, not null"),
    "half an emoji in a tool": (lines(CHAT | {"tools": [{"name": "\ud83d"}]}), r"has \\ud83d, which is"),
    "tools without an end": (lines(CHAT | {"tools": "[" * 100_000}), r"Line 1 of .*: tools is a list of functions"),
    "no tools": (lines(CHAT | {"tools": "{"}), r"Line 1 of .*: tools is a list of functions, as JSON schemas: "),
    "half an emoji in a call": (
        lines({"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "\ude00"}]}]}),
        r"has \\ude00, which is",
    ),
    "a rejected answer": (
        lines(*({"prompt": "a", "completion": "b", "label": label} for label in (True, False))),
        r"Line 2 of .*: label is false, so its answer was rejected, .*Remove the rows whose label is false",
    ),
    "a rejected answer by number": (lines({"prompt": "a", "completion": "b", "label": 0}), "label is 0, so its answer"),
    "a rejected chat": (lines(CHAT | {"label": False}), "label is false, so its answer was rejected"),
    "a pair": (
        lines({"prompt": "a", "chosen": "b", "rejected": "c"}),
        r"Line 1 of .* is a pair of answers, .*Keep the chosen ones as .*DPOTrainer",
    ),
    "a pair beside a chat": (lines(CHAT | {"chosen": "b", "rejected": "c"}), "is a pair of answers"),
    "deep": ("[" * 100_000 + "\n", r"Line 1 of .* is not valid JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_row_is_said_with_its_place(case: str, tmp_path: Path) -> None:
    text, said = BAD[case]
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read(tmp_path / "rows.jsonl")


def test_a_rejected_answer_in_a_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion,label\na,b,True\nc,d,False\n")
    with pytest.raises(ConfigError, match=r'Row 2 of .*: label is "False", so its answer was rejected'):
        read(tmp_path / "rows.csv")


def test_answers_that_are_wanted_are_read_whatever_stands_beside_them(tmp_path: Path) -> None:
    told = {"prompt": "a", "completion": "b"}
    pair = CHAT | {"chosen": CHAT["messages"], "rejected": []}
    (tmp_path / "a.jsonl").write_text(lines(told, told | {"label": True}, told | {"label": "sports"}))
    (tmp_path / "b.jsonl").write_text(lines(pair))
    assert len(read(tmp_path / "a.jsonl")) == 3
    assert len(read(tmp_path / "b.jsonl")) == 1


def test_what_is_not_there_or_not_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file or folder"):
        read("missing.jsonl")
    (tmp_path / "photo.txt").write_bytes(b"\xff\xd8\xff\x00")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        read(tmp_path / "photo.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="There is nothing to read in"):
        read(tmp_path / "folder")


def test_every_form_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines(CHAT, "", CHAT), encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps([CHAT]))
    assert [row.form for row in read(tmp_path)] == ["chat"] * 3
    assert read(tmp_path / "a.jsonl")[1].where.startswith("Line 3 of")
    assert len(read(tmp_path, limit=2)) == 2
    (tmp_path / "p.jsonl").write_text(lines({"prompt": "", "completion": "b"}))
    assert read(tmp_path / "p.jsonl")[0].form == "prompt"
    (tmp_path / "words.txt").write_text("once upon a time")
    assert read(tmp_path / "words.txt")[0].fields == {"text": "once upon a time"}


def test_packed_files_are_read_and_their_lines_are_counted(tmp_path: Path) -> None:
    def pack_up(name: str, text: str) -> Path:
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        return tmp_path / name

    assert len(read(pack_up("a.jsonl.gz", lines(CHAT, CHAT)))) == 2
    assert len(read(pack_up("b.json.gz", json.dumps([CHAT] * 3)))) == 3
    assert len(read(tmp_path)) == 5
    found = read(pack_up("c.csv.gz", "text,label\na,1\nb,0\n"), pack_up("d.tsv.gz", "text\tlabel\nc\t1\n"))
    assert [row.fields["label"] for row in found] == [1, 0, 1]
    assert read(pack_up("e.txt.gz", "once upon"))[0].fields == {"text": "once upon"}
    with pytest.raises(ConfigError, match=r"Line 2 of .*f\.jsonl\.gz is not valid JSON"):
        read(pack_up("f.jsonl.gz", lines(CHAT, "{")))
    whole = pack_up("g.jsonl.gz", lines(*[CHAT] * 99)).read_bytes()
    for broken, why in ((whole[:-9], "ended before the end-of-stream marker"), (b"[]", "Not a gzipped file")):
        (tmp_path / "g.jsonl.gz").write_bytes(broken)
        with pytest.raises(ConfigError, match=rf"Cannot unpack .*g\.jsonl\.gz: .*{why}.*Copy it anew"):
            read(tmp_path / "g.jsonl.gz")
    with pytest.raises(ConfigError, match="There is no file or folder"):
        read("missing.csv.gz")


def test_tables_and_datasets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rows.csv").write_text('text,label\n"it is, well, good",yes\nbad,no\n')
    found = read(tmp_path / "rows.csv")
    assert [row.fields["label"] for row in found] == ["yes", "no"] and found[0].form == "label"
    table = datasets.Dataset.from_list([CHAT, CHAT])
    table.to_parquet(tmp_path / "rows.parquet")
    assert [row.form for row in read(tmp_path / "rows.parquet")] == ["chat", "chat"]
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "saved")
    assert [row.is_held_out for row in read(tmp_path / "saved")] == [False, False, True]
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"Cannot read .*bad\.parquet"):
        read(tmp_path / "bad.parquet")


def test_cells_of_a_table_are_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\n1,007\n2,NA\nx,None\n1.50,null\n")
    assert [row.fields["completion"] for row in read(tmp_path / "rows.csv")] == ["007", "NA", "None", "null"]
    (tmp_path / "labels.csv").write_text("text,label\na,1\nb,0\nc,-3\nd,null\n5,05\n")
    assert [row.fields["label"] for row in read(tmp_path / "labels.csv")] == [1, 0, -3, "null", "05"]
    (tmp_path / "gap.csv").write_text("text,label\na,1\nb,\n")
    with pytest.raises(ConfigError, match=r"Row 2 of .* has texts, and Row 1 of .* texts with labels"):
        read(tmp_path / "gap.csv")
    (tmp_path / "long.tsv").write_text('\ufefftext\tother\r\n"' + "one\n" * 50_000 + '"\tb\r\n', encoding="utf-8")
    assert read(tmp_path / "long.tsv")[0].fields == {"text": "one\n" * 50_000, "other": "b"}
    (tmp_path / "open.csv").write_text('text\na\n"b\nc\n')
    with pytest.raises(ConfigError, match=r"Cannot read .*open\.csv: unexpected end of data"):
        read(tmp_path / "open.csv")


def test_labels_that_are_true_and_false_or_written_in_two_ways_are_two_classes(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": True}, {"text": "b", "label": False}, {"text": "c", "label": True}]
    (tmp_path / "rows.jsonl").write_text(lines(*rows))
    found = [row.fields["label"] for row in read(tmp_path / "rows.jsonl")]
    assert found == ["true", "false", "true"] and names_of(found, None) == ["false", "true"]
    assert names_of(["1", 1, 0], None) == ["0", "1"]


def test_rows_are_packed_the_same_everywhere() -> None:
    lengths = [3, 9, 2, 8, 1, 7, 10, 2]
    rows = pack(lengths, 10)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 10 for row in rows)
    assert len(rows) == 5  # 42 tokens: none could hold them in fewer
    assert pack(lengths, 10) == rows and pack([], 10) == []
