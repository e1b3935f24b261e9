"""docs/settings.md is made from the code: every setting with its default, so that the page cannot go stale.

`python -m tests.unit.test_settings_doc` writes it anew.
"""

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import potluck
from potluck.finetune.recipe import FinetuneConfig
from potluck.finetune.settings import AdapterConfig, PretrainedConfig, RowsConfig
from potluck.train.arguments import WorkersConfig
from potluck.train.model import ModelConfig
from potluck.train.recipe import OptimizerConfig, RecipeConfig
from potluck.train.text import DataConfig
from tests.unit.test_events_doc import meanings

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "settings.md"

HEAD = """# Every setting

Each setting with its default, one line each. This page is made from the code by
`python -m tests.unit.test_settings_doc`. In Python a setting is an argument, such as `potluck.StepConfig(clip=1.0)`.
In a [recipe](guide/first-run.md#a-recipe) it is a line of its table: `[step]`, and below it `clip = 1.0`; `None` is a
line left out. On the command line of `potluck train` and `potluck host` it is `--set step.clip=1.0`. A command's own
options are in its help (`--help`).
"""

INIT = {
    "policy": 'When workers agree: `"sync"`, `"cadence"`, `"async"`, `"auto"`, or one of the [classes](#policies). '
    "`None`: Sync, and Auto under a host.",
    "strategy": "What of the model is split over ranks: see [strategies](#strategies).",
    "stages": "How the model is cut by layers over workers: see [stages](#stages). `None`: it is not.",
    "step": "How one step is computed: see [StepConfig](#stepconfig).",
    "wire": 'The form in which replicas send each other numbers: `"fp32"`, `"bf16"`, `"int8"`, `"int4"`, or `"auto"`: '
    "what makes steps shorter.",
    "patience_s": "How many seconds a worker of a process group may be silent before the others give it up. Under a "
    "host it is the host's `--patience`, 30 seconds by default.",
}
PREPARE = {
    "model": "An `nn.Module`, or a list or dict of several.",
    "optimizer": "Any torch optimizer, or a list of several that take turns.",
    "dataset": "A dataset, tensors, a `DataLoader` or a stream: see [your data](guide/your-data.md).",
}
TRAINER = {
    "model": "As for `prepare`.",
    "optimizer": "As for `prepare`.",
    "dataset": "As for `prepare`.",
    "loss": "`loss_of(model, batch)`: the mean loss over the batch's rows, or `(mean, samples)`.",
    "batch_size": "Rows of one step over all workers, or a [BatchConfig](#batch). `None`: a `DataLoader`'s own.",
    "folder": "The run folder.",
    "validation": "The rows to validate with.",
    "validate": "A function for them, which may give figures of your own. `None`: `loss`.",
    "collate": "As for `prepare`.",
    "callbacks": "Functions that are called with every event; one that raises ends the run.",
    "rows": "As for `prepare`.",
    "engine": "What `potluck.init()` returned. `None`: the trainer calls it.",
    "config": "A [FitConfig](#fit).",
}
ENVIRONMENT = {
    "POTLUCK_PAGE": "Where the live page is, for commands without `--page`: `on`, `off`, a port, or ADDRESS:PORT.",
    "POTLUCK_LOG": "What is logged: `debug`, `info` or `warning`; with a file, as in `info:/tmp/potluck.log`.",
    "POTLUCK_INVITE": "The line to join with, or a file that holds it. A script that plain Python or torchrun starts "
    "joins that host.",
    "POTLUCK_NAME": "The name under which such a script is shown.",
    "OMP_NUM_THREADS": "Threads of each worker, where `--threads` and `workers.threads` do not say.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that workers of this machine may use.",
    "GLOO_SOCKET_IFNAME": "The network interface of a process group over Gloo.",
    "XDG_RUNTIME_DIR": "Where processes of yours on this machine find each other, as for `potluck pause`.",
    "XDG_CACHE_HOME": "Where base models that a host has sent are kept.",
    "AWS_ENDPOINT_URL": "The server of an `s3://` store; `AWS_ENDPOINT_URL_S3` goes before it.",
    "AWS_ALLOW_HTTP": "Whether that server may be talked to without encryption.",
    "WANDB_PROJECT": "The project of `--track wandb`; so are `MLFLOW_EXPERIMENT_NAME` and `TRACKIO_PROJECT`.",
}
DEFAULTS = {
    "POTLUCK_PAGE": "`on`",
    "POTLUCK_NAME": "HOST-PID",
    "OMP_NUM_THREADS": "cores / workers",
    "CUDA_VISIBLE_DEVICES": "all",
    "GLOO_SOCKET_IFNAME": "loopback",
    "XDG_RUNTIME_DIR": "`~/.cache`",
    "XDG_CACHE_HOME": "`~/.cache`",
    "AWS_ENDPOINT_URL": "Amazon's",
    "AWS_ALLOW_HTTP": "`false`",
    "WANDB_PROJECT": "`potluck`",
}
"""What holds where a variable is not set; for the others, nothing."""
BETWEEN_PROCESSES = {
    "POTLUCK_FILES_ASKED",
    "POTLUCK_IGNORED",
    "POTLUCK_LAST_WORDS",
    "POTLUCK_LEAVING",
    "POTLUCK_METADATA",
    "POTLUCK_NODE",
    "POTLUCK_ONLY",
    "POTLUCK_PAGE_POINTER",
    "POTLUCK_PARENT_PIPE",
    "POTLUCK_QUIET",
    "POTLUCK_RANKS",
    "POTLUCK_RENDEZVOUS",
    "POTLUCK_RETURNING",
}
"""What a parent tells its processes, or a test a process; nobody else sets them."""
TABLES = {
    "batch": "[batch](#batch)",
    "optimizer": "[optimizer](#optimizer)",
    "step": "[StepConfig](#stepconfig)",
    "fit": "[fit](#fit)",
    "workers": "[workers](#workers)",
    "policy": "[policies](#policies)",
    "strategy": "[strategies](#strategies)",
    "stages": "[stages](#stages)",
    "schedule": "[fit.schedule](#fitschedule)",
    "checkpoint": "[fit.checkpoint](#fitcheckpoint)",
    "model": "[model.hf](#modelhf)",
    "data": "[data of rows](#data-of-rows)",
    "lora": "[lora](#lora)",
}
"""Where the settings of a table are; a recipe of the built-in model has tables of the same names."""


