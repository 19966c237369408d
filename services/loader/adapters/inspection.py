"""What a registered model is, whoever loads it."""

from __future__ import annotations

from shared.contracts.models import ModelInfo, ModelSpec
from weights.formats.foreign import describe_foreign
from weights.formats.known_architectures import check_known
from weights.sources.sources import Sources


def described(spec: ModelSpec, sources: Sources) -> ModelInfo:
    """Blocks; no weights are read. Raises `InvalidModel` and its kin, or `Unavailable`. What an engine loads by itself may be in a layout
    that no segment is made of."""
    info = describe_foreign(spec) if spec.loads_itself else None
    info = info or sources.inspect(spec.source, trust_remote_code=spec.trust_remote_code)
    check_known(spec, info)
    return info
