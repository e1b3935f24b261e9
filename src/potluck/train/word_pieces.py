"""A tokenizer that is learnt from the text: byte-level BPE, through the library `tokenizers`.

Every worker learns it by itself from the same text. The library counts in integers and breaks ties by number, so all
come to the same; and its digest is a part of the data's, by which workers compare what they train on.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.errors import ConfigError

TOKENIZER = "tokenizer.json"
"""File in a run's folder; elsewhere transformers.PreTrainedTokenizerFast(tokenizer_file=...) reads it."""
CHUNK_BYTES = 1 << 16
"""Text is counted and encoded in parts of about this length, which end with a line."""


class WordPieces:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def json(self) -> str:
        return str(self._tokenizer.to_str())

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode(self, text: bytes) -> Tensor:
        """Tokens, in as few bytes as they take."""
        parts = self._tokenizer.encode_batch_fast(list(_chunks(text)), add_special_tokens=False)
        width = torch.uint16 if self._tokenizer.get_vocab_size() <= 1 << 16 else torch.int32
        found = [torch.tensor(part.ids, dtype=torch.int32) for part in parts]
        return torch.cat(found).to(width) if found else torch.empty(0, dtype=width)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def learn_pieces(text: bytes, vocab: int) -> WordPieces:
    """Learn as many tokens as `vocab`, or fewer where the text has no more."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_chunks(text), trainer)
    return WordPieces(tokenizer)


def pieces_of(folder: Path) -> WordPieces | None:
    """Load the pieces that a run has learnt; None if it has none."""
    if not (folder / TOKENIZER).is_file():
        return None
    return WordPieces(_library().Tokenizer.from_file(str(folder / TOKENIZER)))


def _chunks(text: bytes) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = text.find(b"\n", at + CHUNK_BYTES) + 1 or len(text)
        yield text[at:end].decode("utf-8", errors="replace")
        at = end


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            "data.tokenizer = \"bpe\" needs the library tokenizers: pip install 'potluck[finetune]'."
        ) from None
    return tokenizers
