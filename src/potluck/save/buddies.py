"""Buddies: each rank keeps its part of a split model in host memory, and a copy of its neighbour's.

A refresh writes both, block by block, and is whole once all ranks are done with it; the one before stays until then, so
that a kill at any moment leaves one. After a loss those who are left are started anew (processes.py), and `recover`
fills them from what is left in memory (memory.py). No disk is touched.
"""

import errno
import json
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from potluck.errors import ConfigError
from potluck.link.link import Link
from potluck.save import parts
from potluck.save.checkpoint import MODEL, OPTIMIZER
from potluck.save.left_out import check_left_out
from potluck.save.memory import NEIGHBOUR, OWN, PLACE, STANDING, Recovery, my_folder, numbered, rank_folder
from potluck.save.saves import Standing
from potluck.sharding.ranges import Ranges, type_name
from potluck.sharding.sharded import Sharded
from potluck.sharding.stored import make_header, write_all
from potluck.tensor_bytes import from_bytes, raw

if TYPE_CHECKING:
    from potluck.engine.frozen_base import FrozenBase

BLOCK_BYTES = 16 << 20
"""What travels at once: a refresh takes two such blocks of memory beyond the copies."""


class Buddies:
    def __init__(self, link: Link, every: int) -> None:
        folder = my_folder()
        if folder is None:
            raise ConfigError(
                f"strategy.buddy keeps copies in {PLACE}, in a folder that our launcher makes. Start the run with"
                f" `potluck run` or `potluck train` where there is a {PLACE}, or set strategy.buddy to false."
            )
        self._link = link
        self._every = every
        self._home = rank_folder(folder, link.rank)
        self._home.mkdir(exist_ok=True)
        self._number = 0
        """Of the last refresh."""

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def refresh(self, sharded: Sharded, standing: Standing, without: Container[str] = ()) -> None:
        """On every rank alike, between two steps. `without`: entries of the model's state_dict that are left out."""
        with _room_is_missed():
            asides = [self._aside(kind) for kind in (OWN, NEIGHBOUR)]
            self._pass_on(f"{MODEL}.safetensors", parts.model_part(sharded, copies=False, without=without), *asides)
            self._pass_on(f"{OPTIMIZER}.safetensors", parts.optimizer_part(sharded, copies=False), *asides)
            (asides[0] / STANDING).write_text(json.dumps(standing), encoding="utf-8")
        self._number += 1
        for kind, aside in zip((OWN, NEIGHBOUR), asides, strict=True):
            aside.rename(numbered(self._home / kind, self._number))
        self._link.gather_rows([self._number])  # all have it: only now may the one before go
        for kind, aside in zip((OWN, NEIGHBOUR), asides, strict=True):
            if self._number > 1:
                numbered(self._home / kind, self._number - 1).rename(aside)

    def _aside(self, kind: str) -> Path:
        """Where a refresh is written before it has its place. What is there is written over, in memory that is had."""
        aside = self._home / f".aside-{kind}"
        aside.mkdir(exist_ok=True)
        return aside

    def _pass_on(self, name: str, pieces: parts.Pieces, own: Path, neighbour: Path) -> None:
        """Writes a file of ours, sends it to the next rank, and writes the one that the rank before sends."""
        header = make_header({key: (type_name(t), tuple(t.shape)) for key, t in pieces.tensors.items()}, pieces.notes)
        sizes = [int(row[0]) for row in self._link.gather_rows([float(header.total_bytes)])]
        mine, theirs = sizes[self._link.rank], sizes[self._link.rank - 1]
        told = from_bytes(header.data)
        blocks = _blocks([told, *(pieces.tensors[key] for key in header.order)], min(BLOCK_BYTES, mine))
        inbox = torch.empty(min(BLOCK_BYTES, theirs), dtype=torch.uint8)
        with _written_over(own / name) as ours, _written_over(neighbour / name) as copy:
            for at in range(0, max(mine, theirs), BLOCK_BYTES):
                block = next(blocks, inbox[:0])
                heard = inbox[: max(0, theirs - at)]
                passing = self._link.start_pass(block, heard)
                write_all(ours, block.numpy().data)
                passing.wait()
                write_all(copy, heard.numpy().data)


def recover(recovery: Recovery, sharded: Sharded, base: "FrozenBase | None" = None) -> Standing:
    """Fills this rank's part from what is left in memory, however many ranks it had been split over."""
    source = "What the workers had kept in memory"
    with _open(recovery, MODEL) as model, _open(recovery, OPTIMIZER) as optimizer:
        without = check_left_out(base, recovery.standing, model.tensors, source)
        parts.check_part(sharded, model, optimizer, optimizer.notes, source, without)
        parts.load_part(sharded, model, optimizer, optimizer.notes, without)
    sharded.share()
    return recovery.standing


def _open(recovery: Recovery, stem: str) -> Ranges:
    return Ranges(Path(part) / f"{stem}.safetensors" for part in recovery.parts)


def _blocks(tensors: list[Tensor], most: int) -> Iterator[Tensor]:
    """The bytes of all tensors end to end, in host memory; each block is written over by the next."""
    block = torch.empty(most, dtype=torch.uint8)
    filled = 0
    for tensor in tensors:
        data = raw(tensor)
        at = 0
        while at < data.numel():
            count = min(data.numel() - at, most - filled)
            block[filled : filled + count].copy_(data[at : at + count])
            at, filled = at + count, filled + count
            if filled == most:
                yield block
                filled = 0
    if filled:
        yield block[:filled]


@contextmanager
def _written_over(path: Path) -> Iterator[IO[bytes]]:
    """A file that is written from its beginning and ends where the writing does; its memory is used again."""
    path.touch()
    with path.open("r+b", buffering=0) as file:
        yield file
        file.truncate()


@contextmanager
def _room_is_missed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise ConfigError(
            f"{PLACE} has no room for the copies that ranks keep of their own and of their neighbours' parts, which are"
            " there twice during a refresh. Make it larger, or set strategy.buddy to false."
        ) from None
