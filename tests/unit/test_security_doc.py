"""docs/security.md names a test for each thing that a worker or a host cannot do, and each of them exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    missing = sorted(name for name in named if f"def {name}(" not in written)
    assert len(named) > 20 and not missing, missing


def test_nothing_is_claimed_without_a_test() -> None:
    section = DOCUMENT.split("### It cannot")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[2:]]
    assert len(rows) > 15 and all(len(row) == 3 and "test" in row[2] for row in rows)


def test_what_a_host_cannot_make_a_joiner_do_is_tested_too() -> None:
    section = DOCUMENT.split("## What a host can make a joiner do")[1].split("\n## ")[0]
    claims = [part for part in section.split("\n- **")[1:] if not part.startswith("Not bounded")]
    assert len(claims) > 7 and all("`test_" in claim for claim in claims), claims
