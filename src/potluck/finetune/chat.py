"""`potluck chat RUN`: talks to what a run has trained, in the terminal or over a pipe, token by token."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from potluck.config import from_dict
from potluck.devices import choose_device
from potluck.errors import ConfigError
from potluck.finetune.encoding import Encoder
from potluck.finetune.recipe import FinetuneConfig, telling
from potluck.finetune.result import classifies, load_result, write_result
from potluck.finetune.settings import is_finetune
from potluck.finetune.talking import answer, classify
from potluck.train.arguments import recipe_of

HELP = "/new starts over, /quit ends."


def chat(run: Path, *, temperature: float, length: int) -> int:
    """Returns the exit code."""
    config = _config_of(run)
    with telling(True, "Loading the model"):
        model, tokenizer = load_result(run, config, choose_device())
    say_more = _out if sys.stdout.isatty() else lambda text: None
    if classifies(write_result(run, config)):
        say_more(f"Type a text, and the model names its label. {HELP}\n")
        for line in _lines():
            name, chance = classify(model, tokenizer, line)
            _out(f"{name} ({chance:.0%})\n")
        return 0
    encoder = Encoder(tokenizer, "chat" if tokenizer.chat_template else "text")
    say_more(f"Talk to the model. {HELP}\n" if encoder.form == "chat" else f"The model continues your text. {HELP}\n")
    _talk(model, tokenizer, encoder, temperature=temperature, length=length)
    return 0


def _talk(model: Any, tokenizer: Any, encoder: Encoder, **how: Any) -> None:
    messages: list[dict[str, Any]] = []
    for line in _lines():
        if line == "/new":
            messages.clear()
            continue
        messages.append({"role": "user", "content": line})
        is_chat = encoder.form == "chat"
        prompt = encoder.written(messages, asks=True) if is_chat else line
        said = _Heard(_out)
        try:
            answer(model, tokenizer, prompt, is_written=is_chat, hear=said, **how)
        except KeyboardInterrupt:  # enough of this answer
            _out(" ...")
        _out("\n")
        messages.append({"role": "assistant", "content": said.text.strip()})


class _Heard:
    """Collects what was said, and shows it without the space before it."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.text, self._show = "", show

    def __call__(self, text: str) -> None:
        text = text if self.text else text.lstrip()
        self.text += text
        self._show(text)


def _lines() -> Iterator[str]:
    """Yield the lines that are typed, until the end or /quit."""
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if asks:
        import readline  # noqa: F401 # arrows and history in input()
    while True:
        try:
            line = input("> ") if asks else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            _out("\n")
            return
        if not asks and not line:
            return
        line = line.strip()
        if line in ("/quit", "/exit"):
            return
        if line:
            yield line


def _out(text: str) -> None:
    print(text, end="", flush=True)


def _config_of(run: Path) -> FinetuneConfig:
    if not (run / "run.toml").is_file():
        raise ConfigError(f"{run} is no run's folder: it has no run.toml. Name one below runs/.")
    table = recipe_of(run)
    if not is_finetune(table):
        raise ConfigError(
            f"{run} has trained the built-in model, which continues text and does not chat: its sample is shown at the"
            " end of a run. potluck chat is for runs of potluck finetune."
        )
    return from_dict(FinetuneConfig, table)
