"""A model that answers: samples before and after a run, and chats, token by token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from potluck.finetune.libraries import transformers
from potluck.finetune.token_rows import TokenRow
from potluck.words import printable

PROMPT, BEGINNING = 64, 16
"""Tokens of a row that is continued, at most; and where it has no answer of its own."""
MOST_S = 0.5
"""Seconds that the continuation takes, at most: all other workers may wait for this one."""


@torch.no_grad()
def answer(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    length: int,
    temperature: float = 0.0,
    is_written: bool = True,
    hear: Callable[[str], None] = lambda text: None,
) -> str:
    """Generate the model's answer to a prompt. `is_written`: by a template, which has put in all tokens that are
    special. `hear`: gets it bit by bit."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not is_written, verbose=False)
    tokens = encoded["input_ids"]
    if not is_written and tokens.shape[1] > 1 and tokens[0, -1] == tokenizer.eos_token_id:
        tokens = tokens[:, :-1]  # it is to continue, not to have ended
    tokens = tokens[:, -room_of(model, length) :].to(next(model.parameters()).device)
    chooses = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    written = _generate(model, tokenizer, tokens, max_new_tokens=length, streamer=_streamer(tokenizer, hear), **chooses)
    return printable(tokenizer.decode(written, skip_special_tokens=True))


@torch.no_grad()
def continue_row(model: Any, tokenizer: Any, row: TokenRow) -> tuple[str, str]:
    """A row up to its first answer, and what the model says then, in the time that it has. It is left as it was."""
    first = int(row.answers.int().argmax()) or BEGINNING
    prompt = row.tokens[:first][-PROMPT:].long().unsqueeze(0).to(next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        said = _generate(model, tokenizer, prompt, max_new_tokens=PROMPT, max_time=MOST_S, do_sample=False)
    finally:
        model.train(was_training)
    return tokenizer.decode(prompt[0], skip_special_tokens=True), tokenizer.decode(said, skip_special_tokens=True)


def _generate(model: Any, tokenizer: Any, tokens: Tensor, **how: Any) -> Tensor:
    """The tokens that follow."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": _ends(model, tokenizer)}
    written: Tensor = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **ids, **how)
    return written[0, tokens.shape[1] :]


def room_of(model: Any, length: int) -> int:
    """How many tokens of a prompt the model can read, if it is to write so many more."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 24
    return max(1, int(most) - length)


def _ends(model: Any, tokenizer: Any) -> list[int] | None:
    """The tokens that end an answer, as the model or its tokenizer has them."""
    told = getattr(model.generation_config, "eos_token_id", None)
    known = told if isinstance(told, list) else [told]
    return sorted({one for one in [*known, tokenizer.eos_token_id] if one is not None}) or None


def _streamer(tokenizer: Any, hear: Callable[[str], None]) -> Any:
    class Streamer(transformers().TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            hear(printable(text))

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


@torch.no_grad()
def classify(model: Any, tokenizer: Any, text: str) -> tuple[str, float]:
    """The label, and how sure the model is of it."""
    most = room_of(model, 0)
    found = tokenizer(text, return_tensors="pt", truncation=True, max_length=most, verbose=False)
    device = next(model.parameters()).device
    logits = model(input_ids=found["input_ids"].to(device), attention_mask=found["attention_mask"].to(device)).logits
    chances = torch.softmax(logits[0].float(), -1)
    best = int(chances.argmax())
    return str(model.config.id2label[best]), float(chances[best])
