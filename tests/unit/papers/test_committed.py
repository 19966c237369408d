"""docs/papers.md and the committed JSON say the same, and every experiment has its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.papers.__main__ import EXPERIMENTS
from bench.papers.core import claims_of, summary

DOCS = Path(__file__).parents[3] / "docs"
FILES = sorted((DOCS / "papers.d").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_stored_verdicts_follow_from_the_stored_figures(path: Path) -> None:
    document = json.loads(path.read_text())
    assert [c["agrees"] for c in document["claims"]] == [c.verdict for c in claims_of(document)]


def test_every_experiment_is_committed() -> None:
    stored = {json.loads(path.read_text())["experiment"] for path in FILES}
    assert stored == {name.replace("_", "-") for name in EXPERIMENTS}


def test_papers_page_contains_the_table_of_the_committed_figures() -> None:
    assert summary(DOCS / "papers.d") in (DOCS / "papers.md").read_text()
