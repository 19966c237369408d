"""Cards for weights that somebody wants who knows no more of them than where they are."""

from __future__ import annotations

from shared.contracts.models import ModelCard, ModelInfo, ModelSpec
from weights.formats.segment import lay_out
from weights.sources.open import open_source
from weights.sources.sources import Sources


def bare_card(sources: Sources, source: str) -> ModelCard:
    """What a load needs to know of `source`; whether an engine of ours could serve it is not asked. Blocks.

    What is remote stays open for that load (`Sources.listed`), which must be dropped in the end.

    Raises `InvalidModel` and its kin, or `Unavailable` if the source cannot be reached.
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