def said_by(kind: type) -> dict[str, str]:
    """The docstring below each field, also of the classes that it is derived from."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if is_dataclass(each):
            found |= meanings(each)
    return found


def written(default: Any) -> str:
    """A default as one writes it."""
    if default is ...:
        return "left out"
    if default is inspect.Parameter.empty or default is MISSING:
        return "required"
    return f"`{default!r}`"


def choices(hint: Any) -> str:
    """The words that a setting may be, if it is one of some."""
    options = [hint] if get_origin(hint) is Literal else get_args(hint) if get_origin(hint) is types.UnionType else []
    words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
    return f"{', '.join(f'`{word!r}`' for word in words)}. " if len(words) > 1 else ""


def default_of(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| `{name}` | {default} | {' '.join(meaning.split())} |\n" for name, default, meaning in rows]
    return f"| setting | default | what it is |\n|---|---|---|\n{''.join(lines)}"


def of_class(kind: type, but: type | None = None) -> str:
    """The settings of a dataclass, without those of `but`; a table within it by its link alone."""
    said, hints, rows = said_by(kind), get_type_hints(kind), []
    passed = {field.name for field in fields(but)} if but else set()  # type: ignore[arg-type]
    for field in fields(kind):  # type: ignore[arg-type]
        if not field.init or field.name in passed:
            continue
        default = default_of(field)
        link = TABLES.get(field.name, "") if kind in (RecipeConfig, potluck.FitConfig, FinetuneConfig) else ""
        shown = "see there" if is_dataclass(default) else written(default)
        meaning = " ".join(filter(None, [choices(hints[field.name]) + said[field.name], link and f"See {link}."]))
        rows.append((field.name, shown, meaning))
    return table(rows)


def of_call(call: Callable[..., Any], said: dict[str, str]) -> str:
    """The parameters of a function, each with what is said of it here or in its docstring."""
    listed = re.findall(r"^- `(\w+)`: (.+?)(?=^- |^$|\Z)", inspect.getdoc(call) or "", re.M | re.S)
    said = dict(listed) | said
    rows = []
    for name, parameter in inspect.signature(call).parameters.items():
        if name == "self":
            continue
        default = parameter.default
        shown = f"`{type(default).__name__}()`" if is_dataclass(default) else written(default)
        rows.append((name, shown, said[name][0].upper() + said[name][1:]))
    return table(rows)


def section(title: str, of: str, *, level: int = 2, about: str = "") -> str:
    return f"{'#' * level} {title}\n\n{about + chr(10) * 2 if about else ''}{of}"


def page() -> str:
    windows = "Cadence, Async and Auto share these; Auto always averages moments, and has no `overhead_target`."
    parts = [
        HEAD,
        section("potluck.init", of_call(potluck.init, INIT)),
        section("fleet.prepare", of_call(potluck.Engine.prepare, PREPARE)),
        section("Trainer", of_call(potluck.Trainer.__init__, TRAINER)),
        section("StepConfig", of_class(potluck.StepConfig), about="`[step]` in a recipe."),
        section(
            "Policies", "", about='`[policy]` in a recipe, with `kind = "sync"` or another; or only its name.'
        ).strip()
        + "\n",
        section("Sync", of_class(potluck.Sync), level=3),
        section("Cadence, Async, Auto", of_class(potluck.Cadence), level=3, about=windows),
        section("Async alone", of_class(potluck.Async, but=potluck.Cadence), level=3),
        section("Strategies", "", about="`[strategy]` in a recipe. `NoShard()` has no settings.").strip() + "\n",
        section("FullShard", of_class(potluck.FullShard), level=3),
        section("ShardGradOp", of_class(potluck.ShardGradOp), level=3),
        section("HybridShard", of_class(potluck.HybridShard), level=3),
        section("Stages", of_class(potluck.Stages), about="`[stages]` in a recipe."),
        section("Pipeline", of_class(potluck.Pipeline), level=3, about="`Direct()` has no settings."),
        section("DataStore", of_class(potluck.DataStore), level=3),
        section("A recipe", of_class(RecipeConfig), about="The lines and tables that every recipe has."),
        section("batch", of_class(potluck.BatchConfig), level=3),
        section("optimizer", of_class(OptimizerConfig), level=3),
        section("fit", of_class(potluck.FitConfig), level=3),
        section("fit.schedule", of_class(potluck.ScheduleConfig), level=3),
        section("fit.checkpoint", of_class(potluck.CheckpointConfig), level=3),
        section("workers", of_class(WorkersConfig), level=3),
        section("model", of_class(ModelConfig), level=3, about="Of the built-in model."),
        section("data", of_class(DataConfig), level=3, about="Of the built-in model."),
        section("A recipe that fine-tunes", of_class(FinetuneConfig, but=RecipeConfig), about=FINETUNES),
        section("model.hf", of_class(PretrainedConfig), level=3, about="Its `[model]` table."),
        section("data of rows", of_class(RowsConfig), level=3, about="Its `[data]` table."),
        section("lora", of_class(AdapterConfig), level=3),
        section("Environment variables", environment()),
    ]
    return "\n".join(parts)


FINETUNES = "It has [the tables above](#a-recipe), and these in place of `[model]` and `[data]`."


def environment() -> str:
    return table([(name, DEFAULTS.get(name, "not set"), meaning) for name, meaning in ENVIRONMENT.items()])


def test_the_page_is_that_of_the_code() -> None:
    """`python -m tests.unit.test_settings_doc` writes it anew."""
    assert DOCUMENT.read_text(encoding="utf-8") == page()


def test_every_setting_says_what_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", page(), re.M)
    assert len(rows) > 110
    assert [name for name, default, meaning in rows if not default or len(meaning) < 10] == []


def test_the_page_names_the_environment_variables_of_the_code_and_no_other() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "potluck").rglob("*.py"))
    ours = set(re.findall(r"POTLUCK_[A-Z_]*[A-Z]", sources))
    assert ours == {name for name in ENVIRONMENT if name.startswith("POTLUCK_")} | BETWEEN_PROCESSES
    assert [name for name in ENVIRONMENT if name not in sources] == []


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
