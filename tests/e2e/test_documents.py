"""The documents are accurate: examples, commands, links, and settings."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import typer.main
from typer.core import TyperGroup

from tests.support.launcher import Thaw
from thaw.cli.app import app
from thaw.config import ConfigError, load_config

SHARED = True
"""The mesh is that of all modules with this setting (conftest.py)."""
ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(p.relative_to(ROOT) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("compose/**/*.md")))
_DEFAULT = "http://127.0.0.1:8080"
_SETTING = re.compile(r"\bTHAW_[A-Z0-9_]*[A-Z0-9]\b")
_DEMO_MODEL = re.compile(r"\b(?:demo-\d+m|demo|qwen)\b")


def _blocks(language: str) -> list[tuple[Path, str]]:
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(document, block) for document in DOCUMENTS for block in fence.findall((ROOT / document).read_text())]


def _adapt(block: str, mesh: Thaw) -> str:
    """Return an example with the address and the model of the mesh under test."""
    return _DEMO_MODEL.sub("one", block.replace(_DEFAULT, mesh.url))


@pytest.mark.parametrize(("document", "block"), _blocks("python"), ids=str)
def test_python_examples_run(mesh: Thaw, document: Path, block: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        # As a user runs them: without this file's `from __future__`.
        names: dict[str, Any] = {"__name__": "__main__"}
        try:
            exec(compile(_adapt(block, mesh), str(document), "exec", dont_inherit=True), names)
        finally:  # a user's process would close the clients' connections at its end
            for value in names.values():
                close = getattr(value, "close", None)
                if inspect.ismethod(close) and not inspect.iscoroutinefunction(close):
                    close()
    assert output.getvalue().strip()


def _curls() -> Iterator[tuple[Path, str]]:
    for document in DOCUMENTS:
        for line in (ROOT / document).read_text().replace("\\\n", " ").splitlines():
            if line.startswith("curl ") and _DEFAULT in line:
                yield document, line


@pytest.mark.parametrize(("document", "line"), list(_curls()), ids=str)
def test_curl_examples_are_answered(mesh: Thaw, document: Path, line: str) -> None:
    words = shlex.split(_adapt(line, mesh))
    url = next(word for word in words if word.startswith("http"))
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    body = words[words.index("-d") + 1] if "-d" in words else None
    answer = httpx.request("POST" if body else "GET", url, content=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    assert body is None or json.loads(body).get("stream") or answer.json()["object"]


def _commands() -> list[tuple[str, ...]]:
    """Return every distinct `thaw …` of the documents as words.

    Alternatives (`list\\|show`, `add|list`) count as one command each.
    """
    found: set[tuple[str, ...]] = set()
    for document in DOCUMENTS:
        text = (ROOT / document).read_text().replace("\\|", "|")
        spans = re.findall(r"`(?:docker compose exec gateway |\.venv/bin/)?thaw ([^`\n]+)`", text)
        spans += re.findall(r"^(?:docker compose exec gateway |\.venv/bin/)?thaw ([^#\n]+)", text, re.MULTILINE)
        for span in spans:
            words = re.sub(r"[\[\]…]", " ", span).split()
            groups = [word.split("|") for word in words]
            variants: list[tuple[str, ...]] = [()]
            for group in groups:
                variants = [(*v, word) for v in variants for word in group]
            found |= set(variants)
    return sorted(found)


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_documented_commands_exist_with_their_options(words: tuple[str, ...]) -> None:
    command = typer.main.get_command(app)
    rest = list(words)
    while rest and (children := getattr(command, "commands", None)) is not None and not rest[0].startswith("-"):
        assert rest[0] in children, f"thaw {' '.join(words)}: there is no {rest[0]!r}"
        assert isinstance(command, TyperGroup)
        _, found, _ = command.resolve_command(typer.Context(command), [rest.pop(0)])  # imports it
        assert found is not None
        command = found
    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= options
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as output:
        app([*words[: len(words) - len(rest)], "--help"])
    assert ended.value.code == 0
    assert "Usage" in output.getvalue()


def _modules() -> list[tuple[str, tuple[str, ...]]]:
    """Return every `python -m MODULE …` of this repository in the documents, with its options."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    for document in DOCUMENTS:
        for module, rest in re.findall(
            r"python -m ((?:bench|services|shared|thaw|tests)\b[\w.]*)([^`\n]*)", (ROOT / document).read_text()
        ):
            found.add((module, tuple(sorted(set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest))))))
    return sorted(found)


@pytest.mark.parametrize(("module", "options"), _modules(), ids=str)
def test_documented_modules_exist_with_their_options(module: str, options: tuple[str, ...]) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin)
    known = "".join(p.read_text() for p in (place.parent.glob("*.py") if place.name == "__init__.py" else [place]))
    assert not [option for option in options if option != "--help" and f'"{option}"' not in known]  # argparse adds --help


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_have_targets(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f"{document}: {link}"
        if anchor:
            assert anchor in {_slug(heading) for heading in re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)}, link


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documented_settings_exist(document: Path) -> None:
    named = set(_SETTING.findall((ROOT / document).read_text()))
    assert named <= _known_settings(), "no process reads them"


@cache
def _known_settings() -> set[str]:
    """Return the settings of the generated reference, of compose/, of messages and of the tests."""
    sources = [
        ROOT / "docs" / "configuration.md",
        ROOT / "shared" / "contracts" / "subjects.py",
        ROOT / "shared" / "processes.py",
        *(ROOT / "compose").glob("*.yaml"),
    ]
    tests = {name for p in (ROOT / "tests").rglob("*.py") for name in re.findall(r"\bTHAW_TEST_[A-Z_]+\b", p.read_text())}
    return tests | {name for source in sources for name in _SETTING.findall(source.read_text())}


def test_every_page_is_listed() -> None:
    for folder in ("docs", "docs/adr"):
        listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / folder / "README.md").read_text()))
        assert listed == {p.name for p in (ROOT / folder).glob("*.md")} - {"README.md"}


@pytest.mark.parametrize(("document", "block"), _blocks("yaml"), ids=str)
def test_documented_thaw_files_are_valid(document: Path, block: str, tmp_path: Path) -> None:
    """Each thaw.yaml of the documents is valid, except for missing model files."""
    if not re.search(r"^(mesh|models|defaults|scheduler):", block, re.MULTILINE) or document.name == "simulator.md":
        pytest.skip("not a thaw.yaml")
    path = tmp_path / "thaw.yaml"
    path.write_text(block)
    assert not [line for line in _faults(path) if not re.search("there is no (directory|file)", line)]


def _faults(path: Path) -> list[str]:
    try:
        load_config(path)
    except ConfigError as e:
        return e.lines()
    return []


def _slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
