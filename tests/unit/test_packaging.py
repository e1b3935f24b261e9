"""What is installed, and what other systems are handed, says what is so. `make test-dist` asks the schemas of those."""

import contextlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

import potluck
from potluck import cli
from tests.unit.test_layout import FILES, SOURCE, imports

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
EXAMPLES = ROOT / "examples"
INSTALLING = (ROOT / "docs" / "guide" / "installing.md").read_text(encoding="utf-8")


def named(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;@ ]", each)[0].lower().replace("_", "-") for each in requirements}


def needed() -> dict[str, set[str]]:
    """Each library that a file imports, with those files."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        for module in imports(path):
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names and top not in ("potluck", ""):
                found.setdefault(top.lower().replace("_", "-"), set()).add(str(path.relative_to(SOURCE)))
    return found


def test_what_is_imported_is_what_is_asked_for() -> None:
    base = named(PROJECT["dependencies"])
    users = {name for name in EXTRAS if name not in ("dev", "docs", "dist", "fuzz")}
    offered = base.union(*(named(EXTRAS[name]) for name in users))
    imported = needed()
    unnamed = {name: files for name, files in imported.items() if name not in offered | UNDER_ANOTHER}
    assert unnamed == {}
    assert base - set(imported) == set(), "the base install brings what nothing imports"


UNDER_ANOTHER = {"mlflow", "opentelemetry"}
"""Libraries whose distribution has another name: mlflow-skinny, opentelemetry-sdk."""


def test_the_guide_names_every_extra_and_no_other() -> None:
    rows = re.findall(r"^\| `([a-z0-9]+)` \|", INSTALLING, re.M)
    assert sorted(rows) == sorted(set(EXTRAS) - {"dev", "docs", "dist", "fuzz"})


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"] == potluck.__version__
    assert citation["license"] == PROJECT["license"]


def test_every_direct_dependency_is_pinned() -> None:
    pinned = named((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:])
    asked = named([*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)])
    assert sorted(asked - pinned - {"potluck", *UNPINNED}) == []


UNPINNED = {"ray"}
"""Not installed for tests."""


def test_the_workflow_runs_targets_that_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    lines = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {"make check", "make test", "make demo", "make dist"} <= set(lines)
    assert all(line.split()[0] == "make" and line.split()[1] in targets for line in lines)
    promised = workflow["jobs"]["two-commands"]["strategy"]["matrix"]["python"]
    assert set(re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))) <= set(promised)


def test_an_image_is_made_of_the_package_alone_and_runs_as_nobody_in_particular() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {"src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
    assert all((ROOT / name).exists() for name in kept)
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)[1:]
    final = [stage for stage in stages if "ENTRYPOINT" in stage]
    assert [stage.split()[2] for stage in final] == ["cuda", "cpu"]
    assert all(stage.index("USER potluck") < stage.index('ENTRYPOINT ["potluck"]') for stage in final)


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(each)


def manifests() -> Iterator[tuple[str, Any]]:
    for path in sorted(
        [*EXAMPLES.glob("kubernetes/*.yaml"), *EXAMPLES.glob("skypilot/*"), EXAMPLES / "dstack/.dstack.yml"]
    ):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield path.name, document


def commands(document: Any) -> Iterator[list[str]]:
    """Of containers whose entry point is potluck, and of lines for a shell."""
    for each in mappings(document):
        if "image" in each and "args" in each:
            yield each["args"]
        for line in [each.get("run", ""), *each.get("commands", ())]:
            if isinstance(line, str) and line.startswith("potluck "):
                yield shlex.split(line)[1:]


def test_what_clusters_are_told_to_run_are_commands() -> None:
    found = [(name, command) for name, document in manifests() for command in commands(document)]
    assert len(found) == 9
    for name, command in found:
        words = command if hasattr(cli.Join, "watch") else [word for word in command if word not in ("--watch", "auto")]
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                tyro.extras.subcommand_cli_from_dict(
                    cli.COMMANDS, args=words, prog="potluck", config=(tyro.conf.FlagCreatePairsOff,)
                )
        except SystemExit:
            pytest.fail(f"{name}: {command} does not parse: {said.getvalue()}")


def test_an_invite_reaches_a_pod_as_a_file_and_no_other_way() -> None:
    for name, document in manifests():
        for each in mappings(document):
            assert "env" not in each and "envFrom" not in each, name
        for command in commands(document):
            assert "://" not in " ".join(command), name
            if command[0] == "join":  # the worker has the invite, and never what is the host's alone
                assert command[-1].endswith("invite"), name
    for name, document in manifests():
        for pod in (each for each in mappings(document) if "containers" in each):
            secrets = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
            kinds = {container["args"][0] for container in pod["containers"]}
            assert secrets == ({"potluck-host"} if kinds == {"host"} else {"potluck-invite"}), name
