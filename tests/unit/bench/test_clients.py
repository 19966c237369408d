"""The table of client libraries: counts, reasons, and the results of earlier runs."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from bench.clients.environments import LIBRARIES
from bench.clients.probes.probe import NotOffered, Probes
from bench.clients.results import CASES, cell, merge, remarks, table


def result(case: str, outcome: str = "passed", reason: str = "") -> dict[str, Any]:
    return {"case": case, "way": f"a way to {case}", "outcome": outcome, "reason": reason, "seconds": 0.1}


def library(name: str, *results: dict[str, Any], version: str = "1") -> dict[str, Any]:
    return {"library": name, "version": version, "openai": "", "results": list(results)}


def test_cell_counts_what_a_library_offers() -> None:
    passed, failed, missing = (result("chat", outcome) for outcome in ("passed", "failed", "not offered"))
    assert cell([passed, passed]) == "2"
    assert cell([passed, failed, missing]) == "1 of 2"
    assert cell([missing]) == "-"
    assert cell([]) == "-"


def test_table_has_a_line_for_each_library_and_a_column_for_each_case() -> None:
    head, line = table([library("one", result("chat"), result("usage", "failed"))])
    assert head == ["library", "version", "openai", *CASES]
    assert dict(zip(head, line, strict=True)) == {
        "library": "one",
        "version": "1",
        "openai": "-",
        **dict.fromkeys(CASES, "-"),
        "chat": "1",
        "usage": "0 of 1",
    }


def test_remarks_name_what_did_not_pass() -> None:
    found = library("one", result("chat"), result("embeddings", "not offered", "has none"))
    assert remarks([found]) == [("one", "a way to embeddings", "not offered", "has none")]


def test_results_of_other_libraries_are_kept_in_the_order_of_the_table() -> None:
    before = [library("gone"), library("one", version="1"), library("two", version="1")]
    merged = merge(before, [library("one", version="2")], ["two", "one", "three"])
    assert [(found["library"], found["version"]) for found in merged] == [("two", "1"), ("one", "2")]


def test_probes_report_outcomes_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    probes = Probes()

    @probes.add("chat", "blocking")
    def chat() -> None:
        sys.stdout.write("output of a library\n")

    @probes.add("stream", "async")
    async def stream() -> None:
        await asyncio.sleep(0)
        raise ValueError("no chunks")

    @probes.add("embeddings", "none")
    def embeddings() -> None:
        raise NotOffered("has none")

    probes.run()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["case"], row["way"], row["outcome"], row["reason"]) for row in rows] == [
        ("chat", "blocking", "passed", ""),
        ("stream", "async", "failed", "ValueError: no chunks"),
        ("embeddings", "none", "not offered", "has none"),
    ]


def test_every_package_is_pinned() -> None:
    assert all("==" in package for found in LIBRARIES for package in found.packages)
    assert all(found.packages[0].split("==")[0].split("[")[0] == found.name for found in LIBRARIES)
