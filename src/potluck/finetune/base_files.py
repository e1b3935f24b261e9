"""Where a base is on this machine, in a folder or in the cache of the hub; and what libraries are shown of it.

A folder may come from a host, whom nobody trusts with the files of this machine. Libraries follow names that they find
in it: an index of weights, settings of a tokenizer, an adapter's base. So they read a folder that we made of it: texts
without such names, and weights under names of ours. Imports no torch.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.finetune.libraries import need
from potluck.sharding.stored import TensorFiles
from potluck.words import first_line, say

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


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXTS = (".json", ".txt", ".model", ".jinja")
ADAPTER = "adapter_config.json"
"""An adapter names the folder of its base."""
TEMPLATES = "additional_chat_templates"
MOST_SETTINGS_BYTES = 16 << 20
"""Larger JSON is a log or a table, and no library needs it."""
FOLLOWED = ("init_inputs", "transformers_weights", "vocab", "merges")
"""Keys of settings that may name files to open, besides those that end in `_file` and `_files`."""
VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "tekken.json")
"""Files whose keys are words; no library takes names of files from them."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights: all are .safetensors of that folder itself."""
    if (folder / ADAPTER).is_file():
        raise ConfigError(
            f"{folder} holds an adapter ({ADAPTER}) beside the model. Merge it into the model (merge_and_unload of"
            " peft) and save that, or move the adapter's files elsewhere."
        )
    name = _settings(folder / "config.json").get("transformers_weights")
    if name is None:
        name = WEIGHTS if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file() else INDEX
    source = folder / "config.json"
    if isinstance(name, str) and name.endswith(".index.json"):
        source = folder / _plain(name, source, ".safetensors.index.json")
        parts = _settings(source).get("weight_map")
        if not isinstance(parts, dict) or not parts:
            raise ConfigError(f"{source} has no weight_map, so it does not say which files hold the weights.")
        named = list(dict.fromkeys(str(each) for each in parts.values()))
    else:
        named = [name]
    paths = [folder / _plain(each, source, ".safetensors") for each in named]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"There is no {path.name} in {folder}, which should hold weights of the model.")
    return paths


@contextmanager
def shown(folder: Path, *, weights: bool = False) -> Iterator[Path]:
    """A folder for libraries to read while this lasts. `weights`: they are in it, too."""
    with tempfile.TemporaryDirectory(prefix="potluck-base-") as place:
        # Some tokenizers are told apart by the name of their folder, and so it keeps its own.
        made = Path(place) / (folder.resolve().name or "base")
        made.mkdir()
        for path in sorted(folder.iterdir()):
            leads_on = path.name == ADAPTER or path.name.endswith(".index.json")
            if path.suffix in TEXTS and path.is_file() and not leads_on:
                _show_text(path, made / path.name)
        for path in sorted((folder / TEMPLATES).glob("*.jinja")):
            (made / TEMPLATES).mkdir(exist_ok=True)
            _show_text(path, made / TEMPLATES / path.name)
        if weights:
            _show_weights(weight_files(folder), made)
        yield made


def _show_weights(files: list[Path], made: Path) -> None:
    if len(files) == 1:
        (made / WEIGHTS).symlink_to(files[0].resolve())
        return
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    weight_map: dict[str, str] = {}
    for name, path in zip(names, files, strict=True):
        (made / name).symlink_to(path.resolve())
        with TensorFiles([path]) as file:
            weight_map |= dict.fromkeys(file.tensors, name)
    (made / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def _show_text(path: Path, shown: Path) -> None:
    """Settings lose what names files, and code to be fetched."""
    if path.suffix != ".json" or path.name in VOCABULARIES:
        shown.symlink_to(path.resolve())
    elif path.stat().st_size <= MOST_SETTINGS_BYTES:
        try:
            shown.write_text(json.dumps(_without_names(_json(path))), encoding="utf-8")
        except ValueError:  # the library that needs it says so
            shown.write_bytes(path.read_bytes())


def _without_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_names(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_names(each) for key, each in value.items() if not _is_followed(key, each)}


def _is_followed(key: str, value: Any) -> bool:
    if key.endswith("_implementation"):  # kernels are named as repositories are
        return "/" in str(value)
    return key in FOLLOWED or key.endswith(("_file", "_files"))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError) as error:
        raise ConfigError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = _json(path)
    except ValueError as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings: it is not a JSON object.")
    return settings


def _plain(name: object, source: Path, suffix: str) -> str:
    if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(suffix):
        raise ConfigError(
            f"{source} says that weights are in {str(name)[:200]!a}. Only *{suffix} files of that folder itself are"
            " read. Save the model again, with save_pretrained(folder) of transformers."
        )
    return name
