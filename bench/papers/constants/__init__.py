"""What each paper states about its machines, models and objectives, with where it says so; and what it leaves open, with where we took it from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """`source`: the section, table or page.

    Not `stated`: the paper omits it, and it is shown with ±50 %.
    """

    value: float
    unit: str
    source: str
    stated: bool = True
