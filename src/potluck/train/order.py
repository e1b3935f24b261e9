"""What was ordered on the command line: which recipe, with which settings, where.

Imports no torch, so that a command answers at once and the workers load it side by side.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from potluck.config import from_dict, parse_toml
from potluck.errors import ConfigError

PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    count: int = 2
    """Worker processes on this machine."""
    threads: int | None = None
    """Threads that each computes with; none: this machine's cores, shared evenly."""
    patience_s: float = PATIENCE_S
    """How long a worker may be silent before the others give it up. A dead one is noticed at once."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, not {self.count}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if not self.patience_s > 0:
            raise ValueError(f"patience_s must be above 0, not {self.patience_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    recipe: str
    settings: tuple[str, ...] = ()
    """Overrides, each `a.b=value`."""
    out: str | None = None
    """The run folder; none: runs/NAME, numbered if there is one."""
    resume: bool = False


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


def workers_of(order: Order) -> WorkersConfig:
    """How many workers the order needs. Everything else in the recipe is checked by the workers."""
    text, source = find_recipe(order.recipe)
    table = parse_toml(text, source=source, overrides=order.settings).get("workers", {})
    if not isinstance(table, dict):
        raise ConfigError(f"workers is a table of settings, such as workers.count=2, not {table!r}.")
    return from_dict(WorkersConfig, table, "workers")
