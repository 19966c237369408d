"""From a model's `source` to its tier."""

from __future__ import annotations

from weights.tiers.directory import DirectoryTier
from weights.tiers.http import HttpTier, is_http
from weights.tiers.hub import is_hub, open_hub
from weights.tiers.object_store import ObjectStoreTier, is_object_store
from weights.tiers.port import Tier


def is_remote(source: str) -> bool:
    return is_hub(source) or is_http(source) or is_object_store(source)


def open_source(source: str) -> Tier:
    """The place that `source` names. May ask it (the hub: which commit).

    Raises `InvalidModel` if it names none, `CheckpointInvalid` if nothing is there, `Unavailable`
    if it cannot be reached.
    """
    if is_hub(source):
        return open_hub(source)
    if is_http(source):
        return HttpTier(source)
    if is_object_store(source):
        return ObjectStoreTier(source)
    return DirectoryTier.open_source(source)
