"""The registered models by name and alias: a copy of what the scheduler published."""

from __future__ import annotations

from shared.contracts.models import ModelCard
from shared.errors import ModelNotFound


class Catalog:
    """Kept by key (one per registered name); an alias never hides a name."""

    def __init__(self) -> None:
        self._cards: dict[str, ModelCard] = {}
        self._aliases: dict[str, str] = {}
        self.complete = False

    def put(self, card: ModelCard) -> None:
        self._cards[card.name] = card
        self._index()

    def remove(self, name: str) -> bool:
        """Whether it was there."""
        there = self._cards.pop(name, None) is not None
        self._index()
        return there

    def replace(self, cards: dict[str, ModelCard]) -> set[str]:
        """Take over a whole new list; the names that are gone."""
        gone = self._cards.keys() - cards.keys()
        self._cards = dict(cards)
        self._index()
        return gone

    def _index(self) -> None:
        self._aliases = {alias: card.name for card in self._cards.values() for alias in card.spec.aliases}

    def resolve(self, name: str) -> ModelCard:
        card = self._cards.get(name) or self._cards.get(self._aliases.get(name, ""))
        if card is None:
            raise ModelNotFound(f"The model `{name}` does not exist; GET /v1/models lists those that do", param="model")
        return card

    def cards(self) -> list[ModelCard]:
        return sorted(self._cards.values(), key=lambda c: c.name)

    def __len__(self) -> int:
        return len(self._cards)
