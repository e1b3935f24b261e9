"""For mkdocs: what the site shows beside docs/, so that the same Markdown reads well in the repository and on the site.

The README becomes the front page. A page, a picture or a program outside of docs/ that a page links to is brought into
the site under its own path. Folders have no page there, so a link to one becomes its name.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [(ROOT / "docs" / file.src_uri, f"docs/{file.src_uri}") for file in files.documentation_pages()]
    for place, source in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
        pages.append((ROOT / source, source))
    for path, source in pages:
        for _, _, target, _ in LINK.findall(path.read_text(encoding="utf-8")):
            found = _in_repository(source, target)
            if (ROOT / found).is_file() and not found.startswith("docs/") and found not in PAGES.values():
                place = _on_site(found)
                if place not in files.src_uris:
                    files.append(File.generated(config, place, abs_src_path=str(ROOT / found)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = page.file.src_uri
    source = PAGES.get(place, f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        mark, words, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        found = _in_repository(source, target)
        if (ROOT / found).is_dir():
            return words
        link = posixpath.relpath(_on_site(found), posixpath.dirname(place) or ".")
        return f"{mark}[{words}]({link}{anchor or ''})"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Wide tables fit if the names above their columns may break between words."""

    def breaking(match: re.Match[str]) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z(])", "<wbr>", match[0])

    return re.sub(r"<th>[^<]*</th>", breaking, html)


def _in_repository(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _on_site(path: str) -> str:
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
