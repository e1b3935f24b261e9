"""Command line arguments of a run: which recipe, with which settings, where.

Imports no torch, so that a command answers at once and the workers load it side by side.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w

from potluck.config import from_dict, parse_toml, to_dict
from potluck.environment import PATIENCE_S, check_patience
from potluck.errors import ConfigError
from potluck.files import write_whole
from potluck.words import check_at_least, check_at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    count: int = 2
    """Worker processes on this machine."""
    threads: int | None = None
    """Threads that each computes with; none: this machine's cores, shared evenly."""
    ranks: int | None = None
    """Under a host, where the strategy splits each worker's replica: processes that hold it together; none: one for
    each GPU. Workers of one run may differ in it."""
    patience_s: float = PATIENCE_S
    """How long a worker may be silent before the others give it up. A dead one is noticed at once."""

    def __post_init__(self) -> None:
        check_at_least(1, count=self.count, threads=self.threads, ranks=self.ranks)
        check_at_most("count", self.count, 1 << 12, "each is a process; one for each GPU, or for each core, is usual")
        check_at_most("threads", self.threads, 1 << 12, "more than the cores of this machine help nobody")
        check_patience("patience_s", self.patience_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainArgs:
    recipe: str
    settings: tuple[str, ...] = ()
    """Overrides, each `a.b=value`."""
    out: str | None = None
    """The run folder; none: runs/NAME, numbered if there is one."""
    resume: bool = False
    slow_worker: int | None = None
    """The worker that is made slower than the others. Only the demo asks for it."""
    summary: Literal["whole", "paragraph", "none"] = "whole"
    """How much is said when the run has ended: everything, or only what the model wrote, or nothing."""

    def command(self) -> list[str]:
        """Return what launch.worker is started with."""
        return ["--recipe", json.dumps(to_dict(self))]


def joining_command(script: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Return what launch.worker is started with, to join a host. `settings`: in place of those of the host's recipe."""
    return list(script) or ["--join", json.dumps(list(settings))]


def as_settings(given: Mapping[str, str | int | Sequence[str] | None]) -> tuple[str, ...]:
    """Convert options to settings, by their names; those that were not given, to none."""
    values = {name: json.dumps(value, ensure_ascii=False) for name, value in given.items() if value or value == 0}
    return tuple(f"{name}={value}" for name, value in values.items())


def find_recipe(name: str) -> tuple[str, str]:
    """A recipe's text, and where it came from: a file, or a built-in one by its name or as recipes/NAME.toml."""
    path = Path(name)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read the recipe {path}: {error}.") from None
    stem = path.name.removesuffix(".toml")
    if stem in (found := built_in_recipes()) and path.parent.name in ("", "recipes"):
        return found[stem].read_text(encoding="utf-8"), f"the built-in recipe {stem}"
    raise ConfigError(f"There is no recipe {name}. Built in are: {', '.join(found)}.")


def built_in_recipes() -> dict[str, Path]:
    folder = Path(str(resources.files("potluck"))) / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def recipe_table(name: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe by its name, with these settings in place of its own."""
    text, source = find_recipe(name)
    return parse_toml(text, source=source, overrides=tuple(settings))


def recipe_of(run: Path) -> dict[str, Any]:
    """Read the recipe that a run folder keeps."""
    place = run / "run.toml"
    return parse_toml(place.read_text(encoding="utf-8"), source=str(place))


def workers_of(args: TrainArgs) -> WorkersConfig:
    """How many workers it takes. Everything else in the recipe is checked by the workers."""
    return workers_in(recipe_table(args.recipe, args.settings))


def workers_in(recipe: Mapping[str, Any]) -> WorkersConfig:
    table = recipe.get("workers", {})
    if not isinstance(table, dict):
        raise ConfigError(f"workers is a table of settings, such as workers.count=2, not {table!r}.")
    return from_dict(WorkersConfig, table, "workers")


def write_recipe(args: TrainArgs, out: Path) -> int:
    """The recipe that the arguments come to, as a file. Returns the exit code."""
    if out.exists():
        raise ConfigError(f"{out} is there already, and is not overwritten. Remove it, or name another file.")
    try:
        write_whole(out, tomli_w.dumps(recipe_table(args.recipe, args.settings)))
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror}.") from None
    print(f"Wrote {out}. Train it here with: potluck train {out}\nLead it for others to join: potluck host {out}")
    return 0


def ask_for_files(paths: Sequence[str]) -> ConfigError:
    """Let the person be asked in a worker, where there is one; and say what is to be done where there is none."""
    shown = ", ".join(map(repr, paths[:MOST_SHOWN])) + (", ..." if len(paths) > MOST_SHOWN else "")
    place = os.environ.get(FILES_ASKED)
    if place is not None and len(paths) <= MOST_SHOWN and all(len(path) <= 1024 for path in paths):
        write_whole(Path(place), json.dumps(list(paths)))
    return ConfigError(
        f"The host's recipe names files for this machine to read: {shown[:2000]}. Nothing was read: the host of a run"
        " learns what is in the data that others train it on. Name what you want to train on yourself, with"
        " potluck join --data PATH INVITE."
    )


FILES_ASKED = "POTLUCK_FILES_ASKED"
"""Tells a worker where it leaves the names of the files that the host's recipe wants read."""

MOST_SHOWN = 20
