"""Shows the end of fine-tuning: figures, a sample before and after, and how to use the result."""

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from potluck.devices import choose_device
from potluck.errors import ConfigError
from potluck.finetune.base import load_base
from potluck.finetune.base_files import find_base
from potluck.finetune.encoding import Encoder, give_template, load_tokenizer
from potluck.finetune.recipe import FinetuneConfig, telling
from potluck.finetune.records import TextRecord, read_records
from potluck.finetune.result import classifies, config_of, load_result, write_result
from potluck.finetune.rows import is_held_out
from potluck.finetune.talking import answer, classify
from potluck.show.closing import show_next, show_paths
from potluck.show.picture import draw_losses
from potluck.train.trainer import Summary
from potluck.words import duration, first_line, plural, say

LENGTH = 48
"""Tokens of a sample."""
LOOKED_AT = 200
"""Rows among which one that is not trained on is looked for to ask the sample."""


def show_result(summary: Summary, config: FinetuneConfig) -> None:
    console = Console(highlight=False, soft_wrap=True)
    loss = f", loss {summary.loss:.4f}" if summary.loss is not None else ""
    validation = f", validation loss {summary.validation_loss:.4f}" if summary.validation_loss is not None else ""
    accuracy = f", accuracy {summary.metrics['accuracy']:.1%}" if "accuracy" in summary.metrics else ""
    steps = plural(summary.steps, "step")
    console.print(f"\nFinished {steps} in {duration(summary.seconds)}{loss}{validation}{accuracy}.", style="bold")
    curve = draw_losses(summary.folder / "events.jsonl", summary.folder / "loss.png")
    show_use(summary.folder, config, {"loss curve": curve, "checkpoint": summary.checkpoint})


def show_hosted(run: Path) -> None:
    """Show how to use the result of a run that a host has led, in its folder."""
    try:
        show_use(run, config_of(run), {})
    except ConfigError as error:
        say(f"{error} Once that is mended: potluck chat {run}")


def show_use(run: Path, config: FinetuneConfig, paths: dict[str, Any]) -> None:
    gc.collect()  # what the run has left on a GPU
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    console = Console(highlight=False, soft_wrap=True)
    with telling(True, "Writing the result"):
        result = write_result(run, config)
    try:
        with telling(True, "The model writes a sample"):
            _show_sample(console, run, config, classifies=classifies(result))
    except Exception as error:  # whatever a template or a full GPU says: the result is written all the same
        say(f"There is no sample: {first_line(error)}.")
    kind = "adapter" if config.lora is not None else "model"
    show_paths(console, {kind: result} | paths)
    show_next(console, _next(run, config, result))


def _next(run: Path, config: FinetuneConfig, result: Path) -> list[tuple[str, str]]:
    loaded = (
        f'AutoModelForCausalLM.from_pretrained("{result}")'
        if config.lora is None
        else f'PeftModel.from_pretrained(base, "{result}")'
    )
    more = config.fit.epochs + 1
    return [
        (f"potluck chat {run}", "talk to it"),
        (loaded, "in Python, with transformers" + (" and peft" if config.lora is not None else "")),
        (f"potluck train {run}/run.toml --out {run} --resume --set fit.epochs={more}", "one more epoch"),
        (f"potluck host {run}/run.toml", "the same as a run that other machines join"),
    ]


def _show_sample(console: Console, run: Path, config: FinetuneConfig, *, classifies: bool) -> None:
    if (asked := _asked(config)) is None:
        return
    record, title = asked
    device = choose_device()
    before = None
    if config.lora is None and not classifies:
        before = _before(config, record, device)
    model, tokenizer = load_result(run, config, device)
    if classifies:
        name, chance = classify(model, tokenizer, record.fields["text"])
        text = f"{record.fields['text'][:300]}\n\nafter:  {name} ({chance:.0%}); its label is {record.fields['label']}"
    else:
        shown, after = _sample(model, tokenizer, record)
        if before is None:
            with model.disable_adapter() if config.lora is not None else nullcontext():
                _, before = _sample(model, tokenizer, record)
        text = f"asked:  {shown}\n\nbefore: {before}\n\nafter:  {after}"
    console.print(Panel(Text(text), title=title, title_align="left", style="dim"))


def _before(config: FinetuneConfig, record: TextRecord, device: torch.device) -> str:
    folder = find_base(config.model.hf)
    tokenizer = load_tokenizer(folder)
    give_template(tokenizer, record.form)
    base, _ = load_base(folder, config.model, device, labels=None, is_frozen=False)
    return _sample(base.to(device).eval(), tokenizer, record)[1]


def _sample(model: Any, tokenizer: Any, record: TextRecord) -> tuple[str, str]:
    encoder = Encoder(tokenizer, "text" if record.form == "label" else record.form)
    shown, prompt = encoder.prompt_of(record)
    said = answer(model, tokenizer, prompt, length=LENGTH, is_written=encoder.form == "chat")
    return shown, said.strip()


def _asked(config: FinetuneConfig) -> tuple[TextRecord, str] | None:
    """A row that is not trained on, where one is near, or the first one; and what it is."""
    first = None
    try:
        for number, record in zip(range(LOOKED_AT), read_records(config.data), strict=False):
            first = first or record
            if record.is_held_out or is_held_out(number, config.data.validation):
                return record, "A row that was not trained on"
    except ConfigError:  # a host may lead a run without the data
        return None
    return (first, "The first row") if first is not None else None
