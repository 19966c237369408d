"""The documentation builds as a site: every page is in the navigation, every link works, no other
file is in it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
_ASSETS = {"404.html", "assets", "search", "sitemap.xml", "sitemap.xml.gz"}
_needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="mkdocs-material is not installed: pip install -c constraints.txt -e .[docs]",
)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without its Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def _entries(nav: list[Any]) -> Iterator[str]:
    for item in nav:
        if isinstance(item, dict):
            for below in item.values():
                yield from _entries(below)
        else:
            yield item


def test_navigation_lists_every_page_once() -> None:
    """A new page of docs/ needs a line in mkdocs.yml; decisions are listed by site_hook.py."""
    listed = list(_entries(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert {page for page in listed if not page.startswith(("adr/", "repository/"))} == {
        p for p in pages if not p.startswith("adr/")
    }
    assert "adr/" in listed


def _copy(to: Path) -> Path:
    """Copy what the site is made of, without what git ignores."""
    for name in ("mkdocs.yml", "docs", "thaw.example.yaml"):
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, to / name, ignore=ignored) if source.is_dir() else shutil.copy(source, to / name)
    for page in ROOT.glob("*.md"):
        shutil.copy(page, to / page.name)
    return to


def _build(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # bytecode of the hook lies in docs/
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = _copy(tmp_path_factory.mktemp("site"))
    built = _build(root)
    assert built.returncode == 0, built.stdout + built.stderr
    return root / "build/docs"


@_needs_mkdocs
def test_strict_build_contains_every_page_and_only_linked_files(site: Path) -> None:
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    ours = {file for file in files if file.split("/")[0] not in _ASSETS}
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page.replace("README.html", "index.html") for page in pages} <= ours
    linked = set().union(*(_links(site / page) for page in ours if page.endswith(".html")))
    assert {site / file for file in ours} - linked == set()
    assert not [file for file in files if "__pycache__" in file or file.endswith((".py", ".pyc", ".toml"))]


@_needs_mkdocs
def test_every_link_of_the_site_points_to_a_file_of_the_site(site: Path) -> None:
    broken = {(page, link) for page in site.rglob("*.html") for link in _links(page) if not link.is_file()}
    assert not broken
    assert site / "repository/thaw.example.yaml" in _links(site / "getting-started.html")
    assert site / "security.html" in _links(site / "repository/SECURITY.html")
    assert site / "performance.d/index.html" in _links(site / "performance.html")
    assert site / "performance.d/soak.json" in _links(site / "performance.d/index.html")


@_needs_mkdocs
def test_broken_links_fail(tmp_path: Path) -> None:
    """A missing page, file or heading is a warning, and a strict build fails with any warning."""
    root = _copy(tmp_path)
    # All other pages have their headings alone: their links have a test of their own.
    for other in (page for page in root.rglob("*.md") if page.name != "gpu.md"):
        other.write_text("\n".join(line for line in other.read_text().splitlines() if line.startswith("#")))
    broken = ("missing.md", "../missing.yaml", "clients.md#no-such-heading")
    shown = ("missing.md", "repository/missing.yaml", "clients.md#no-such-heading")
    with (root / "docs/gpu.md").open("a") as page:
        page.writelines(f"\n[a]({link})\n" for link in broken)
    built = _build(root)
    assert built.returncode != 0
    warnings = [line for line in (built.stdout + built.stderr).splitlines() if "WARNING" in line and "gpu.md" in line]
    assert [link for link in shown if not any(f"'{link}'" in line for line in warnings)] == [], warnings


def _links(page: Path) -> set[Path]:
    """Return the files that the page refers to, except other sites' and the theme's (404 has
    absolute ones).
    """
    if page.name == "404.html":
        return set()
    targets = re.findall(r'(?:href|src)="([^"#?]+)[^"]*"', page.read_text())
    local = [unquote(target) for target in targets if not re.match(r"[a-z]+:|//|/", target)]
    return {Path(os.path.normpath(page.parent / target)) for target in local}
