"""The core and the front: what trains, and what is made with it. The front has the handle that users have."""

import ast
import subprocess
import sys
from pathlib import Path

import potluck
from tests.unit.test_layout import FILES, GROUND, SOURCE, imports, tree_of

CORE = {"wire", "agree", "link", "sharding", "stages", "store", "data", "replica", "sums", "engine", "fleet", "save"}
FRONT = {"train", "finetune", "integrations", "page", "trackers", "show", "hub", "cluster", "launch", "commands"}
TOP = {"cli", "doctor", "__init__", "composition"}

# What the front uses of the core beside `from potluck import ...`: files on the disk, rows of a dataset, invites and
# connections to a host, and a host's recorded inputs. launch/host is the host itself. Nothing here is a run that
# computes, but for Joined: a worker that was invited to a recipe hears what to train after it has joined, and not
# before, as with init().
MAY_IMPORT = {
    "train": "data.source save.run_folder save.checkpoint_folder save.export",
    "finetune": "save.checkpoint_folder save.export sharding.stored",
    "integrations": "data.source data.rows data.stream",
    "page": "fleet.invite fleet.connection fleet.host_connector fleet.pipe fleet.watchers wire.messages",
    "cluster": "fleet.invite save.run_folder",
    "commands": "fleet.flight fleet.invite fleet.replaying fleet.waits save.checkpoint_folder save.export",
    "launch": "agree.terms composition engine.start link.link link.ranks save.checkpoint_folder"
    " save.checkpoint_receiver save.run_folder wire.words fleet.base_folder fleet.coordinator"
    " fleet.description fleet.effects fleet.flight fleet.invite fleet.journal fleet.script fleet.server",
}
PARTS = {"works"}
"""Parts of an engine that nothing else is called."""
OF_HANDLES = {*PARTS, "run", "round", "table", "link"}
"""Parts of an engine; a page may have a run of its own, and a model layers."""


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_file_is_on_one_side() -> None:
    assert {room(path) for path in FILES} == CORE | FRONT | GROUND | TOP


def test_the_front_imports_public_names_and_the_few_modules_that_are_said_here() -> None:
    used: dict[str, set[str]] = {}
    for path in FILES:
        if room(path) not in FRONT:
            continue
        for module in imports(path):
            home, *names = module.removeprefix("potluck.").split(".")
            if module.startswith("potluck.") and (home == "composition" or (home in CORE and names)):
                used.setdefault(room(path), set()).add(".".join([home, *names[: home in CORE]]))
    assert used == {where: set(modules.split()) for where, modules in MAY_IMPORT.items()}


def test_the_front_reaches_into_no_engine() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(tree_of(path)) if room(path) in FRONT else ():
            if isinstance(node, ast.Attribute):
                is_handle = ast.unparse(node.value).endswith(("engine", "fleet"))
                if node.attr in (OF_HANDLES if is_handle else PARTS):
                    wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_nothing_of_the_front_before_it_is_asked_to() -> None:
    """A handle that tracks its run, or shows it to somebody who has joined, loads what it needs for that then."""
    lines = (
        "import sys, potluck",
        "potluck.init, potluck.Engine, potluck.errors, potluck.events, potluck.BatchConfig",
        "import potluck.engine.host_table, potluck.fleet.server",
    )
    show = "print(*{name.split('.')[1] for name in sys.modules if name.startswith('potluck.')})"
    code = "\n".join(f"{line}; {show}" for line in lines)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    for line, loaded in zip(lines, shown, strict=True):
        assert not set(loaded.split()) & (FRONT | {"cli", "doctor"}), line


def test_errors_and_events_are_found_where_the_handle_is() -> None:
    assert potluck.errors.ConfigError.__base__ is potluck.errors.PotluckError
    assert issubclass(potluck.events.StepDone, potluck.events.Event)
    assert potluck.BatchConfig(size=8).size == 8
