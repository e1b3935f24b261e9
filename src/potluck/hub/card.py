"""A model card from a run's events and its recipe: figures, proof, who took part, and how it was trained.

It is made to be shown to anybody: no path of this machine, no name of a worker, no address and no invite is in it, and
words that a worker chose, as all of the events may be, make no link, image or HTML.
Knows nothing of the hub, nor of torch.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import tomli_w

from potluck.events import read_events
from potluck.words import count, duration, plural

MOST_FIGURES = 50
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class RunSummary:
    """Figures of a run, summed up from its events, however often it was resumed."""

    begun: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Each step as it was done last."""
    validation: dict[str, Any] = field(default_factory=dict)
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    """Devices of the workers that came to a host, counted."""
    lost: int = 0
    resumed: int = 0
    skipped: int = 0

    @classmethod
    def read(cls, events: Path) -> "RunSummary":
        summary = cls()
        if events.is_file():
            for record in read_events(events):
                summary._take(record)
        return summary

    def _take(self, record: dict[str, Any]) -> None:
        match record["event"]:
            case "run_started":
                self.resumed += bool(self.begun)
                self.begun = record
            case "step_done":
                self.steps[record["step"]] = record
            case "step_skipped":
                self.skipped += 1
            case "validated":
                self.validation = record
            case "epoch_done":
                self.epochs[record["epoch"]] = record
            case "worker_came":
                self.kinds[record["kind"]] += 1
            case "worker_went":
                self.lost += not record["polite"] and bool(record.get("took_part", True))

    @property
    def last(self) -> dict[str, Any]:
        return self.steps[max(self.steps)] if self.steps else {}

    @property
    def most_workers(self) -> int:
        return max((len(step["workers"]) for step in self.steps.values()), default=int(self.begun.get("workers", 1)))


@dataclass(frozen=True)
class Pushed:
    """The model that is uploaded, and where."""

    repo: str
    is_adapter: bool
    classifies: bool

    @property
    def kind(self) -> str:
        """The class of transformers that loads it."""
        return f"AutoModelFor{'SequenceClassification' if self.classifies else 'CausalLM'}"


def model_card(run: Path, recipe: dict[str, Any], pushed: Pushed) -> str:
    """`recipe`: what run.toml says; of a model from Hugging Face, it names its base."""
    summary, name = RunSummary.read(run / "events.jsonl"), without_paths(str(recipe.get("name", "model")))
    base = without_paths(str(recipe.get("model", {}).get("hf", "")))
    return "\n".join(
        [
            _front(base, is_adapter=pushed.is_adapter),
            f"# {name}\n",
            f"{_how(summary, base, is_adapter=pushed.is_adapter)}\n",
            "## Figures\n",
            _table(_figures(summary)),
            "## Each sample exactly once\n",
            *(f"- {_proof(epoch)}" for _, epoch in sorted(summary.epochs.items())),
            *([] if summary.epochs else ["No epoch was finished, so there is no proof of one."]),
            "\n## Who took part\n",
            f"{_who(summary)}\n",
            "## Use\n",
            f"```python\n{_use(base, pushed)}\n```\n",
            "## Recipe\n",
            "Paths are shortened to their names.\n",
            f"```toml\n{tomli_w.dumps(without_paths(recipe)).strip()}\n```\n",
        ]
    )


def _front(base: str, *, is_adapter: bool) -> str:
    lines = [f"library_name: {'peft' if is_adapter else 'transformers'}"]
    if HUB_ID.fullmatch(base):
        lines.append(f"base_model: {base}")
    return "\n".join(["---", *lines, "tags:", "- potluck", "---", ""])


def _how(told: RunSummary, base: str, *, is_adapter: bool) -> str:
    what = f"{'An adapter (LoRA) for' if is_adapter else 'Fine-tuned from'} `{base}`" if base else "A small llama"
    by = "a fleet of machines that could come and go" if told.kinds else plural(told.most_workers, "worker")
    resumed = f" The run was resumed {plural(told.resumed, 'time')}." if told.resumed else ""
    return f"{what}, trained with Potluck on {by}.{resumed}"


