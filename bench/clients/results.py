"""Outcomes of probes as a table: one line for each library, one column for each case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from bench.clients.probes.probe import Case

CASES: tuple[str, ...] = get_args(Case)
NOTHING = "-"


def cell(results: Sequence[dict[str, Any]]) -> str:
    """Return how many of a case's probes passed, of those that the library offers.

    Returns:
        `2` if both passed, `1 of 2` if one failed, `-` if the library offers none.
    """
    offered = [r for r in results if r["outcome"] != "not offered"]
    passed = sum(r["outcome"] == "passed" for r in offered)
    if not offered:
        return NOTHING
    return str(passed) if passed == len(offered) else f"{passed} of {len(offered)}"


def table(libraries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the head and the lines of the table."""
    lines = [["library", "version", "openai", *CASES]]
    for found in libraries:
        by_case = [cell([r for r in found["results"] if r["case"] == case]) for case in CASES]
        lines.append([found["library"], found["version"], found["openai"] or NOTHING, *by_case])
    return lines


def remarks(libraries: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return the library, the API, the outcome and the reason of each probe that did not pass."""
    return [
        (found["library"], result["way"], result["outcome"], result["reason"])
        for found in libraries
        for result in found["results"]
        if result["outcome"] != "passed"
    ]


def merge(before: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results of earlier runs with those of this run in their place.

    Args:
        before: Results in the file.
        new: Results of this run.
        order: Names of the libraries, in the table's order; others are dropped.
    """
    latest = {found["library"]: found for found in (*before, *new)}
    return [latest[name] for name in order if name in latest]
