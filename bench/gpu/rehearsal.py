"""Make steps of `python -m bench.gpu` that run without a GPU, with tiny models on cpu devices.

The same modules run with the same arguments, except for sizes and the device. Nothing of it says
anything about a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bench.gpu.plan import Step

SEPARATE = "cpu:1"
"""A device with memory of its own."""
UNIFIED = "cpu:0"
"""Only instances of such a cpu device can be suspended."""
_MORE: Mapping[str, tuple[str, ...]] = {
    "tests": ("--tests", "tests/unit/loader/devices/test_grouping.py"),
    "models": ("--tiny",),
    "first_token": ("--rounds", "1"),
    "suspended": ("--rounds", "2", "--device", UNIFIED),
    "reuse": ("--rounds", "2"),
    "ten": ("--requests", "15", "--rate", "3"),
}
REHEARSED = tuple(_MORE)
"""Names of steps that need no GPU."""


def rehearse(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps as they run on a cpu device, without goals.

    Raises:
        KeyError: A step needs a GPU.
    """
    if needs := [step.name for step in steps if step.name not in _MORE]:
        raise KeyError(f"{', '.join(needs)} cannot be rehearsed; the steps that can are {', '.join(REHEARSED)}")
    return tuple(replace(s, arguments=(*s.arguments, *_MORE[s.name]), goals=(), headline=()) for s in steps)
