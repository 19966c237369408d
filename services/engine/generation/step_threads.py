"""Torch's threads in steps of one token on the CPU.

The logits do not depend on the number of threads: each value of a product with one row is computed
by one thread, in the same order. With seven rows it is not so, and such steps use all threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.engine.domain.thread_choice import ThreadChoice


class StepThreads:
    """Sets the number of threads for the steps of one model. Runs on the computing thread."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self._choice: ThreadChoice | None = None

    @contextmanager
    def for_step(self, tokens: int) -> Iterator[None]:
        """Compute a step of some new tokens within this context."""
        threads = torch.get_num_threads() if self._is_cpu and tokens == 1 else 1
        if threads == 1:
            yield
            return
        if self._choice is None or self._choice.threads != threads:
            self._choice = ThreadChoice(threads)
        used, began = self._choice.pick(), time.perf_counter()
        torch.set_num_threads(used)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
        self._choice.record(used, time.perf_counter() - began)
