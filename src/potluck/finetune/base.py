"""The base: a model of Hugging Face, loaded as a recipe says, and what of it is trained."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from potluck.errors import ConfigError
from potluck.finetune.base_files import numbers_in, shown, weight_files
from potluck.finetune.libraries import SAFELY, need, refusing, transformers
from potluck.finetune.settings import AdapterConfig, PretrainedConfig
from potluck.sharding.stored import TensorFiles
from potluck.words import count, first_line

MOST_LAYERS = 512
"""Beyond that, a model has as many tensors."""
SLACK = 1 << 27
"""Numbers that a model may have beside those in its files: a new head, and masks."""
MOST_CONTEXT = 1024
"""Tokens of a row, unless the recipe asks for more: memory grows with them."""


def context_of(folder: Path, config: PretrainedConfig) -> int:
    """The most tokens of a row."""
    about = settings_of(folder).get_text_config()
    most = getattr(about, "max_position_embeddings", None) or getattr(about, "n_positions", None) or 1 << 24
    if config.context is not None and config.context > most:
        raise ConfigError(f"model.context is {config.context:,}, and {folder.name} takes {most:,} tokens at the most.")
    return int(config.context or min(most, MOST_CONTEXT))


def load_base(
    folder: Path, config: PretrainedConfig, device: torch.device, *, labels: list[str] | None, is_frozen: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model, and its layers that the folder has no weights for: a new head, and what else is random.

    `labels`: of a model that classifies. `is_frozen`: an adapter is trained in its place.
    """
    about = settings_of(folder)
    if getattr(about, "is_encoder_decoder", False):
        raise ConfigError(
            f"{folder.name} is a model of an encoder and a decoder ({about.model_type}), which potluck finetune does"
            " not train. Take a causal one, or write your own loop: potluck run."
        )
    if config.load != "plain" and not is_frozen:
        raise ConfigError(f'model.load = "{config.load}" is for a frozen base: give the recipe a [lora] table.')
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}
    options["dtype"] = _dtype(config, is_frozen=is_frozen and labels is None)
    if labels is not None:
        options |= {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
        options |= {"label2id": {name: number for number, name in enumerate(labels)}, "ignore_mismatched_sizes": True}
    if config.load != "plain":
        options |= {"quantization_config": _quantization(config.load, device), "device_map": {"": device}}
    kind = model_class(classifies=labels is not None)
    with refusing(f"Cannot load {folder}"), shown(folder, weights=True) as place:
        try:
            model, loading = kind.from_pretrained(str(place), **SAFELY, **options)
        except (MemoryError, torch.OutOfMemoryError):
            raise ConfigError(
                f"{folder.name} does not fit into the memory of {device}. Load it in fewer bits, with --load 4bit, or"
                ' split it over several workers with strategy.kind = "full_shard".'
            ) from None
    model.config._name_or_path = model.name_or_path = str(folder)
    missing = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    fresh = tuple(sorted({name.rpartition(".")[0] for name in missing}))
    if fresh and labels is None:
        raise ConfigError(
            f"{folder} has no weights for {', '.join(fresh[:3])}, so it cannot write text ({about.model_type})."
            " Take a causal model; to classify, give rows with a label."
        )
    return model, fresh


def settings_of(folder: Path) -> Any:
    """The model's settings, as transformers has them."""
    with refusing(f"Cannot read {folder / 'config.json'}"), shown(folder) as place:
        about = transformers().AutoConfig.from_pretrained(str(place), **SAFELY)
    about._name_or_path = str(folder)
    return about


def _dtype(config: PretrainedConfig, *, is_frozen: bool) -> torch.dtype | str:
    if config.dtype == "auto":
        return "auto" if is_frozen else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]


def _quantization(load: str, device: torch.device) -> Any:
    library = transformers()
    if load == "4bit":
        need("bitsandbytes", "bitsandbytes")
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        return library.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    return library.TorchAoConfig(need("torchao.quantization", "torchao").Int8WeightOnlyConfig())


