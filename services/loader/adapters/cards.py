"""Minimal model cards for requests that name only a source."""

from __future__ import annotations

from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from weights.formats.segment import lay_out
from weights.sources.open import open_source
from weights.sources.sources import Sources


def minimal_card(sources: Sources, source: str) -> ModelCard:
    """Make a card from the headers of `source`. Blocks.

    The architecture is not checked. A remote source stays open for the load that follows
    (`Sources.listed`); the caller drops it in the end.

    Raises:
        InvalidModel: The source is no checkpoint; also its subclasses.
        Unavailable: The source cannot be reached.
    """
    tier = open_source(source)
    try:
        _, checkpoint = sources.checkpoint(tier, trust_remote_code=False)
        card = card_for(tier.source, tier.revision, lay_out(checkpoint, "").total_bytes)
    except BaseException:
        tier.close()
        raise
    if tier.directory is None:
        sources.listed.offer(tier.revision, tier)
    else:
        tier.close()
    return card


def card_for(source: str, revision: str, total_bytes: int) -> ModelCard:
    info = ModelInfo(
        source=source,
        revision=revision,
        architecture="",
        model_type="",
        task="generate",
        weights_bytes=total_bytes,
        parameters=0,
        dtype="",
        context_length=1,
        kv_bytes_per_token=0,
    )
    return ModelCard(spec=ModelSpec(name=f"weights-{revision}"[:200], source=source), info=info, created=0)
