"""Sampler: what the model writes, shown beside its validations: now and then, briefly, and without a trace in the run.

It draws from random numbers of its own, and changes neither weights nor modes. Where a model computes only with others,
or is compiled for the shapes of its rows, nothing is written.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from potluck import Engine
from potluck.environment import PAGE_POINTER
from potluck.events import Event, Sampled, Validated
from potluck.train.model import GPT
from potluck.train.text import WordPieces, text_of
from potluck.words import printable

EVERY_S = 60.0
"""Seconds between two samples, at least: the others may wait for the worker that writes."""
MOST_S = 0.25
"""Seconds that a sample takes, at most, but for the last few tokens: all others may wait for them."""
BEGINNING, AT_ONCE, MOST_TOKENS, MOST_SHOWN = 48, 8, 160, 400

Write = Callable[[], tuple[str, str]]
"""Returns what the model was given, and what it wrote after that."""


class Sampler:
    """A listener."""

    def __init__(self, engine: Engine, write: Write) -> None:
        self._engine = engine
        self._write = write
        self._wrote_at: float | None = None

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Validated) or self._engine.rank != 0 or self._engine.is_replaying:
            return
        now = time.monotonic()
        if self._wrote_at is not None and now - self._wrote_at < EVERY_S:
            return
        self._wrote_at = now
        devices = [self._engine.device] if self._engine.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            prompt, text = self._write()
        prompt, text = (printable(told)[:MOST_SHOWN] for told in (prompt, text))
        self._engine.events.emit(Sampled(step=event.step, prompt=prompt, text=text))


def may_sample(engine: Engine, *, is_compiled: bool) -> bool:
    """Whether somebody may look, and this worker's model computes by itself, as it is."""
    wanted, looks = engine.setup, os.environ.get("POTLUCK_PAGE") != "off"
    is_shown = looks if engine.is_led else looks and PAGE_POINTER in os.environ
    is_whole = wanted.strategy.kind == "no_shard" and wanted.stages is None
    return is_shown and is_whole and not is_compiled


def writing(model: GPT, validation: Any, pieces: WordPieces | None) -> Write | None:
    """Write from the beginning of a row that is not trained on; None where there is none."""
    if not len(validation):
        return None

    def write() -> tuple[str, str]:
        start = torch.as_tensor(validation[0]).long()[:BEGINNING]
        tokens, began = start.to(next(model.parameters()).device), time.monotonic()
        for turn in range(MOST_TOKENS // AT_ONCE):
            tokens = model.write(tokens, AT_ONCE, temperature=0.8, seed=turn)
            if time.monotonic() - began > MOST_S:
                break
        return text_of(start.tolist(), pieces), text_of(tokens[len(start) :].tolist(), pieces)

    return write
