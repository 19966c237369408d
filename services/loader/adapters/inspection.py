"""Inspection of registered models, for every engine kind."""

from __future__ import annotations

from shared.contracts.models import ModelInfo, ModelSpec
from weights.formats.foreign import describe_foreign
from weights.formats.known_architectures import check_known
from weights.sources.sources import Sources


def describe_model(spec: ModelSpec, sources: Sources) -> ModelInfo:
    """Describe the model of `spec` from its headers. Blocks.

    An engine that loads files by itself may use formats that have no segment.

    Raises:
        InvalidModel: The model cannot be served; also its subclasses.
        Unavailable: The source cannot be reached.
    """
    info = describe_foreign(spec) if spec.loads_itself else None
    info = info or sources.inspect(spec.source, trust_remote_code=spec.trust_remote_code)
    check_known(spec, info)
    return info
