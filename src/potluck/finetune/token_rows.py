"""Rows of tokens: held flat, packed where that was asked for, and put together into batches.

A batch names the places whose next token is an answer, so that the loss is a mean over answers, however a step is cut.
"""

import bisect
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from potluck.finetune.encoding import Encoded

WIDTH = 8
"""Batches are padded to a multiple of it, in which GPUs compute best."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    tokens: Tensor
    answers: Tensor
    lengths: tuple[int, ...]
    """Lengths of the documents in it, one after the other."""
    label: int = -1


class DocumentStore:
    """Documents as they come: cut to the context, or into several where all of a text is learnt; counted, not said."""

    def __init__(self, context: int, *, splits: bool = False) -> None:
        """`splits`: what is longer than the context becomes several documents."""
        self.context, self.splits = context, splits
        self.cut = 0
        self.dropped = 0
        """Cut, and then without any answer."""
        self.answers_count = 0
        self._tokens, self._answers, self._lengths = array("i"), bytearray(), array("q")
        self._labels = array("q")

    def __len__(self) -> int:
        return len(self._lengths)

    def take(self, row: Encoded, label: int = -1) -> None:
        is_long = len(row.tokens) > self.context
        if is_long and self.splits:
            for start in range(0, len(row.tokens), self.context):
                self._keep(row.tokens[start : start + self.context], row.answers[start : start + self.context], label)
            return
        self.cut += is_long
        if not self._keep(row.tokens[: self.context], row.answers[: self.context], label):
            self.dropped += 1
            self.cut -= is_long

    def _keep(self, tokens: list[int], answers: list[bool], label: int) -> bool:
        """Whether there is anything to learn from it: the first token follows none, and is never learnt."""
        answers = [False, *answers[1:]]
        if not any(answers) and label < 0:
            return False
        self.answers_count += sum(answers)
        self._tokens.extend(tokens)
        self._answers.extend(answers)
        self._lengths.append(len(tokens))
        self._labels.append(label)
        return True

    def relabel(self, places: dict[int, int]) -> None:
        """Labels were numbered as they came."""
        self._labels = array("q", [places[label] for label in self._labels])

    def rows(self, *, packing: bool) -> "TokenRows":
        lengths = list(self._lengths)
        packed = pack(lengths, self.context) if packing else None
        return TokenRows(
            _tensor(self._tokens, torch.int32),
            _tensor(self._answers, torch.bool),
            torch.tensor([0, *lengths]).cumsum(0),
            packed,
            list(self._labels),
        )


def _tensor(data: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def pack(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Choose which documents share a row: the longest first, each where it leaves the least room. The result is the
    same everywhere."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of each row that has some: how much, and which it is, in order
    for number in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        at = bisect.bisect_left(room, (lengths[number], -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = context, len(rows)
            rows.append([])
        rows[row].append(number)
        if left > lengths[number]:
            bisect.insort(room, (left - lengths[number], row))
    return rows


class TokenRows(Dataset[TokenRow]):
    """Documents one after the other in one tensor, and which of them make up each row."""

    def __init__(
        self, tokens: Tensor, answers: Tensor, bounds: Tensor, packed: list[list[int]] | None, labels: list[int]
    ):
        self.tokens, self.answers, self.bounds = tokens, answers, bounds
        self.packed, self.labels = packed, labels
        """Documents of each row; None: each has its own."""

    def __len__(self) -> int:
        return len(self.labels if self.packed is None else self.packed)

    def __getitem__(self, row: int) -> TokenRow:
        documents = [row] if self.packed is None else self.packed[row]
        spans = [slice(int(self.bounds[one]), int(self.bounds[one + 1])) for one in documents]
        if len(spans) == 1:
            tokens, answers = self.tokens[spans[0]], self.answers[spans[0]]
        else:
            tokens = torch.cat([self.tokens[span] for span in spans])
            answers = torch.cat([self.answers[span] for span in spans])
        return TokenRow(tokens, answers, tuple(span.stop - span.start for span in spans), self.labels[documents[0]])

    def potluck_fingerprint(self) -> str:
        """Hash all tokens, so the text, the tokenizer and its template alike."""
        digest = hashlib.sha256()
        for part in (self.tokens, self.answers.to(torch.uint8), self.bounds):
            digest.update(memoryview(part.numpy()))  # type: ignore[arg-type]
        digest.update(repr((self.labels, self.packed)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TokenCollate:
    """Rows to a batch, padded on the right, where nothing that comes before looks."""

    pad: int
    packing: bool = False
    classifies: bool = False

    def __call__(self, rows: list[TokenRow]) -> dict[str, Tensor]:
        width = -(-max(len(row.tokens) for row in rows) // WIDTH) * WIDTH
        tokens = torch.full((len(rows), width), self.pad, dtype=torch.long)
        answers = torch.zeros((len(rows), width), dtype=torch.bool)
        for number, row in enumerate(rows):
            tokens[number, : len(row.tokens)] = row.tokens
            answers[number, : len(row.tokens)] = row.answers
        if self.classifies:
            lengths = torch.tensor([len(row.tokens) for row in rows])
            mask = (torch.arange(width) < lengths[:, None]).long()
            labels = torch.tensor([row.label for row in rows])
            return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        # A causal model needs no mask: what is padded comes after all that is learnt.
        batch = {"input_ids": tokens}
        if self.packing:
            batch["position_ids"] = torch.stack([_positions(row.lengths, width) for row in rows])
        answers[:, 0] = False  # it follows nothing
        flat = answers.flatten().nonzero().squeeze(1)
        return batch | {"at": flat - 1, "targets": tokens.flatten()[flat]}


def _positions(lengths: tuple[int, ...], width: int) -> Tensor:
    """Count positions from 0 in each document, by which attention knows where one begins; and again in the padding."""
    left = width - sum(lengths)
    return torch.cat([torch.arange(length) for length in (*lengths, *([left] if left else []))])
