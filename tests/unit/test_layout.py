"""The house keeps its shape: imports point one way, pure files stay pure, and the docs name every file."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "potluck"
FILES = sorted(SOURCE.rglob("*.py"))

# Each room, and the rooms that it may import. `ground` is the files at the bottom.
MAY_IMPORT = {
    "ground": {"ground"},
    "wire": {"ground", "wire"},
    "fleet": {"ground", "wire", "agree", "fleet"},
    "agree": {"ground", "agree"},
    "shard": {"ground", "shard"},
    "stages": {"ground", "stages"},
    "train": {"ground", "wire", "fleet", "agree", "shard", "stages", "train"},
    "top": {"ground", "train", "top"},
}
GROUND = {"errors", "events", "config", "shares", "words"}

PURE = [
    "shares.py",
    "agree/*.py",
    "shard/optimizer_shard.py",
    "stages/plan.py",
    "stages/balance.py",
    "store/objects.py",
    "stages/protocol.py",
    "wire/*.py",
    "fleet/ledger.py",
    "fleet/tree.py",
    "fleet/coordinator.py",
    "fleet/effects.py",
    "fleet/membership.py",
    "fleet/description.py",
    "train/schedule.py",
    "agree/pulse.py",
]
IMPURE = {"socket", "asyncio", "threading", "time", "torch.distributed", "subprocess", "random"}


def imports(path: Path) -> set[str]:
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

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def room(module: str) -> str:
    parts = module.removeprefix("potluck").strip(".").split(".")
    if parts[0] in GROUND:
        return "ground"
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
    look = "import sys, potluck.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & imports(path), path
        text = path.read_text(encoding="utf-8")
        for word in ("torch.load(", "_object_list(", "_object(", "np.load("):
            assert word not in text, f"{path} uses {word}"


def test_the_layout_names_every_file_and_no_other() -> None:
    files = {str(path.relative_to(SOURCE)) for path in FILES if path.name != "__init__.py"}
    tree = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    assert files_in_tree(tree) - {"__init__.py"} == files


def files_in_tree(text: str) -> set[str]:
    """The Python files of the indented tree below `src/potluck/`."""
    lines = text.split("src/potluck/\n", 1)[1].split("\n\n")[0].splitlines()
    found, folder = set(), ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not indent or not line.strip():
            break
        name = line.split()[0]
        if name.endswith("/"):
            folder = name
        elif name.endswith(".py"):
            found.add((folder if indent > 2 else "") + name)
    return found


def test_every_module_says_what_it_is() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
