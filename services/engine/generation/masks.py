"""Token masks of a step, computed on a thread of their own while the model computes.

A mask depends on the tokens before the step only. So it is ready when the logits are, unless the
model is faster than the grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from services.engine.generation.sequences import Sequence
from shared.errors import EngineFailed, ThawError


@dataclass(frozen=True)
class StepMasks:
    """Masks of one step that may not be ready yet, by sequence."""

    pending: Mapping[int, Future[torch.Tensor]]

    def collect(self) -> tuple[dict[int, torch.Tensor], dict[int, ThawError]]:
        """Wait for the masks. Return them, and the errors of the others, by the keys."""
        masks: dict[int, torch.Tensor] = {}
        errors: dict[int, ThawError] = {}
        for key, future in self.pending.items():
            try:
                masks[key] = future.result()
            except ThawError as e:
                errors[key] = e
            except Exception as e:  # a boundary to the library: only this request fails
                errors[key] = EngineFailed(f"The grammar of the response failed: {type(e).__name__}: {str(e)[:300]}")
        return masks, errors


NO_MASKS = StepMasks({})


class MaskThread:
    """Computes masks. The thread starts with the first one."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, sequences: Iterable[Sequence]) -> StepMasks:
        """Begin the masks of those `sequences` that have a grammar.

        Their previous masks must have been collected.
        """
        pending = {s.key: self._submit(s) for s in sequences if s.matcher is not None}
        return StepMasks(pending) if pending else NO_MASKS

    def _submit(self, sequence: Sequence) -> Future[torch.Tensor]:
        assert sequence.matcher is not None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        first = len(sequence.choice.prompt) + sequence.matcher.consumed
        return self._thread.submit(sequence.matcher.allowed_after, sequence.tokens[first:])

    def close(self) -> None:
        """End the thread, without waiting for it."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
