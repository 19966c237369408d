"""One simulated request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        at: Seconds from the start of the workload.
    """

    at: float
    model: str
    prompt_tokens: int
    output_tokens: int
