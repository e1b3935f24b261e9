"""Text to tokens, which are bytes or learnt pieces of words, and tokens to windows of a fixed length.

Pieces are byte-level BPE, through the library `tokenizers`. Every worker learns them by itself from the same text. The
library counts in integers and breaks ties by number, so all come to the same; and its digest is a part of the data's,
by which workers compare what they train on.
"""

import contextlib
import hashlib
import os
import platform
import stat
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from potluck.environment import free_memory_bytes
from potluck.errors import ConfigError
from potluck.system import FOR_US_ALONE
from potluck.words import check_at_least, check_at_most

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


def text_of(tokens: list[int], pieces: WordPieces | None) -> str:
    """Return the text that tokens stand for: pieces, or single bytes."""
    if pieces is not None:
        return pieces.decode(tokens)
    return bytes(min(token, 255) for token in tokens).decode("utf-8", errors="replace")


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
            "data.tokenizer = \"bpe\" needs the library tokenizers: pip install './potluck[finetune]'."
        ) from None
    return tokenizers


COPIES = 4
"""The most copies of a text in memory at once, while rows are made of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    paths: tuple[str, ...] = ()
    """Text files, or folders of them; empty: the source of this Python's standard library."""
    validation: float = 0.05
    """The share of the text, at its end, that is never trained on."""
    limit_bytes: int | None = None
    """Read about this much at the most."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """Tokens are single bytes, or pieces of words that are learnt from the text (BPE), as many as model.vocab."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is a share of the text, in [0, 1), not {self.validation}")
        check_at_most("limit_bytes", self.limit_bytes, 1 << 62, "leave it out to read all of the text")
        check_at_least(1, limit_bytes=self.limit_bytes)


class TextWindows(Dataset[Tensor]):
    """Tokens cut into rows of context + 1, so that each of context tokens has a next one."""

    def __init__(self, text: bytes | Tensor, context: int, *, digest: str = "", origin: str = "") -> None:
        """`text`: bytes, each of which is a token; or tokens. `digest`: of all the text that this is a part of.
        `origin`: words for people."""
        if isinstance(text, bytes):
            digest = digest or hashlib.sha256(text).hexdigest()
            text = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
        self.tokens = text
        self.context = context
        self.digest = digest
        self.origin = origin

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.context)

    def __getitem__(self, row: int) -> Tensor:
        return self.tokens[row * self.context : (row + 1) * self.context + 1]

    def potluck_fingerprint(self) -> str:
        return self.digest


def read_rows(config: DataConfig, context: int, vocab: int = 256) -> tuple[TextWindows, TextWindows, WordPieces | None]:
    """The training rows and the validation rows; and what made tokens of the text, if it was learnt from it."""
    text = read_text(config)
    cut = len(text) - int(len(text) * config.validation)
    digest = hashlib.sha256(text).hexdigest()  # of both: workers share out what is looked at, too
    origin = "" if config.paths else f"the library of Python {platform.python_version()}"
    parts: list[bytes | Tensor] = [text[:cut], text[cut:]]
    pieces = None
    if config.tokenizer == "bpe":
        pieces = learn_pieces(text[:cut], vocab)
        parts = [pieces.encode(part) for part in (text[:cut], text[cut:])]
        digest = hashlib.sha256(f"{digest} {pieces.digest}".encode()).hexdigest()
    training, validation = (TextWindows(part, context, digest=digest, origin=origin) for part in parts)
    if not len(training) and pieces is not None:
        raise ConfigError(
            f"The text has {len(training.tokens):,} tokens for training, and one row needs {context + 1:,}. Give more"
            " text with data.paths, or set a smaller model.context."
        )
    if not len(training):
        raise ConfigError(
            f"The text has {len(text):,} bytes, of which {cut:,} are for training, and one row needs {context + 1:,}."
            " Give more text with data.paths, or set a smaller model.context."
        )
    return training, validation, pieces


def read_text(config: DataConfig) -> bytes:
    limit = config.limit_bytes or 1 << 62
    files = [file for path in config.paths for file in files_below(Path(path))] if config.paths else _standard_library()
    _check_room(files, limit)
    text_of_files = bytearray()
    for file in files:
        if len(text_of_files) >= limit:
            break
        text = _read(file, limit - len(text_of_files))
        if b"\0" not in text[:8192]:
            text_of_files += text
    if not text_of_files:
        raise ConfigError(f"There is no text in {', '.join(config.paths)}. Name files or folders that hold some.")
    return bytes(text_of_files)


def _read(file: Path, most: int) -> bytes:
    """No more than the file said it has: what the system makes up while it is read, as in /proc, is no text."""
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | FOR_US_ALONE), "rb") as opened:
            about = os.fstat(opened.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{file} is no plain file. Name files or folders that hold text.")
            return opened.read(min(most, about.st_size))
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from None


def _check_room(files: Sequence[Path], limit: int) -> None:
    """Text that would not fit is refused before the system ends somebody for it."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # said when it is read
            total += file.stat().st_size
    needed, free = COPIES * min(total, limit), free_memory_bytes()
    if needed > free:
        raise ConfigError(
            f"The text has {min(total, limit):,} bytes; with what is made of it that takes {needed:,}, and this machine"
            f" has {free:,} bytes of memory free. Set data.limit_bytes to read less of it, or name fewer files."
        )


def files_below(path: Path) -> list[Path]:
    try:
        there = path.exists()
    except OSError:  # a name that no system takes
        there = False
    if not there:
        shown = str(path) if str(path).isprintable() and len(str(path)) < 1000 else repr(str(path)[:80])
        raise ConfigError(f"There is no file or folder {shown}. Give data.paths (or --data) one that exists.")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path} is no plain file. Name files or folders that hold text.")
    inside = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    return sorted(p for p in inside if p.is_file())


def _standard_library() -> list[Path]:
    """List the standard library's modules, mixed by a fixed rule, so that the end of the text is like its beginning."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda file: zlib.crc32(file.name.encode()))
    if not files:
        raise ConfigError(f"This Python has no library source in {folder}. Name some text with --data.")
    return files
