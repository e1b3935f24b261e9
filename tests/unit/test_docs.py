"""The pages hang together: links and anchors lead somewhere, in the repository and on the site that `make docs` builds.

`python -m tests.unit.test_docs` writes the index of the decisions anew.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
INDEX = DOCS / "decisions" / "README.md"
DECISIONS = sorted(INDEX.parent.glob("0*.md"))


def without_code(page: Path) -> str:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`]*`", lambda found: re.sub(r"[\[\]()#]", "", found[0]), text)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and mkdocs.yml asks for the same."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT) and file.exists(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(file), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_decision_that_is_cited_exists(page: Path) -> None:
    for number in re.findall(r"decisions/(\d{4})", page.read_text(encoding="utf-8")):
        assert any(decision.name.startswith(number) for decision in DECISIONS), f"{name(page)} cites {number}"


def test_the_site_shows_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\n\n")[0]
    shown = set(re.findall(r": (\S+\.md)$", nav, re.M)) - {"index.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    assert shown == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {
        f"decisions/{decision.name}" for decision in DECISIONS
    }


def index() -> str:
    """The decisions by room, each with its status; and before them what a person has written."""
    rooms: dict[str, list[str]] = {}
    for page in DECISIONS:
        text = page.read_text(encoding="utf-8")
        found = re.match(r"# (\d+)\. (.+)\n\nRoom: (.+?)\. Status: (.+)\.\n", text)
        assert found, f"{name(page)} begins with '# {int(page.name[:4])}. Title', then 'Room: R. Status: S.'"
        number, title, room, status = found.groups()
        rooms.setdefault(room, []).append(f"| {number} | [{title}]({page.name}) | {status} |")
    head = INDEX.read_text(encoding="utf-8").partition("\n## By room")[0].rstrip()
    tables = [
        f"### {room[0].upper()}{room[1:]}\n\n| | | |\n|---|---|---|\n" + "\n".join(rows) for room, rows in rooms.items()
    ]
    return "\n\n".join([head, "## By room", *tables]) + "\n"


def test_the_index_has_every_decision_and_no_other() -> None:
    assert INDEX.read_text(encoding="utf-8") == index()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs_material_extensions") is None, reason="`make docs` installs what builds the site")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "index.html").is_file()


if __name__ == "__main__":
    INDEX.write_text(index(), encoding="utf-8")
