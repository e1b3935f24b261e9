"""Where a base is on this machine: a folder, or the snapshot of a hub id in the cache. Imports no torch."""

import re
from pathlib import Path

from potluck.errors import ConfigError
from potluck.finetune.libraries import first_line, need
from potluck.finetune.shown_folder import weight_files
from potluck.sharding.stored import TensorFiles
from potluck.words import say

WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Files that a model is made of: no pickles, and no code."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def find_base(name: str, *, may_download: bool = True, tells: bool = False) -> Path:
    """The folder of a model. `may_download`: from the hub, if it is not in the cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder, name)
    if folder.exists():
        raise ConfigError(
            f"model.hf is {name}, which is a file. Name the folder that holds config.json and the weights."
        )
    if not HUB_ID.fullmatch(name):
        raise ConfigError(f"There is no folder {name}. Give model.hf one that exists, or an id on the hub: org/name.")
    if (found := cached(name)) is not None:
        return found
    if not may_download:
        raise ConfigError(f"{name} is not on this machine.")
    if tells:
        say(f"Downloading {name} from the Hugging Face hub; it stays in the cache (HF_HOME).")
    hub = need("huggingface_hub")
    try:
        return _checked(Path(hub.snapshot_download(name, allow_patterns=WANTED)), name)
    except ConfigError:
        raise
    except Exception as error:  # whatever a network can do
        raise ConfigError(
            f"{name} is no folder here, is not in the cache, and could not be downloaded: {first_line(error)}. Check"
            f" the name; or get it where there is a network, with hf download {name}, and copy the folder, or point"
            " HF_HOME to a cache that has it. A model that is not public needs hf auth login."
        ) from None


def cached(name: str) -> Path | None:
    """Find a base in the cache of this machine, if all of it is there."""
    if not HUB_ID.fullmatch(name):
        return None
    hub = need("huggingface_hub")
    try:
        return _checked(Path(hub.snapshot_download(name, allow_patterns=WANTED, local_files_only=True)), name)
    except Exception:  # whatever the library calls its absence
        return None


def _checked(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, so it holds no model of Hugging Face.")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{name} has no *.safetensors. Weights of another kind are not read: convert them once, with"
            " model.save_pretrained(FOLDER) of transformers."
        )
    weight_files(folder)
    return folder


def numbers_in(folder: Path) -> int:
    """How many numbers the weights have, by the heads of their files."""
    with TensorFiles(weight_files(folder)) as files:
        return sum(stored.size for stored in files.tensors.values())
