"""Loads of a remote model through the SSD cache."""

from __future__ import annotations

from weights.tiers.port import Tier

SHARD = "model-00001-of-00002.safetensors"
STEP = 300_000


def load(tier: Tier, names: tuple[str, ...] = (SHARD, "model-00002-of-00002.safetensors")) -> dict[str, bytes]:
    """Load all pieces into memory that stays until `close`."""
    found = {}
    for file in tier.files():
        if file.name in names:
            data = bytearray(file.size)
            for at in range(0, file.size, STEP):
                tier.read(file, at, memoryview(data)[at : at + STEP])
            found[file.name] = bytes(data)
    return found


def settle(tier: Tier) -> None:
    tier.finish()
    assert tier.get_settled_event().wait(60)
    tier.close()
