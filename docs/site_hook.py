"""Hook of mkdocs.yml: the files of the site, and links that work in the repository and on the site.

The site has every page of docs/, the repository's own pages under `repository/`, and the files that
a page links to; nothing else. A link to a directory leads to its README, or to a list of its files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "repository/"
_PROJECT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the entry `adr/` of the navigation by the records of docs/adr."""
    records = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/adr").glob("[0-9]*.md"))
    config.nav = _expand(config.nav or [], "adr/", ["adr/README.md", *records])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Keep the pages of docs/ and the theme's files, and add everything that pages link to."""
    pages = [file for file in files if file.is_documentation_page()]
    site = Files([file for file in files if file.is_documentation_page() or file.src_dir != config.docs_dir])
    waiting = [_repository_path(page.src_uri) for page in pages] + list(_PROJECT)
    known = set(waiting)
    while waiting:
        path = waiting.pop()
        if site.get_file_from_path(_site_path(path)) is None:
            site.append(_file(path, config))
        linked = _find_linked(path)
        waiting += [new for new in dict.fromkeys(linked) if new not in known]
        known.update(linked)
    return site


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point every link to a file of the repository at the file's place on the site."""
    here = posixpath.dirname(page.file.src_uri)
    repository = posixpath.dirname(_repository_path(page.file.src_uri))

    def rewrite(link: re.Match[str]) -> str:
        target = _site_path(posixpath.normpath(posixpath.join(repository, link[1])))
        return f"]({posixpath.relpath(target, here or '.')}{link[2] or ''})"

    return _outside_code(markdown, lambda text: _LINK.sub(rewrite, text))


def _expand(nav: list[Any], entry: str, pages: list[str]) -> list[Any]:
    """Return the navigation with `pages` at the place of `entry`."""
    expanded: list[Any] = []
    for item in nav:
        if item == entry:
            expanded += pages
        elif isinstance(item, dict):
            expanded.append(
                {title: _expand(below, entry, pages) if isinstance(below, list) else below for title, below in item.items()}
            )
        else:
            expanded.append(item)
    return expanded


def _file(path: str, config: MkDocsConfig) -> File:
    """Return the site's file for a file or a directory of the repository."""
    if (ROOT / path).is_dir():
        listing = f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in _names(path))
        listed = File.generated(config, _site_path(path), content=listing)
        listed.inclusion = InclusionLevel.NOT_IN_NAV
        return listed
    file = File.generated(config, _site_path(path), abs_src_path=str(ROOT / path))
    file.inclusion = InclusionLevel.INCLUDED if path in _PROJECT else InclusionLevel.NOT_IN_NAV
    return file


def _names(directory: str) -> list[str]:
    return sorted(path.name for path in (ROOT / directory).iterdir() if path.is_file())


def _find_linked(path: str) -> list[str]:
    """Return the existing files and directories that a page links to; for a directory its files."""
    if (ROOT / path).is_dir():
        return [f"{path}/{name}" for name in _names(path)]
    if not path.endswith(".md"):
        return []
    found: list[str] = []

    def note(text: str) -> str:
        found.extend(posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1])) for link in _LINK.finditer(text))
        return text

    _outside_code((ROOT / path).read_text(encoding="utf-8"), note)
    return [target for target in found if not target.startswith("..") and (ROOT / target).exists()]


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Return the page with `change` applied outside its code blocks."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def _site_path(path: str) -> str:
    """Return where a file or directory of the repository is on the site."""
    if (ROOT / path).is_dir():
        path = f"{path}/README.md" if (ROOT / path / "README.md").exists() else f"{path}/index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def _repository_path(site_path: str) -> str:
    """Return the file or directory of the repository that the site has at this place."""
    path = site_path.removeprefix(OUTSIDE) if site_path.startswith(OUTSIDE) else f"docs/{site_path}"
    return path if (ROOT / path).exists() else path.removesuffix("/index.md") + "/index.md"
