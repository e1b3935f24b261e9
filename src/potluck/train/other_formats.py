"""The built-in model for other programs: a folder for Hugging Face's libraries, to which it is a llama.

Text is read by the tokenizer that the run has learnt, or byte by byte.
"""

import json
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.files import publish
from potluck.save.export import export
from potluck.train.model import ModelConfig
from potluck.train.text import TOKENIZER

EPSILON = 2.0**-23
"""Epsilon of nn.RMSNorm, where none is given: that of float32."""
THETA = 10_000.0
END = 0
"""The token that ends a text: byte 0, which text does not have; of a tokenizer that was learnt, its special one."""

HF_NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "w_q": "self_attn.q_proj",
    "w_k": "self_attn.k_proj",
    "w_v": "self_attn.v_proj",
    "w_o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
}


def export_hf(source: Path, out: Path, *, ema: bool = False) -> int:
    """A folder that AutoModelForCausalLM and AutoTokenizer load."""
    config, tokenizer = model_of(source), _find(source, TOKENIZER)
    if out.exists():
        raise ConfigError(f"{out} is there already, and is not overwritten. Remove it, or name another folder.")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}-") as place:
        aside = Path(place) / out.name
        aside.mkdir()
        weights = aside / "model.safetensors"
        export(source, weights, ema=ema, rename=_renamed, shown=out)
        own = byte_tokenizer(config.vocab)
        if tokenizer is not None:
            own = json.loads(tokenizer.read_text(encoding="utf-8"))
        end = own["added_tokens"][END]["content"]
        files = {"config.json": hf_config(config), "tokenizer.json": own}
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.context,
            "clean_up_tokenization_spaces": False,
            "eos_token": end,
            "pad_token": end,
        }
        for name, told in files.items():
            (aside / name).write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        publish(aside, out.absolute())
    return 0


def model_of(source: Path) -> ModelConfig:
    """Read the model's settings from a run's recipe. `source`: the run's folder, or one of its checkpoints."""
    recipe = _find(source, "run.toml")
    if recipe is None:
        raise ConfigError(
            f"There is no run.toml in {source} or around it, which says how many heads the model has. --hf is for"
            " the built-in model: name the folder of a run of potluck train."
        )
    told = tomllib.loads(recipe.read_text(encoding="utf-8")).get("model", {})
    known = {name: value for name, value in told.items() if name in ModelConfig.__slots__}
    return ModelConfig(**known)


def _find(source: Path, name: str) -> Path | None:
    """Find a file in a run's folder, which is two above that of a checkpoint."""
    places = [source, *source.absolute().parents[:2]]
    return next((place / name for place in places if (place / name).is_file()), None)


def _renamed(name: str) -> str:
    match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in HF_NAMES:
        raise ConfigError(f"The checkpoint has a tensor {name!r}, which the built-in model does not have.")
    block = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{block}{HF_NAMES[match[2]]}.weight"


def hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.dim // config.heads,
        "max_position_embeddings": config.context,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
        "dtype": "float32",
    }


def byte_tokenizer(vocab: int) -> dict[str, Any]:
    """Make a tokenizer of Hugging Face's that knows no character, so that each falls back to its bytes."""
    tokens = {f"<0x{number:02X}>" if number < 256 else f"<unused{number}>": number for number in range(vocab)}
    end = {"id": END, "content": "<0x00>", "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | plain],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": tokens,
            "merges": [],
        },
    }
