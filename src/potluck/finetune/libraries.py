"""The libraries of the extra `finetune`, imported when they are needed, and said how to install where they are not."""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from potluck.errors import ConfigError
from potluck.words import first_line

TALKATIVE = ("torchao", "torch.utils._pytree", "transformers", "peft", "datasets", "huggingface_hub")
"""Libraries that log what no reader of a run can use: what failed is said by us."""

SAFELY = {"local_files_only": True, "trust_remote_code": False}
"""How a folder is read: nothing is fetched, and no code of its own is run, nor asked about."""


def need(name: str, install: str = "'./potluck[finetune]'") -> Any:
    """A library, or the sentence that says how to get it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns in processes that fetch
    for talker in TALKATIVE:
        logging.getLogger(talker).setLevel(logging.ERROR)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        raise ConfigError(f"This needs {missing}, which is not installed here: pip install {install}.") from None


def transformers() -> Any:
    """Import transformers without its own bars and warnings."""
    library = need("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn anything that a library raises into a sentence: `what`, and what it said. Sentences of ours pass."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {first_line(error)}.") from None
