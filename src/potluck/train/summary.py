"""Shows the end of a recipe's run: the figures, the curve, a paragraph, and what to try next."""

from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from safetensors.torch import load_file

from potluck.errors import CheckpointError
from potluck.save.export import write_plain
from potluck.show.closing import show_next, show_paths
from potluck.show.picture import draw_losses
from potluck.train.arguments import TrainArgs
from potluck.train.model import GPT
from potluck.train.text import pieces_of, text_of
from potluck.train.trainer import Summary
from potluck.words import count, duration, plural, printable

PROMPT = "    def __init__(self, "
LENGTH = 320


def show_summary(summary: Summary, model: GPT, args: TrainArgs, *, epochs: int, is_split: bool = False) -> None:
    """`is_split`: the model computes only with all workers together, who have left by now."""
    console = Console(highlight=False, soft_wrap=True)
    exported = _export(summary)
    if is_split:
        model = GPT(model.config)
        if exported is not None and exported.is_file():
            model.load_state_dict(load_file(exported))
    if args.summary == "paragraph":
        console.print()
        show_paragraph(console, model, summary.folder)
        return
    curve = draw_losses(summary.folder / "events.jsonl", summary.folder / "loss.png")
    tokens = summary.rows_seen * model.config.context
    validation = f", validation loss {summary.validation_loss:.4f}" if summary.validation_loss is not None else ""
    skipped = f", {summary.skipped} skipped" if summary.skipped else ""
    loss = f", loss {summary.loss:.4f}" if summary.loss is not None else ""
    console.print(
        f"\nFinished {plural(summary.steps, 'step')} ({count(tokens)} tokens) in {duration(summary.seconds)}{loss}"
        f"{validation}{skipped}.",
        style="bold",
    )
    show_paragraph(console, model, summary.folder)
    rows = {
        "loss curve": curve,
        "checkpoint": summary.checkpoint,
        "weights": exported,
        "events": summary.folder / "events.jsonl",
    }
    show_paths(console, rows)
    show_next(console, _next(summary.folder, args, epochs))


def show_paragraph(console: Console, model: GPT, folder: Path) -> None:
    with console.status("The model writes a paragraph ..."):
        paragraph = write_paragraph(model, folder)
    console.print(Panel(Text(paragraph), title="What the model wrote", title_align="left", style="dim"))


def write_paragraph(model: GPT, folder: Path) -> str:
    """`folder`: of the run, where the tokenizer is, if it has learnt one."""
    device = next(model.parameters()).device
    pieces = pieces_of(folder)
    start = pieces.encode(PROMPT.encode()) if pieces is not None else torch.tensor(list(PROMPT.encode()))
    length = LENGTH // 3 if pieces is not None else LENGTH  # a token is about that many letters
    tokens = model.write(start.long().to(device), length, temperature=0.8).tolist()
    return printable(text_of(tokens, pieces))


def _export(summary: Summary) -> Path | None:
    """The weights alone, as one file that safetensors.torch.load_file reads."""
    if summary.checkpoint is None:
        return None
    out = summary.folder / "model.safetensors"
    try:
        out.unlink(missing_ok=True)  # that of an earlier part of this run
        write_plain(summary.checkpoint, out)
    except (OSError, CheckpointError):  # no room for a copy: the weights are in the checkpoint all the same
        return summary.checkpoint
    return out


def _next(folder: Path, args: TrainArgs, epochs: int) -> list[tuple[str, str]]:
    return [
        (f"potluck train {args.recipe} --data YOUR_TEXT", "the same model on your own files or folders"),
        (
            f"potluck train {folder}/run.toml --out {folder} --resume --set fit.epochs={epochs + 1}",
            "one more epoch, from where this run ended",
        ),
        ("potluck run -n 2 YOUR_SCRIPT.py", "your own loop on the same engine, as in examples/own_loop.py"),
        ("potluck doctor", "what this machine brings, and what would make it faster"),
    ]
