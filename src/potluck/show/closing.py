"""The end of a command, in the terminal: where things are, and what to try next."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console


def show_paths(console: Console, paths: Mapping[str, Path | None]) -> None:
    """Show those that there are, in a column."""
    for name, path in paths.items():
        if path is not None:  # as it is: brackets in a path would be instructions
            console.print(f"  {name:<12} {path}", markup=False)


def show_next(console: Console, commands: Iterable[tuple[str, str]]) -> None:
    """Show commands, each with what it does."""
    console.print("\nWhat to try next", style="bold")
    for command, what in commands:
        console.print(f"  {command}\n      {what}", markup=False)
