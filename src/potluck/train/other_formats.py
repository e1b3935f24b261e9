"""The built-in model for other programs: a folder for Hugging Face's libraries, a file for llama.cpp. It is a llama.

Text is read by the tokenizer that the run has learnt, or byte by byte.
"""

import json
import math
import re
import tempfile
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from potluck.errors import ConfigError
from potluck.files import publish
from potluck.save.export import export
from potluck.train.model import ModelConfig
from potluck.train.word_pieces import TOKENIZER

EPSILON = 2.0**-23
"""Epsilon of nn.RMSNorm, where none is given: that of float32."""
THETA = 10_000.0
END = 0
"""The token that ends a text: byte 0, which text does not have; of a tokenizer that was learnt, its special one."""

NEVER = "<never> <never>"
"""Merge for a vocabulary of bytes: llama.cpp refuses one without merges, and of these two nothing is ever made."""

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
GGUF_NAMES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "w_q": "attn_q",
    "w_k": "attn_k",
    "w_v": "attn_v",
    "w_o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "input_norm": "attn_norm",
    "post_attn_norm": "ffn_norm",
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
        rename = partial(_renamed, names=HF_NAMES, blocks="model.layers")
        export(source, weights, ema=ema, rename=rename, shown=out)
        own = _read(tokenizer) or byte_tokenizer(config.vocab)
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
            f"There is no run.toml in {source} or around it, which says how many heads the model has. --hf and --gguf"
            " are for the built-in model: name the folder of a run of potluck train."
        )
    told = tomllib.loads(recipe.read_text(encoding="utf-8")).get("model", {})
    known = {name: value for name, value in told.items() if name in ModelConfig.__slots__}
    return ModelConfig(**known)


def _find(source: Path, name: str) -> Path | None:
    """Find a file in a run's folder, which is two above that of a checkpoint."""
    places = [source, *source.absolute().parents[:2]]
    return next((place / name for place in places if (place / name).is_file()), None)


def _read(file: Path | None) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file is not None else {}


def _renamed(name: str, names: dict[str, str], blocks: str) -> str:
    """`blocks`: what its numbered blocks are called."""
    match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in names:
        raise ConfigError(f"The checkpoint has a tensor {name!r}, which the built-in model does not have.")
    block = f"{blocks}.{match[1]}." if match[1] is not None else ""
    return f"{block}{names[match[2]]}.weight"


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


def export_gguf(source: Path, out: Path, *, ema: bool = False) -> int:
    """A file for llama.cpp, in float32; its own tools make it smaller."""
    try:
        import gguf
        from safetensors import safe_open
    except ImportError:
        raise ConfigError("potluck export --gguf needs the library that writes such files: pip install gguf.") from None
    config, tokenizer = model_of(source), _read(_find(source, TOKENIZER))
    if out.exists():
        raise ConfigError(f"{out} is there already, and is not overwritten. Remove it, or name another file.")
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}-") as aside:
        plain = Path(aside) / "model.safetensors"
        export(source, plain, ema=ema, shown=out)
        writer = gguf.GGUFWriter(str(Path(aside) / "model.gguf"), "llama")
        _tell_gguf(writer, gguf, config)
        _tell_tokens(writer, gguf, config.vocab, tokenizer)
        with safe_open(plain, framework="numpy") as tensors:
            names = {name: _renamed(name, GGUF_NAMES, "blk") for name in tensors.keys()}  # noqa: SIM118
            for name, other in names.items():
                found = tensors.get_slice(name)
                shape = tuple(found.get_shape())
                writer.add_tensor_info(other, shape, np.dtype("float32"), 4 * math.prod(shape))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name in names:
                writer.write_tensor_data(_as_llama_cpp(name, tensors.get_tensor(name).astype("float32"), config))
        writer.close()
        (Path(aside) / "model.gguf").replace(out)
    return 0


def _as_llama_cpp(name: str, tensor: Any, config: ModelConfig) -> Any:
    """Reorder a head as llama.cpp has it: it turns neighbouring numbers together, and we the first half with the
    second."""
    if not name.endswith(("w_q.weight", "w_k.weight")):
        return tensor
    head = config.dim // config.heads
    rows = tensor.shape[0]
    return tensor.reshape(rows // head, 2, head // 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def _tell_gguf(writer: Any, gguf: Any, config: ModelConfig) -> None:
    writer.add_name("potluck")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden_dim)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads or config.heads)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(config.dim // config.heads)
    writer.add_rope_freq_base(THETA)
    writer.add_vocab_size(config.vocab)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _tell_tokens(writer: Any, gguf: Any, vocab: int, tokenizer: dict[str, Any]) -> None:
    """`tokenizer`: what tokenizer.json says of one that was learnt; of bytes nothing. Both have GPT-2's form."""
    model = tokenizer.get("model", {"vocab": {word: byte for byte, word in enumerate(byte_characters())}, "merges": []})
    words = {number: word for word, number in model["vocab"].items()}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(number, f"<unused{number}>") for number in range(vocab)])
    found = [kinds.NORMAL if number in words else kinds.UNUSED for number in range(vocab)]
    found[END] = kinds.CONTROL
    writer.add_token_types(found)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_token_merges(merges or [NEVER])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)


def byte_characters() -> list[str]:
    """List, by byte, the character that stands for it in vocabularies of GPT-2's form."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, next_free = [], 256
    for byte in range(256):
        characters.append(chr(byte if byte in own else next_free))
        next_free += byte not in own
    return characters
