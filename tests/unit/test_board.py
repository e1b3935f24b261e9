"""These counts may not grow: modules that write another object's fields, and prose that hides its subject.

Each limit is the count of today. Whoever lowers a count lowers its limit too. `python -m tests.unit.test_board` prints
the places.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise

import pytest

from tests.unit.test_layout import FILES, SOURCE, tree_of

OWNERS = {
    "RunParts": ("run", "_run"),
    "RunProgress": ("progress", "_progress"),
    "OpenStep": ("step", "_step"),
    "Loader": ("loader", "_loader"),
}
"""Classes whose fields are written by others, and the names under which others hold one."""
BELOW = ("agree/", "fleet/")
"""Rooms that know neither class; a host's own state has the same name in them."""
MOST_WRITES = {"RunParts": 12, "RunProgress": 0, "OpenStep": 1, "Loader": 7}
"""Pairs of a field and a module that assigns it from outside."""
MOST_SHARED = dict.fromkeys(OWNERS, 0)
"""Fields that several modules assign, their own included."""

MOST_FRAGMENTS, MOST_VAGUE_NAMES = 7, 36
FRAGMENTS = (
    *("Of ", "What ", "The same", "Those ", "Whoever ", "As ", "So ", "Nothing of", "Which ", "In which", "By which"),
    *("Under which", "Before which", "After which"),
)
"""How a docstring begins whose subject is elsewhere."""
VAGUE = {"told", "found", "mine", "theirs", "given", "asked"}
"""Names for what was done to a thing, where it should be said what it is."""
SHORT_LINES = 3
"""A vague name that lives no longer than this is read at a glance."""


@cache
def trees() -> dict[str, ast.Module]:
    return {str(file.relative_to(SOURCE)): tree_of(file) for file in FILES}


def fields_of(owner: str) -> set[str]:
    """Fields of the class and of those derived from it: annotated in the class, or assigned to self in __init__."""
    every, family = [node for of_file in classes().values() for node in of_file], {owner}
    for node in every:
        family |= {node.name} if any(isinstance(base, ast.Name) and base.id in family for base in node.bases) else set()
    fields: set[str] = set()
    for node in (each for each in every if each.name in family):
        fields |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and _is_name(each.target)}
        for method in (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"):
            fields |= {target.attr for target in _assigned(method) if _last_name(target.value) == "self"}
    return fields


def writers(owner: str) -> dict[str, set[str]]:
    """For each field of the class, the modules that assign it; `its own` for the class itself."""
    fields, found = fields_of(owner), defaultdict[str, set[str]](set)
    for file in trees():
        for target in () if file.startswith(BELOW) else assignments()[file]:
            if target.attr in fields and _last_name(target.value) in OWNERS[owner]:
                found[target.attr].add(file)
        for node in (each for each in classes()[file] if each.name == owner):
            for method in (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name != "__init__"):
                for target in _assigned(method):
                    if target.attr in fields and _last_name(target.value) == "self":
                        found[target.attr].add("its own")
    return dict(found)


@cache
def assignments() -> dict[str, list[ast.Attribute]]:
    return {file: list(_assigned(tree)) for file, tree in trees().items()}


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    return {file: [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] for file, tree in trees().items()}


def _assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, counted up or deleted, wherever below `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def _last_name(node: ast.expr) -> str:
    """`run` for each of `run`, `self.run` and `engine.run`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def writes_from_outside(owner: str) -> list[str]:
    return [f"{field} by {file}" for field, files in writers(owner).items() for file in sorted(files - {"its own"})]


def shared_fields(owner: str) -> list[str]:
    return [f"{field} by {', '.join(sorted(files))}" for field, files in writers(owner).items() if len(files) > 1]


@pytest.mark.parametrize("owner", OWNERS)
def test_no_more_modules_write_the_fields_of_another(owner: str) -> None:
    _check(f"assignments to a field of {owner} from outside", writes_from_outside(owner), MOST_WRITES[owner])
    _check(f"fields of {owner} with several writers", shared_fields(owner), MOST_SHARED[owner])


def _check(what: str, places: list[str], most: int) -> None:
    listed = "\n  ".join(places)
    assert len(places) <= most, f"{len(places)} {what}, and there were {most}:\n  {listed}"


# Prose


def fragments() -> list[str]:
    """Docstrings and notes of fields that begin without their subject."""
    hidden = [each for each in _docstrings() if each[2].startswith(FRAGMENTS)]
    return [f"{file}:{line} {text.splitlines()[0][:80]}" for file, line, text in hidden]


def _docstrings() -> Iterable[tuple[str, int, str]]:
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, getattr(node, "lineno", 1), ast.get_docstring(node) or ""
            for before, note in pairwise(node.body) if isinstance(node, ast.Module | ast.ClassDef) else ():
                is_note = isinstance(before, ast.AnnAssign | ast.Assign) and isinstance(note, ast.Expr)
                if is_note and isinstance(note.value, ast.Constant) and isinstance(note.value.value, str):
                    yield file, note.lineno, note.value.value


def vague_names() -> list[str]:
    places = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = defaultdict[str, list[int]](list)
                for name in (each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in VAGUE):
                    lines[name.id].append(name.lineno)
                places += [f"{file}:{min(at)} {n}" for n, at in lines.items() if max(at) - min(at) > SHORT_LINES]
    return places


def test_no_more_docstrings_begin_without_their_subject() -> None:
    _check("docstrings that begin without their subject", fragments(), MOST_FRAGMENTS)


def test_no_more_names_say_nothing() -> None:
    _check("vague names that live for more than three lines", vague_names(), MOST_VAGUE_NAMES)


def main() -> None:
    for owner in OWNERS:
        print(
            f"{owner}: {len(writes_from_outside(owner))} writes from outside, {len(shared_fields(owner))} shared fields"
        )
        for field, files in sorted(writers(owner).items(), key=lambda item: -len(item[1])):
            print(f"  {field:18} {len(files)}  {', '.join(sorted(files))}")
    for what, places in (("fragments", fragments()), ("vague names", vague_names())):
        print(f"{len(places)} {what}", *places, sep="\n  ")


if __name__ == "__main__":
    main()
