"""Trace and span ids from the system's random numbers.

OpenTelemetry's own generator draws from the global `random`, whose state a library that seeds it
(Hypothesis, torch's users) makes the same in every process, and which such a library does not
expect to change under its hands.
"""

from __future__ import annotations

import os

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SystemIds(IdGenerator):
    def generate_span_id(self) -> int:
        return _number(8)

    def generate_trace_id(self) -> int:
        return _number(16)

    def is_trace_id_random(self) -> bool:
        return True


def _number(size: int) -> int:
    """Return a random id of `size` bytes, never 0, which names no span."""
    while not (value := int.from_bytes(os.urandom(size), "big")):
        continue
    return value
