"""A llama-like GPT: RMSNorm, rotary positions, SwiGLU, no biases.

A block has exactly nine parameters, in the published order: w_q, w_k, w_v, w_o, gate, up, down,
input_norm, post_attn_norm. Outside the blocks there are lm_head, final_norm and embedding.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.words import check_at_least, check_at_most

_MOST = {
    "vocab": 1 << 24,
    "dim": 1 << 20,
    "layers": 1 << 14,
    "kv_heads": 1 << 20,
    "hidden": 1 << 24,
    "context": 1 << 24,
}
"""Far above any model that is trained, and low enough that sizes computed from them fit their numbers. Whether a model
fits a machine is another question: train/recipe.py asks it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    vocab: int = 256
    """Token values; 256 reads text byte by byte."""
    dim: int = 192
    """Width of the residual stream."""
    layers: int = 4
    """How many blocks there are."""
    heads: int = 6
    """Attention heads; each is dim / heads wide, which must be even for rotary positions."""
    kv_heads: int | None = None
    """Heads of keys and values, shared among the query heads; none: as many as heads."""
    hidden: int | None = None
    """Width of the SwiGLU; none: 8/3 of dim, rounded up to a multiple of 32."""
    context: int = 256
    """Tokens that one row holds."""

    def __post_init__(self) -> None:
        check_at_least(1, **asdict(self))
        for name, most in _MOST.items():
            check_at_most(name, getattr(self, name), most, "no machine trains such a model")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} must be a multiple of heads {self.heads}")
        if (self.dim // self.heads) % 2:
            raise ValueError(f"dim / heads is {self.dim // self.heads}, and rotary positions need an even number")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")

    @property
    def kv_dim(self) -> int:
        return self.dim // self.heads * (self.kv_heads or self.heads)

    @property
    def hidden_dim(self) -> int:
        return self.hidden or 32 * math.ceil(self.dim * 8 / 3 / 32)

    @property
    def parameters(self) -> int:
        """How many numbers it has, without making it."""
        block = 2 * self.dim * (self.dim + self.kv_dim) + 3 * self.dim * self.hidden_dim + 2 * self.dim
        return self.layers * block + 2 * self.vocab * self.dim + self.dim

    def activations(self, rows: int, *, checkpointed: bool = False, compiled: bool = False) -> int:
        """How many numbers a forward of that many rows keeps for its backward, at least.

        Compiled, a block keeps what its matrix products take and give, and computes the rest again.
        """
        each = 6 * self.dim + 2 * self.hidden_dim if compiled else 11 * self.dim + 4 * self.hidden_dim
        return rows * self.context * (self.layers * (self.dim if checkpointed else each) + self.vocab)


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        kv_dim, hidden = config.kv_dim, config.hidden_dim
        self.w_q = nn.Linear(config.dim, config.dim, bias=False)
        self.w_k = nn.Linear(config.dim, kv_dim, bias=False)
        self.w_v = nn.Linear(config.dim, kv_dim, bias=False)
        self.w_o = nn.Linear(config.dim, config.dim, bias=False)
        self.gate = nn.Linear(config.dim, hidden, bias=False)
        self.up = nn.Linear(config.dim, hidden, bias=False)
        self.down = nn.Linear(hidden, config.dim, bias=False)
        self.input_norm = nn.RMSNorm(config.dim)
        self.post_attn_norm = nn.RMSNorm(config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: [rows, tokens, dim]
        h = self.input_norm(x)
        q, k, v = (self._heads(linear(h)) for linear in (self.w_q, self.w_k, self.w_v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = k.shape[1] != q.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.w_o(mixed.transpose(1, 2).flatten(2))
        h = self.post_attn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:  # [rows, tokens, heads * head_dim] -> [rows, heads, tokens, head_dim]
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary_tables(config.context, config.dim // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights; what is added to the residual stream is scaled down with depth, so its variance stays."""
        into_stream = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = into_stream if name.endswith(("w_o.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:  # [rows, tokens] -> [rows, tokens, vocab]
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.final_norm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def write(self, start: Tensor, length: int, *, temperature: float = 1.0, seed: int = 0) -> Tensor:
        """Continues `start` (a row of tokens) by `length` more, each drawn from the model's own distribution."""
        draw = torch.Generator().manual_seed(seed)
        tokens = start
        was_training = self.training
        self.eval()
        for _ in range(length):
            logits = self(tokens[-self.config.context :].unsqueeze(0))[0, -1].float().cpu()
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=draw)
            tokens = torch.cat([tokens, chosen.to(tokens.device)])
        self.train(was_training)
        return tokens


def next_token_loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    """The mean over every token of the batch that has a next one, and how many those are."""
    rows = rows.long()
    logits = model(rows[:, :-1])
    targets = rows[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), targets.numel()


def rotary_tables(context: int, head_dim: int) -> tuple[Tensor, Tensor]:  # [context, head_dim / 2] each
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: [rows, heads, tokens, head_dim]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
