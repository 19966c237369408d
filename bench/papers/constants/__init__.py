"""Define the papers' constants: machines, models and objectives.

Each has its place in the paper. For values that a paper omits, the source is given.
"""

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