def add_adapter(model: nn.Module, config: AdapterConfig, *, classifies: bool, fresh: tuple[str, ...] = ()) -> nn.Module:
    """The base with matrices beside its own, which alone are trained, and what is new in it. Draws random numbers."""
    peft = need("peft")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of GPT-2's layers, which it then treats as they need
            adapted = peft.get_peft_model(model, adapter_settings(config, classifies=classifies, fresh=fresh))
    except ValueError as error:
        linear = sorted({name.rsplit(".", 1)[-1] for name, each in model.named_modules() if hasattr(each, "weight")})
        raise ConfigError(f"[lora] {first_line(error)[:300]}. Layers here are: {', '.join(linear)}.") from None
    assert isinstance(adapted, nn.Module)
    return adapted


def adapter_settings(config: AdapterConfig, *, classifies: bool, fresh: tuple[str, ...] = ()) -> Any:
    """Convert an adapter's settings to peft's. `fresh`: layers that are trained whole, since no base has them."""
    settings: dict[str, Any] = {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(config.targets) or "all-linear",
        "modules_to_save": [*config.modules_to_save, *fresh] or None,
        "task_type": "SEQ_CLS" if classifies else "CAUSAL_LM",
    }
    return need("peft").LoraConfig(**settings)


def bytes_of_frozen(folder: Path, config: PretrainedConfig) -> int:
    """Estimate the memory of a base that is not trained."""
    numbers = numbers_in(folder)
    each = {"4bit": 0.55, "int8": 1.0}.get(config.load)
    if each is None:
        on_disk = sum(file.stat().st_size for file in weight_files(folder))
        each = {"fp32": 4.0, "bf16": 2.0}.get(config.dtype, on_disk / max(1, numbers))
    return int(numbers * each)


def check_described(folder: Path, labels: list[str] | None) -> None:
    """A config.json that describes far more than its files hold is refused, before anything of it is made."""
    with TensorFiles(weight_files(folder)) as files:
        tensors, held = len(files.tensors), sum(stored.size for stored in files.tensors.values())
    about = settings_of(folder)
    for name, value in _numbers_within(about.to_dict()):
        if ("layer" in name or "expert" in name) and value > max(MOST_LAYERS, tensors):
            raise ConfigError(
                f"{folder / 'config.json'} says {name} = {value:,}, and its files hold {tensors:,} tensors."
            )
    with refusing(f"Cannot load {folder}"):
        shape = shape_of(folder, labels)
    described = sum(each.numel() for each in shape.parameters())
    beside = sum(each.numel() for each in shape.buffers())
    packed = 16 if getattr(about, "quantization_config", None) else 4  # several numbers in one of those
    if described > packed * held + SLACK or beside > held + SLACK:
        raise ConfigError(
            f"{folder / 'config.json'} describes a model of {count(described)} parameters and {count(beside)} numbers"
            f" beside them, and its files hold {count(held)}. Is one of them missing?"
        )


def _numbers_within(settings: Any) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _numbers_within(value)
        elif isinstance(value, int):
            yield str(name), value


def known_labels(folder: Path) -> list[str] | None:
    """Return the labels of a base that classifies already and names them."""
    names: dict[int, str] = settings_of(folder).id2label or {}
    if all(name == f"LABEL_{number}" for number, name in names.items()):
        return None
    return [names[number] for number in sorted(names)]


def shape_of(folder: Path, labels: list[str] | None) -> Any:
    """The model without its numbers: it takes no memory."""
    about = settings_of(folder)
    if labels is not None:
        about.id2label = dict(enumerate(labels))
        about.label2id = {name: number for number, name in enumerate(labels)}
    with torch.device("meta"):
        return model_class(classifies=labels is not None).from_config(about)


def model_class(*, classifies: bool) -> Any:
    library = transformers()
    return library.AutoModelForSequenceClassification if classifies else library.AutoModelForCausalLM
