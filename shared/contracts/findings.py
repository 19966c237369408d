"""The findings of `thaw doctor`, which `GET /admin/v1/doctor` and the console show too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from shared.contracts.base import Frozen


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: The part that was checked.
        level: ok: no problem; warn: works, with a restriction; fail: does not work.
        text: The observation.
        remedy: The next action; empty if none is needed.
        meaning: The consequence for requests; empty if the text has it or there is none.
    """

    subject: str
    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""
    meaning: str = ""


class Diagnosis(Frozen):
    """The findings about a mesh; `ok` if none of them is a failure."""

    ok: bool
    findings: tuple[Finding, ...] = ()

    @classmethod
    def from_findings(cls, findings: Iterable[Finding]) -> Self:
        found = tuple(findings)
        return cls(ok=all(f.level != "fail" for f in found), findings=found)
