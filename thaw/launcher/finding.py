"""The result of a check of `thaw doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    subject: str
    level: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""
