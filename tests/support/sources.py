"""Sources of the loader without a loader."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shared.contracts.model_info import ModelInfo
from weights.cache.store import SsdCache
from weights.sources.peers import Peers
from weights.sources.sources import Sources


def sources_at(home: Path, *, budget: int = 1 << 30, peers: Peers | None = None) -> Sources:
    """Return sources with a cache in `home`."""
    return Sources(SsdCache(home / "cache", budget), [home / "cache" / "small"], peers)


def inspected(source: Path | str, *, trust: bool = False) -> ModelInfo:
    """Return a loader's inspection of `source`, without caching it."""
    with tempfile.TemporaryDirectory() as home:
        return sources_at(Path(home), budget=0).inspect(str(source), trust_remote_code=trust)
