"""Copy of the bucket of model cards to the gateway's catalogue."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pydantic import ValidationError

from services.gateway.domain.catalog import Catalog
from shared.contracts import subjects
from shared.contracts.models import ModelCard
from shared.messaging.replies import faults_of

log = logging.getLogger(__name__)


class CatalogWatcher:
    """Apply changes of the bucket to a catalogue."""

    def __init__(self, catalog: Catalog, on_removed: Callable[[str], None]) -> None:
        """Call `on_removed` with the name of every model that is removed."""
        self._catalog = catalog
        self._on_removed = on_removed

    def replace(self, entries: dict[str, bytes]) -> None:
        cards = {card.name: card for key, value in entries.items() if (card := _parse_card(key, value)) is not None}
        for name in self._catalog.replace(cards):
            self._on_removed(name)
        self._catalog.complete = True

    def put(self, key: str, value: bytes) -> None:
        card = _parse_card(key, value)
        if card is not None:
            self._catalog.put(card)

    def remove(self, key: str) -> None:
        name = subjects.decode_token(key)
        if self._catalog.remove(name):
            self._on_removed(name)


def _parse_card(key: str, value: bytes) -> ModelCard | None:
    try:
        return ModelCard.model_validate_json(value)
    except ValidationError as e:
        log.warning("failed to parse a model card", extra={"key": key, "error": faults_of(e)})
        return None
