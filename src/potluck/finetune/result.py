"""Writes the result folder that `from_pretrained` loads, from the newest checkpoint, by the libraries.

Needs the base's config and none of its weights, so it takes little memory, and any strategy's checkpoint serves.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from potluck.config import from_dict
from potluck.errors import ConfigError
from potluck.files import read_table
from potluck.finetune.base import adapter_settings, known_labels, load_base, model_class, settings_of, shape_of
from potluck.finetune.base_files import find_base, shown
from potluck.finetune.encoding import give_template, load_tokenizer
from potluck.finetune.libraries import SAFELY, need
from potluck.finetune.recipe import FinetuneConfig
from potluck.finetune.records import TextRecord, read_records
from potluck.finetune.rows import names_of
from potluck.save.checkpoint_folder import found
from potluck.save.export import write_plain
from potluck.train.arguments import recipe_of

ADAPTER, MODEL = "adapter", "model"
WITHIN, SAVED = "base_model.model.", ".modules_to_save."
"""Parts of peft's names: before those of the base, and after those of layers that are trained whole."""
MOST_CONFIG_BYTES = 16 << 20


def config_of(run: Path) -> FinetuneConfig:
    return from_dict(FinetuneConfig, recipe_of(run))


def write_result(run: Path, config: FinetuneConfig) -> Path:
    """The adapter's folder, or the model's, of the newest checkpoint. One that is as new stays."""
    out = run / (ADAPTER if config.lora is not None else MODEL)
    checkpoints = found(run / "checkpoints")
    if not checkpoints:
        if out.is_dir():
            return out
        raise ConfigError(f"There is no checkpoint in {run}, so there is no result yet.")
    mark = out / "checkpoint"
    if mark.is_file() and mark.read_text(encoding="utf-8").strip() == checkpoints[0].name:
        return out
    base = find_base(config.model.hf)
    try:
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=run) as place:
            plain, aside = Path(place) / "plain.safetensors", Path(place) / out.name
            write_plain(checkpoints[0], plain)
            _save(config, base, load_file(plain), aside)
            # The mark comes last and moves with the rest: a folder that has it is whole. After a kill between the last
            # two lines there is none, and the next look writes it again.
            (aside / "checkpoint").write_text(checkpoints[0].name + "\n", encoding="utf-8")
            if out.exists():
                shutil.rmtree(out)
            aside.rename(out)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"Cannot write {out}: {why}. The run is in {checkpoints[0]} all the same: free some space, and write it"
            f" again with potluck chat {run}."
        ) from None
    return out


def _save(config: FinetuneConfig, base: Path, state: dict[str, torch.Tensor], aside: Path) -> None:
    first = first_record(config)
    labels = labels_of(config, base, state, first)
    model: Any = shape_of(base, labels)
    hf = config.model.hf  # by its folder, or by its id, an adapter finds its base
    model.config._name_or_path = model.name_or_path = str(base.absolute()) if Path(hf).expanduser().is_dir() else hf
    if config.lora is not None:
        fresh = tuple(sorted({name.split(SAVED)[0].removeprefix(WITHIN) for name in state if SAVED in name}))
        settings = adapter_settings(config.lora, classifies=labels is not None, fresh=fresh)
        with torch.device("meta"):
            model = need("peft").get_peft_model(model, settings)
        model.save_pretrained(aside, state_dict=state, save_embedding_layers=False)
        if labels is not None:  # an adapter has no config of its own, and the base does not know them
            model.config.save_pretrained(aside)
        (aside / "README.md").unlink(missing_ok=True)  # a card to be filled in
    else:
        if config.model.dtype == "bf16":  # a host's checkpoint has float32 masters
            state = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state.items()}
        model.save_pretrained(aside, state_dict=state)
    tokenizer = load_tokenizer(base)
    if first is not None:
        give_template(tokenizer, first.form if labels is None else "label")
    tokenizer.save_pretrained(str(aside))


def first_record(config: FinetuneConfig) -> TextRecord | None:
    """Return the first record of the data, where this machine has them: a host may lead a run without."""
    try:
        return next(read_records(config.data))
    except ConfigError:
        return None


def labels_of(
    config: FinetuneConfig, base: Path, state: dict[str, torch.Tensor], first: TextRecord | None
) -> list[str] | None:
    """Return the labels of a run that classifies: by the data, or where they are not here, numbers."""
    if config.model.task == "write" or (first is not None and first.form != "label"):
        return None
    if first is None and config.model.task != "classify":
        return None
    if first is None:
        heads = [tensor for name, tensor in state.items() if "score" in name or "classifier" in name]
        return [str(number) for number in range(len(heads[-1]))] if heads else ["0", "1"]
    return names_of((record.fields["label"] for record in read_records(config.data)), known_labels(base))


def classifies(result: Path) -> bool:
    """Whether the model in this folder classifies."""
    config = result / "config.json"
    if (result / "adapter_config.json").is_file():  # beside an adapter there is a config only where it does
        return config.is_file()
    told = read_table(config, MOST_CONFIG_BYTES)
    return any(str(name).endswith("SequenceClassification") for name in told.get("architectures") or [])


def load_result(run: Path, config: FinetuneConfig, device: torch.device) -> tuple[Any, Any]:
    """The fine-tuned model and its tokenizer, ready to be asked."""
    folder = write_result(run, config)
    tokenizer = load_tokenizer(folder)
    if config.lora is None:
        kind = model_class(classifies=classifies(folder))
        with shown(folder, weights=True) as place:
            model = kind.from_pretrained(str(place), use_safetensors=True, **SAFELY)
        return model.to(device).eval(), tokenizer
    labels = None
    if classifies(folder):
        names = settings_of(folder).id2label
        labels = [names[number] for number in sorted(names)]
    base, _ = load_base(find_base(config.model.hf), config.model, device, labels=labels, is_frozen=True)
    own: Any = base.config
    if own.pad_token_id is None:
        own.pad_token_id = tokenizer.pad_token_id
    model = need("peft").PeftModel.from_pretrained(base, str(folder))
    moved: nn.Module = model if config.model.load != "plain" else model.to(device)
    return moved.eval(), tokenizer
