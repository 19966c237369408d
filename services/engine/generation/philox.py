"""Random numbers that depend on nothing but the request: the same tokens whatever else runs in the batch, and after a resume."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WORD = 2**64 - 1


@dataclass(frozen=True)
class Draw:
    """The draw of the token at `position` (0: the first generated) of `choice`, for any 64-bit `seed`."""

    seed: int
    choice: int
    position: int

    def uniform(self, size: int) -> npt.NDArray[np.float64]:
        """Independent numbers in [0, 1), one for each token id below `size`: what is drawn for an id does not depend on `size`.

        From Philox, a generator with a counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
        """
        key = np.array([self.seed & _WORD, self.choice], dtype=np.uint64)
        words = np.random.Philox(counter=np.array([0, self.position, 0, 0], dtype=np.uint64), key=key)
        return np.random.Generator(words).random(size)
