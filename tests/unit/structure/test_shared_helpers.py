"""Helpers of several test modules are in modules of their own, not in one of the test modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

RUN_AGAIN = {
    "tests/docker/test_testcontainers.py",  # on servers in containers
    "tests/gpu/test_kv_pages.py",  # on a real GPU
    "tests/gpu/test_unit_suites.py",
}
"""Modules that run the tests of others again. They import those modules, and no name from them."""


def is_test_module(name: str) -> bool:
    return name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")


def imports_of_test_modules(source: str) -> Iterator[str]:
    """Yield the imports of test modules, and of names from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if is_test_module(a.name))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            of_module = is_test_module(node.module)
            yield from (f"{node.module}.{a.name}" for a in node.names if of_module or is_test_module(f"{node.module}.{a.name}"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from tests.unit.cli.test_ps import VIEW", ["tests.unit.cli.test_ps.VIEW"]),
        ("from tests.unit.cli import test_ps, views", ["tests.unit.cli.test_ps"]),
        ("def f():\n    import tests.unit.cli.test_ps", ["tests.unit.cli.test_ps"]),
        ("from tests.unit.cli.views import VIEW\nfrom tests.support.examples import examples", []),
    ],
)
def test_imports_of_test_modules_are_found(source: str, found: list[str]) -> None:
    assert list(imports_of_test_modules(source)) == found


def test_no_module_imports_helpers_from_a_test_module() -> None:
    files = [path for folder in ("bench", "tests") for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): list(imports_of_test_modules(path.read_text())) for path in files}
    allowed = {path: [name for name in names if path in RUN_AGAIN and is_test_module(name)] for path, names in found.items()}
    faults = {path: names for path, names in found.items() if names != allowed[path]}
    assert not faults, "move the helpers to tests/support, or to a module beside the tests that use them"
    assert {path for path, names in found.items() if names} == RUN_AGAIN
