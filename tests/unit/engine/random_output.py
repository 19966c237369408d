"""Random output that a grammar allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.engine.grammar.compiler import Grammar
from services.engine.grammar.matcher import TokenMatcher

EOS = (0, 2)


def generate(grammar: Grammar, seed: int, limit: int = 400, begin: Sequence[int] = ()) -> list[int]:
    """Choose among the allowed tokens at random behind `begin`, until one ends the response."""
    matcher, random = TokenMatcher(grammar), np.random.default_rng(seed)
    made: list[int] = list(begin)
    while len(made) < limit:
        allowed = matcher.allowed_after(made[matcher.consumed :]).nonzero().flatten().numpy()
        made.append(int(random.choice(allowed)))
        if made[-1] in EOS:
            break
    return made
