"""docs/protocol.md cannot go stale unnoticed: its messages, phases, limits and refusals are those of the code."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from potluck.data.rows import mix
from potluck.errors import TheirProtocolError
from potluck.events import EpochDone
from potluck.fleet import connection, description, file_stream, host_connector, lobby, transfers
from potluck.fleet.coordinator import LEGAL
from potluck.fleet.description import Description
from potluck.fleet.membership import WorkerPhase
from potluck.replica import model_checks, weight_hash
from potluck.save.parts import WholeModel, optimizer_part
from potluck.sums import slices
from potluck.wire import codec
from potluck.wire.messages import MESSAGES, PUBLISHED, Hello, JoinRequest, Kind, LookOn, Message, layout

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
FLAT = " ".join(DOCUMENT.split())

WORDS = {
    Kind.U8: "u8",
    Kind.U32: "u32",
    Kind.U64: "u64",
    Kind.F32: "f32",
    Kind.F64: "f64",
    Kind.STRING: "string",
    Kind.F32S: "[f32]",
    Kind.U32S: "[u32]",
    Kind.F64S: "[f64]",
    Kind.BYTES: "bytes",
    Kind.CODED: "coded",
}


def table(*head: str) -> list[list[str]]:
    """The rows of the one table with these columns."""
    lines = DOCUMENT.splitlines()
    (start,) = [number for number, line in enumerate(lines) if cells(line) == list(head)]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(cells(line))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def messages() -> dict[str, list[str]]:
    return {row[1]: row for row in table("#", "message", "direction", "fields", "meaning")}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_a_message_has_its_number_its_direction_and_every_field_in_order(message: type[Message]) -> None:
    number, _, direction, fields, meaning = messages()[message.__name__]
    assert number == str(MESSAGES.index(message))
    assert (message.__doc__ or "").startswith(direction) and direction
    assert fields == ", ".join(f"`{name}: {WORDS[kind]}`" for name, kind in layout(message))
    assert meaning


def test_no_message_is_told_that_does_not_exist() -> None:
    assert list(messages()) == [message.__name__ for message in MESSAGES]


def test_the_first_bytes_are_those_that_are_taken() -> None:
    told = [tuple(row) for row in table("first byte", "the first message", "encoding from then on")]
    openings = [(JoinRequest, "bincode"), (JoinRequest, "entrenar"), (Hello, "bincode"), (LookOn, "bincode")]
    first = [codec.CODECS[name].first_tag + MESSAGES.index(message) for message, name in openings]
    expected = zip(first, openings, strict=True)
    assert told == [(str(byte), message.__name__, name) for byte, (message, name) in expected]
    taken = {byte: codec.codec_of(bytes([byte])) for byte in range(256) if is_taken(byte)}
    assert taken == {int(byte): name for byte, _, name in told}


def is_taken(byte: int) -> bool:
    try:
        codec.codec_of(bytes([byte]))
    except TheirProtocolError:
        return False
    return True


def test_entrenars_encoding_ends_with_the_published_messages() -> None:
    assert ["messages", "all", f"0 to {len(PUBLISHED) - 1}"] in [cells(line) for line in DOCUMENT.splitlines()]


@pytest.mark.parametrize("phase", WorkerPhase, ids=lambda phase: phase.name)
def test_what_is_legal_in_a_phase_is_what_the_code_takes(phase: WorkerPhase) -> None:
    rows = [row for row in table("phase", "it sends", "what comes of it") if row[0] == phase.name]
    assert {row[1] for row in rows} == {message.__name__ for message in LEGAL[phase]}
    assert len(rows) == len(LEGAL[phase]) and all(row[2] for row in rows)


def test_the_diagram_shows_every_phase() -> None:
    diagram = DOCUMENT.split("## The states of a worker")[1].split("```")[1]
    assert all(phase.name in diagram for phase in WorkerPhase)
    assert {row[0] for row in table("phase", "it sends", "what comes of it")} == {phase.name for phase in WorkerPhase}


def test_every_field_of_a_description_is_told() -> None:
    assert [row[0] for row in table("field", "meaning")] == list(Description.__slots__)


@pytest.mark.parametrize(
    "limit",
    [
        lobby.UNKNOWN_BYTES,
        lobby.KNOWN_BYTES,
        lobby.MOST_UNKNOWN,
        connection.CONTROL_BYTES,
        host_connector.CONTROL_BYTES,
        description.MAX_PARTS,
        description.MAX_FLOATS,
        file_stream.MAX_FILES,
        codec.MAX_FRAME_BYTES,
        description.ENTRENAR_BYTES,
    ],
)
def test_limits_are_told(limit: int) -> None:
    section = DOCUMENT.split("## Limits")[1].split("\n## ")[0]
    assert re.search(rf"(?<![\d,]){limit:,}(?![\d,])", section)


def test_the_examples_are_what_the_code_makes_of_them() -> None:
    order = torch.randperm(10, generator=torch.Generator().manual_seed(mix(7, 0)))
    assert dict(table("what", "value")) == {
        "mix(7, 3)": str(mix(7, 3)),
        "the order of 10 rows, seed 7, epoch 0": " ".join(map(str, order.tolist())),
        "`description.model` of Linear(2, 1)": model_checks.describe_model(nn.Linear(2, 1)),
        "the digest of one parameter of 1,030 float32 numbers: 0, 1, ..., 1029": weight_hash.digest(
            [torch.arange(1030, dtype=torch.float32)]
        ),
    }
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in nn.Linear(2, 1).state_dict().items()]
    assert "\n".join(["```", *lines, "```"]) in DOCUMENT


@pytest.mark.parametrize(
    ("heading", "number"),
    [
        ("### The digest", weight_hash.ROW_BYTES),
        ("### The description", slices.SMALL_BYTES),
        ("**A parcel**", file_stream.CHUNK_BYTES),
        ("**A parcel**", transfers.CHUNKS_AHEAD),
        ("## Limits", (description.ENTRENAR_BYTES - 21) // 4),
    ],
)
def test_sizes_are_told_where_they_matter(heading: str, number: int) -> None:
    section = DOCUMENT.split(heading)[1].split("\n#")[0]
    assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", section)


def test_the_example_of_an_optimizers_state_is_what_torchs_becomes() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    saved = optimizer_part(WholeModel(model, optimizer, names))
    assert json.loads(DOCUMENT.split("```json")[1].split("```")[0]) == saved.notes
    assert {*saved.tensors} == {"weight/momentum_buffer", "bias/momentum_buffer"}


def test_what_committed_tells_is_told() -> None:
    done = EpochDone(epoch=0, used=1, total=1, same_weights=True, sentence="")
    assert [row[0] for row in table("key of an epoch", "meaning")] == [*vars(done)]


def test_every_sentence_of_a_refusal_is_told() -> None:
    """All of them but for what is filled in."""
    said = {*refusals(), *complaints()}
    assert len(said) > 15
    missing = sorted(piece for piece in said if piece not in FLAT)
    assert not missing, f"docs/protocol.md, under Refusals, does not tell: {missing}"


def refusals() -> Iterator[str]:
    """The sentences that the coordinator's machines refuse with."""
    for path in sorted(Path(transfers.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "refuse":
                yield from pieces(node.args[2])


def complaints() -> Iterator[str]:
    """What description.py finds wrong with a description, or different from the run's."""
    for node in ast.walk(ast.parse(inspect.getsource(description))):
        match node:
            case ast.Raise(exc=ast.Call(args=[sentence, *_])):
                yield from pieces(sentence)
            case ast.FunctionDef(name="difference"):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.JoinedStr | ast.Dict):
                        yield from pieces(inner)


def pieces(sentence: ast.expr) -> Iterator[str]:
    for node in ast.walk(sentence):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.strip(" .,;=")) > 3:
            yield node.value.strip(" .,;=")
