"""What it takes to bring a plain script here, against what it takes with Accelerate: the lines of examples/port/."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

PORTS = Path(__file__).parents[2] / "examples" / "port"


def code(name: str) -> list[str]:
    """Without the words above it, and without empty lines."""
    text = (PORTS / name).read_text(encoding="utf-8")
    return [line for line in text[text.index('"""\n\n') :].splitlines() if line]


def changed(name: str, plain: str = "plain.py") -> tuple[int, int]:
    """Lines that are written, and lines that go."""
    told = list(difflib.ndiff(code(plain), code(name)))
    return sum(line.startswith("+ ") for line in told), sum(line.startswith("- ") for line in told)


def test_a_port_has_no_more_new_lines_than_accelerates() -> None:
    assert changed("with_potluck.py") == (10, 12)
    assert changed("with_accelerate.py") == (11, 7)


@pytest.mark.parametrize(
    ("plain", "name"),
    [
        ("hf_plain.py", "hf_with_potluck.py"),
        ("sft_plain.py", "sft_with_potluck.py"),
        ("lightning_plain.py", "lightning_with_potluck.py"),
        ("with_accelerate.py", "accelerate_with_potluck.py"),
    ],
)
def test_other_peoples_trainers_change_three_lines_at_most(plain: str, name: str) -> None:
    written, gone = changed(name, plain)
    assert 1 <= written <= 3 and gone <= 2


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_ports_learn(tmp_path: Path) -> None:
    script = str(PORTS / "with_potluck.py")
    for begin in (["run", "-n", "2", script], ["host", script, "-n", "2", "--out", "run"]):
        done = subprocess.run(
            [sys.executable, "-m", "potluck.cli", *begin], cwd=tmp_path, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
        assert "epoch 3: accuracy 0.8" in done.stdout, done.stdout
