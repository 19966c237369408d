"""`thaw explain --what-if`, as it is written."""

from __future__ import annotations

import pytest

from shared.contracts.admin import AssumeBudget, AssumeNode, AssumeNoNode, Assumption
from thaw.cli.explain import assumption
from thaw.errors import CommandError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("add-node=big", AssumeNode(node="big")),
        ("add-node=big:8", AssumeNode(node="big", devices=8)),
        ("add-node=big:8:80GiB", AssumeNode(node="big", devices=8, nbytes=80 * 2**30)),
        ("budget=n1/cuda:0:40GiB", AssumeBudget(node="n1", device="cuda:0", nbytes=40 * 2**30)),
        ("drop-node=n1", AssumeNoNode(node="n1")),
    ],
)
def test_what_is_meant(text: str, meant: Assumption) -> None:
    assert assumption(text) == meant


@pytest.mark.parametrize(
    "text",
    ["add-node=", "add-node=n:x", "add-node=n:1:2:3", "add-node=n:1:lots", "budget=n1", "budget=n1/cuda", "more", "drop-node"],
)
def test_what_is_not_understood_is_said(text: str) -> None:
    with pytest.raises(CommandError, match="not understood"):
        assumption(text)
