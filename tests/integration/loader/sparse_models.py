"""Models whose weights are sparse files, for loads that end before they are complete."""

from __future__ import annotations

from pathlib import Path

from shared.contracts.models import ModelCard
from tests.integration.loader.conftest import Client
from tests.unit.loader.checkpoints import write_checkpoint

GIB = 1 << 30


async def client_card_of_sparse(client: Client, directory: Path) -> ModelCard:
    """Build a card with weights of a served dtype: inspecting refuses these bytes."""
    write_checkpoint(directory.parent / "small")
    card = await client.card(directory.parent / "small")
    from weights.formats.checkpoint import open_checkpoint
    from weights.formats.segment import lay_out

    total = lay_out(open_checkpoint(directory), "x").total_bytes
    info = card.info.model_copy(update={"source": str(directory), "weights_bytes": total, "revision": "sparse"})
    return card.model_copy(update={"info": info})
