"""One simulated request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """`at`: seconds from the beginning."""

    at: float
    model: str
    prompt_tokens: int
    output_tokens: int
