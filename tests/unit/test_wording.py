"""Error messages have one form, which docs/check_words.py checks in the whole product."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ERRORS = frozenset({"NotFound"})


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "docs/check_words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_words"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["compose", "services", "shared", "simulator", "thaw", "weights"])
def test_error_messages_of_the_product_have_the_required_form(words: ModuleType, folder: str) -> None:
    errors = words.error_classes((ROOT / "shared/errors.py").read_text())
    assert "ModelNotFound" in errors
    faults = [
        fault
        for path in sorted((ROOT / folder).rglob("*.py"))
        for fault in words.message_faults(str(path.relative_to(ROOT)), path.read_text(), errors)
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ('NotFound("no node n1")', "capital letter"),
        ('NotFound(f"node {n} is gone")', "capital letter"),
        ('errors.NotFound(f"{n} is gone. Start another.")', "without a period"),
        ('NotFound("No node" if n else "no device n1")', "capital letter"),
        ('NotFound("No node n1. Please start one")', "please"),
        ('CommandError("No mesh is running.", "start one.")', "capital letter"),
        ('CommandError("No mesh is running")', "with a period"),
    ],
)
def test_messages_of_another_form_are_found(words: ModuleType, call: str, fault: str) -> None:
    (found,) = words.message_faults("a.py", call, ERRORS)
    assert found.startswith("a.py:1: ")
    assert fault in found


@pytest.mark.parametrize(
    "call",
    [
        'NotFound("No node n1; see `thaw node list`")',
        'NotFound(f"{n} is gone. Start another")',
        'NotFound("config.json cannot be read")',
        "NotFound(\"'limit' must be a number\")",
        'NotFound("transformers cannot read it")',
        'NotFound("Missing required parameter: model.")',
        'CommandError("No mesh is running.", f"Run {n}")',
        'ValueError("must be over 0")',
        "NotFound()",
    ],
)
def test_messages_of_the_form_pass(words: ModuleType, call: str) -> None:
    assert words.message_faults("a.py", call, ERRORS) == []
