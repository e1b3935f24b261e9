"""The house keeps its shape: imports point one way, pure files stay pure, and the docs name every room."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import potluck

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "potluck"
LAYOUT = ROOT / "docs" / "layout.md"
FILES = sorted(SOURCE.rglob("*.py"))

# Each room, from the ground up, and the rooms below that it may import. `ground` is the files at the bottom.
BELOW = {
    "ground": "",
    "wire": "",
    "agree": "",
    "show": "",
    "trackers": "",
    "hub": "",
    "sharding": "agree",
    "store": "agree",
    "link": "agree sharding store",
    "stages": "agree data link sharding store",
    "composition": "agree sharding stages",
    "fleet": "agree wire",
    "data": "agree fleet",
    "page": "agree fleet show wire",
    "save": "agree fleet link sharding stages store",
    "replica": "agree data fleet link sharding stages",
    "sums": "fleet link replica sharding",
    "engine": "agree composition data fleet link replica save sharding show stages store sums trackers wire",
    # The front; test_border.py says which modules of the core these are. `public` is what `from potluck import` gives.
    "train": "public data save show trackers",
    "integrations": "public data",
    "finetune": "public save sharding show train",
    "launch": "public agree composition engine finetune fleet link page save show trackers train wire",
    "cluster": "fleet launch save train",
}
BELOW["top"] = f"{BELOW['launch']} {BELOW['engine']} cluster hub launch"
MAY_IMPORT = {room: {"ground", room, *below.split()} for room, below in BELOW.items()}
GROUND = {
    "account",
    "batch_shapes",
    "coded_numbers",
    "coded_tensors",
    "config",
    "devices",
    "environment",
    "errors",
    "event_queue",
    "events",
    "files",
    "logs",
    "machine_use",
    "patches",
    "signals",
    "system",
    "tensor_bytes",
    "validations",
    "waiting",
    "words",
}

PURE = [
    "coded_numbers.py",
    "composition.py",
    "agree/*.py",
    "sharding/optimizer_shard.py",
    "stages/plan.py",
    "store/place.py",
    "stages/protocol.py",
    "wire/*.py",
    "fleet/bounds.py",
    "fleet/coordinator.py",
    "fleet/effects.py",
    "fleet/holder.py",
    "fleet/member.py",
    "fleet/member_asks.py",
    "fleet/description.py",
    "fleet/digests.py",
    "fleet/ending.py",
    "fleet/evaluation.py",
    "fleet/gathering.py",
    "fleet/flight_lines.py",
    "fleet/ledger.py",
    "fleet/membership.py",
    "fleet/plain_peers.py",
    "fleet/planning.py",
    "fleet/rejoin_limiter.py",
    "fleet/step_dispatcher.py",
    "fleet/coordinator_state.py",
    "fleet/saving.py",
    "fleet/stragglers.py",
    "fleet/transfers.py",
    "fleet/tree.py",
    "fleet/waits.py",
    "fleet/weights.py",
    "train/schedule.py",
    "trackers/scalars.py",
    "fleet/orders.py",
    "page/fold.py",
    "page/metrics.py",
    "page/peaks.py",
    "show/sentences.py",
    "page/series.py",
    "page/view.py",
]
IMPURE = {"socket", "asyncio", "threading", "time", "torch.distributed", "subprocess", "random"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, wherever in it, but not for type checking alone."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree_of(path))
    return frozenset(found)


def room(module: str) -> str:
    parts = module.removeprefix("potluck").strip(".").split(".")
    if parts[0] in GROUND:
        return "ground"
    if parts[0] in potluck.__all__:
        return "public"
    return parts[0] if parts[0] in MAY_IMPORT else "top"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in FILES:
        home = room(".".join(path.relative_to(SOURCE).with_suffix("").parts))
        for module in imports(path):
            if module.startswith("potluck.") and room(module) not in MAY_IMPORT[home]:
                wrong.append(f"{path.relative_to(SOURCE)} ({home}) imports {module}")
    assert not wrong, "\n".join(wrong)


def test_pure_files_know_no_clock_and_no_network() -> None:
    pure = [path for pattern in PURE for path in SOURCE.glob(pattern)]
    assert len(pure) >= 4
    for path in pure:
        assert not imports(path) & IMPURE, path


def test_the_command_line_does_not_wait_for_torch() -> None:
    look = "import sys, potluck.cli; sys.exit(bool({'torch', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & imports(path), path
        text = path.read_text(encoding="utf-8")
        for word in ("torch.load(", "_object_list(", "_object(", "np.load("):
            assert word not in text, f"{path} uses {word}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Over all rooms, and imports inside of functions count: a cycle is hidden there, and not gone."""
    names = {".".join(("potluck", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in FILES}
    needs = {name: {module for module in imports(path) if module in names} for name, path in names.items()}
    cycles = {tuple(sorted(group)) for group in _together(needs)}
    assert not cycles, "\n".join(map(" <-> ".join, cycles))


def _together(needs: dict[str, set[str]]) -> list[set[str]]:
    """Those who reach each other."""
    reach = {name: set(found) for name, found in needs.items()}
    for middle in needs:
        for found in reach.values():
            if middle in found:
                found |= reach[middle]
    return [{other for other in reach[name] if name in reach[other]} for name in needs if name in reach[name]]


def rooms() -> str:
    """Each room, and what it is."""
    folders = sorted(path for path in SOURCE.iterdir() if (path / "__init__.py").exists())
    return "".join(f"  {folder.name + '/':<21}  {_first_words(folder / '__init__.py')}\n" for folder in folders)


def _first_words(path: Path) -> str:
    first = (ast.get_docstring(tree_of(path)) or "").splitlines()[0]
    return first.split(". ")[0].rstrip(".")


def test_the_layout_names_every_room_and_no_other() -> None:
    assert f"\nsrc/potluck/\n{rooms()}```\n" in LAYOUT.read_text(encoding="utf-8")


def test_no_two_classes_share_a_name() -> None:
    """One word per thing: a name says which class it is without its room."""
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_module_says_what_it_is() -> None:
    for path in FILES:
        assert ast.get_docstring(tree_of(path)), path


if __name__ == "__main__":
    for file in FILES:
        print(f"{file.relative_to(SOURCE)!s:<36} {_first_words(file)}")