def _figures(summary: RunSummary) -> dict[str, str]:
    last, unit = summary.last, as_words(summary.begun.get("unit", "rows"))
    rows: dict[str, str] = {}
    if summary.begun:
        rows["trained parameters"] = count(summary.begun["parameters"])
        rows["batch"] = plural(summary.begun["batch_size"], "row")
    if last:
        rows["steps"] = f"{last['step']:,}" + (f", and {summary.skipped:,} skipped" if summary.skipped else "")
        rows["rows"] = f"{last['rows_seen']:,}"
        rows[unit if unit != "rows" else "samples"] = count(sum(step["samples"] for step in summary.steps.values()))
        rows["time in steps"] = duration(sum(step["seconds"] for step in summary.steps.values()))
        rows["training loss of the last step"] = f"{last['loss']:.4f}"
    if summary.validation:
        loss = summary.validation["loss"]
        figures = ({"loss": loss} if loss is not None else {}) | summary.validation["metrics"]
        rows |= {f"validation {as_words(name)}": f"{value:.4f}" for name, value in list(figures.items())[:MOST_FIGURES]}
    return rows


def _table(rows: dict[str, str]) -> str:
    return "| figure | value |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())


def _proof(epoch: dict[str, Any]) -> str:
    """Write the proof in our own words: the run's may name workers."""
    used, total, number = epoch["used"], epoch["total"], epoch["epoch"] + 1
    sentence = f"Epoch {number}: {used:,} of {total:,} samples were used, each exactly once"
    if used != total:
        return f"Epoch {number}: {used:,} of {total:,} samples were used."
    if not epoch["same_weights"]:
        return f"{sentence}; workers' weights had drifted apart, and were made one again."
    others = f" ({plural(len(epoch['not_compared']), 'worker')} could not be compared)" if epoch["not_compared"] else ""
    return f"{sentence}; all workers held the same weights{others}."


def _who(summary: RunSummary) -> str:
    if not summary.kinds:
        return (
            f"{plural(summary.most_workers, 'worker')} of one machine, on"
            f" {as_words(summary.begun.get('device', 'an unknown device'))}."
        )
    kinds = "".join(f"\n- {number} × {as_words(kind)}" for kind, number in summary.kinds.most_common(20))
    lost = f" {plural(summary.lost, 'time')} one was lost, and others did its work." if summary.lost else ""
    return f"At most {plural(summary.most_workers, 'worker')} at once.{lost} Those who came:\n{kinds}"


def as_words(said: object) -> str:
    """Words of a peer, without anything that a page could take for a link, an image or a command."""
    words = re.sub(r"[^\w .,;:+()-]", "", str(said))[:120]
    # Markdown makes a link of www.something, too.
    return re.sub(r"(?i)www(?=\.)", "www ", words)


def _use(base: str, pushed: Pushed) -> str:
    kind, repo = pushed.kind, pushed.repo
    if pushed.is_adapter:
        lines = [
            "from peft import PeftModel",
            f"from transformers import {kind}\n",
            f'base = {kind}.from_pretrained("{base}")',
            f'model = PeftModel.from_pretrained(base, "{repo}")',
        ]
    else:
        lines = [
            f"from transformers import {kind}, AutoTokenizer\n",
            f'model = {kind}.from_pretrained("{repo}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        ]
    return "\n".join(lines)


def without_paths(value: Any) -> Any:
    """Strings that lead somewhere on this machine or network, cut down to a name; ids of the hub stay."""
    match value:
        case dict():
            return {key: without_paths(item) for key, item in value.items()}
        case list():
            return [without_paths(item) for item in value]
        case str() if "://" in value:
            return f"{value.partition('://')[0]}://..."
        case str() if HUB_ID.fullmatch(value) and not Path(value).exists() and value[0] != ".":
            return value
        case str() if "/" in value or "\\" in value or value.startswith("~"):
            return PurePosixPath(PureWindowsPath(value).name or "...").name
    return value
