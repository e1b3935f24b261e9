"""A tokenizer that is learnt from the text is the same on every worker, and loses nothing."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from potluck.config import from_toml
from potluck.errors import ConfigError
from potluck.train.recipe import RunConfig
from potluck.train.text import TOKENIZER, DataConfig, learn_pieces, pieces_of, read_rows, read_text

ROOT = Path(__file__).parents[2]


def text() -> bytes:
    return read_text(DataConfig(limit_bytes=300_000))


def learn(threads: str) -> str:
    script = "from tests.unit.test_word_pieces import *; print(learn_pieces(text(), 600).digest)"
    told = {"RAYON_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | told, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.slow
def test_what_is_learnt_depends_on_the_text_alone() -> None:
    assert learn("4") == learn_pieces(text(), 600).digest


def test_what_was_encoded_comes_back(tmp_path: Path) -> None:
    written = b"tab\tand  spaces\n" + "naïve 漢字 🍲\n".encode() * 3 + text()[:2000]
    pieces = learn_pieces(text(), 600)
    tokens = pieces.encode(written)
    assert tokens.dtype == torch.uint16 and len(tokens) < len(written)
    (tmp_path / TOKENIZER).write_text(pieces.json)
    again = pieces_of(tmp_path)
    assert again is not None and again.decode(tokens.tolist()).encode() == written
    assert pieces_of(tmp_path / "nothing") is None


def test_rows_are_of_tokens_and_compared_with_their_tokenizer() -> None:
    training, validation, pieces = read_rows(DataConfig(limit_bytes=300_000, tokenizer="bpe"), 32, 600)
    bytewise, _, none = read_rows(DataConfig(limit_bytes=300_000), 32, 600)
    assert pieces is not None and none is None
    assert len(training) < len(bytewise) * 0.7 and len(validation)
    assert training.potluck_fingerprint() != bytewise.potluck_fingerprint()
    assert training[0].shape == (33,) and int(training.tokens.to(torch.int32).max()) < 600
    assert bytewise.potluck_fingerprint() == hashlib.sha256(text()).hexdigest()


def test_too_few_tokens_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"learns as many tokens as model\.vocab: at least 512"):
        from_toml(RunConfig, 'name = "x"\n[data]\ntokenizer = "bpe"', source="here")
    with pytest.raises(ConfigError, match="tokens for training, and one row needs"):
        read_rows(DataConfig(limit_bytes=2000, tokenizer="bpe"), 4096, 600)
