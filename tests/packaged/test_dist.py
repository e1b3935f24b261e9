"""The package as a stranger gets it: built, put into an environment of its own, and used without this repository."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "potluck"
MOST_BYTES = 1_000_000
BASE_COMMANDS = ("demo", "train", "run", "host", "invite", "join", "export", "doctor")
PROGRAM = """
import potluck

fleet = potluck.init()
reveal_type(fleet.rank)
reveal_type(potluck.init)
fleet.rank.no_such_thing
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("build") is None, reason="`make test-dist` installs what builds the package"),
]


def run(command: list[str | Path], cwd: Path, *, codes: tuple[int, ...] = (0,)) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode in codes, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make dist`: an sdist, and a wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--outdir", folder, ROOT], cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run([*pip, "torch"], cwd=folder)
    run([*pip, wheel], cwd=folder)
    return folder / "bin"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_small_and_has_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    files = {str(path.relative_to(SOURCE.parent)) for path in SOURCE.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    packed = contents(wheel)
    assert {name for name in packed if ".dist-info/" not in name} == files
    assert "potluck/py.typed" in files and "potluck/recipes/demo.toml" in files
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_the_sdist_makes_the_wheel_that_the_repository_makes(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], cwd=tmp_path)
    (direct,) = tmp_path.glob("*.whl")
    assert contents(direct) == contents(wheel)


def test_what_an_image_is_built_from_makes_that_wheel_too(wheel: Path, tmp_path: Path) -> None:
    """The Dockerfile's first stage, on what .dockerignore lets through. No engine runs here."""
    context = tmp_path / "context"
    context.mkdir()
    for name in re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, context / name)
    (command,) = re.findall(r"^RUN (pip wheel .*)$", (ROOT / "Dockerfile").read_text(), re.M)
    words = [str(tmp_path / "made") if word == "/wheel" else word for word in command.split()]
    run([sys.executable, "-m", *words], cwd=context)
    (made,) = (tmp_path / "made").glob("*.whl")
    assert contents(made) == contents(wheel)


def test_what_is_installed_agrees_with_itself_and_brings_no_extra(installed: Path, tmp_path: Path) -> None:
    run([installed / "pip", "check"], cwd=tmp_path)
    there = {line.split("==")[0].lower() for line in run([installed / "pip", "freeze"], cwd=tmp_path).splitlines()}
    assert "potluck @" not in there and not there & {"obstore", "transformers", "tensorboard", "pytest", "ray"}


def test_the_base_commands_work_without_the_repository(installed: Path, tmp_path: Path) -> None:
    potluck = installed / "potluck"
    where = run([installed / "python", "-c", "import potluck; print(potluck.__file__)"], cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert run([potluck, "--version"], cwd=tmp_path).startswith("potluck 0.")
    for command in BASE_COMMANDS:
        assert "usage: potluck" in run([potluck, command, "--help"], cwd=tmp_path)
    assert "torch" in run([potluck, "doctor"], cwd=tmp_path, codes=(0, 1))
    train = [potluck, "train", "demo", "-n", "2", "--set", "fit.max_steps=3", "--set", "data.limit_bytes=50_000"]
    said = run([*train, "--out", "run"], cwd=tmp_path)
    assert (tmp_path / "run" / "loss.png").is_file() and "3 steps" in said, said


def test_a_store_in_s3_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    look = "from potluck.store.store import _place_of; _place_of('s3://bucket/prefix', 1.0)"
    said = run([installed / "python", "-c", look], cwd=tmp_path, codes=(1,))
    assert "pip install './potluck[s3]'" in said


def test_a_program_elsewhere_is_checked_against_the_packages_types(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed / "python"]
    said = run([*mypy, "--cache-dir", tmp_path / "cache", "program.py"], cwd=tmp_path, codes=(1,))
    assert 'Revealed type is "int"' in said or 'Revealed type is "builtins.int"' in said
    assert 'has no attribute "no_such_thing"' in said
    assert "Found 1 error in 1 file" in said, said
