"""Random numbers that depend on nothing but the request: the same tokens whatever else runs in the batch, and after a resume."""

from __future__ import annotations

import struct
from hashlib import blake2b


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` (0: the first generated) of `choice`, for any 64-bit `seed`."""
    block = struct.pack("<Qqq", seed & (2**64 - 1), choice, position)
    return (int.from_bytes(blake2b(block, digest_size=8).digest(), "little") >> 11) * 2.0**-53
