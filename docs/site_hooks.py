"""What mkdocs needs beyond the pages of this folder: pages of the repository outside it, and links to them.

Pages link to each other as they lie in the repository, so that they can be read there too. On the site, README.md is
the first page, and the files that pages link to lie in folders of the same names.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
START = "index.md"
"""What README.md is on the site. Pages of docs/ lie at its top, all other files in folders as in the repository."""
PAGES = ("CHANGELOG.md", "examples/README.md")
"""Other pages outside of docs/ that the navigation names."""
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
COMMENT = re.compile(r"<!-- .*? -->\n?")
"""Marks of the tables that benchmarks/tables.py fills in. Markdown would end a table's paragraph there."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of docs/, and the files that pages link to."""
    added: set[str] = set()
    wanted = {"README.md", *PAGES}
    wanted |= {link for page in files.documentation_pages() for link in _outside(f"docs/{page.src_uri}")}
    while wanted:
        source = wanted.pop()
        added.add(source)
        files.append(File.generated(config, _on_site(source), abs_src_path=str(ROOT / source)))
        if source.endswith(".md"):
            wanted |= _outside(source) - added
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to where files lie on the site."""
    here = posixpath.dirname(page.file.src_uri) or "."
    source = str(Path(page.file.abs_src_path).relative_to(ROOT))

    def moved(link: re.Match[str]) -> str:
        target = _in_repository(source, link[2])
        return link[0] if target is None else link[1] + posixpath.relpath(_on_site(target), here) + link[3]

    return LINK.sub(moved, COMMENT.sub("", markdown))


def _on_site(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return START if path == "README.md" else path.removeprefix("docs/")


def _in_repository(page: str, link: str) -> str | None:
    """The file of the repository that a link of a page leads to; None if it leads to none."""
    if "://" in link:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    target = f"{target}/README.md" if (ROOT / target).is_dir() else target
    return target if (ROOT / target).is_file() else None


def _outside(page: str) -> set[str]:
    """The files outside of docs/ that a page links to."""
    links = LINK.finditer((ROOT / page).read_text(encoding="utf-8"))
    targets = {_in_repository(page, link[2]) for link in links}
    return {target for target in targets if target is not None and not target.startswith("docs/")}
