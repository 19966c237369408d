"""Counter-based random numbers that depend only on the request.

The same tokens result whatever else runs in the batch, and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WORD = 2**64 - 1


@dataclass(frozen=True)
class Draw:
    """The random numbers for one token.

    Args:
        seed: Any 64-bit number.
        choice: Index of the choice.
        position: Index of the token; 0 is the first generated one.
    """

    seed: int
    choice: int
    position: int

    def draw_uniform(self, size: int) -> npt.NDArray[np.float64]:
        """Independent numbers in [0, 1), one per token id below `size`.

        The number for an id does not depend on `size`. The generator is Philox (Salmon et al.,
        "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
        """
        key = np.array([self.seed & _WORD, self.choice], dtype=np.uint64)
        words = np.random.Philox(counter=np.array([0, self.position, 0, 0], dtype=np.uint64), key=key)
        return np.random.Generator(words).random(size)
