"""The state of one response in its grammar, and the mask of the next tokens that it allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.engine.grammar.compiler import Grammar
from services.engine.grammar.library import Matcher
from shared.errors import EngineFailed


class TokenMatcher:
    """Follows the tokens of one sequence.

    Its state depends only on the grammar and the tokens. So a sequence that is preempted, migrated
    or continued after a failure gets the same masks: its tokens are replayed.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self.consumed = 0
        """Generated tokens that it has followed."""

    def allowed_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """Follow `tokens`, the generated tokens from `consumed` on, and return the next tokens.

        Returns:
            A boolean for each token of the vocabulary; true: allowed. At least one is.

        Raises:
            EngineFailed: The grammar does not allow `tokens`, or a step takes more than its limits.
        """
        if self._matcher is None:
            self._matcher = self._grammar.new_matcher()
        self.consumed += len(tokens)
        for token in tokens:
            # With `ignore_eos`, end tokens follow a complete response.
            if not self._matcher.is_stopped and not self._matcher.consume_token(token):
                raise _grammar_error(self._matcher.error)
        bits = self._matcher.compute_mask()
        if bits is None or self._matcher.error:  # also stopped
            raise _grammar_error(self._matcher.error)
        return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_))


def _grammar_error(reason: str) -> EngineFailed:
    first = reason.split("\n<state>", 1)[0].strip()[:300].rstrip(".")
    return EngineFailed(f"The grammar of the response cannot continue: {first}. Simplify it", should_retry=False)
