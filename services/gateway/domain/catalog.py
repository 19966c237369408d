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
        """The model whose instances answer for `name`: of an adapter (`adapter`, or `base:adapter`) its base. Raises `ModelNotFound`."""
        card = self.named(name)
        return card if card.spec.base is None else self._cards[card.spec.base]

    def adapter(self, name: str) -> ModelCard | None:
        """The adapter that `name` names; None if that is a model. Raises `ModelNotFound`."""
        card = self.named(name)
        return card if card.spec.base is not None else None

    def named(self, name: str) -> ModelCard:
        """What `name` names, model or adapter. Raises `ModelNotFound`; an adapter without its base is not there either."""
        prefix, colon, last = name.rpartition(":")
        card = self._known(last)
        if card is None or not (self._served(card, prefix if colon else None) if card.spec.base is not None else not colon):
            raise ModelNotFound(f"The model `{name}` does not exist; GET /v1/models lists those that do", param="model")
        return card

    def _served(self, adapter: ModelCard, prefix: str | None) -> bool:
        """Whether the adapter's base is there, and is what `prefix` names if there is one."""
        base = self._known(adapter.spec.base or "")
        return base is not None and (prefix is None or self._known(prefix) is base)

    def _known(self, name: str) -> ModelCard | None:
        return self._cards.get(name) or self._cards.get(self._aliases.get(name, ""))

    def cards(self) -> list[ModelCard]:
        return sorted(self._cards.values(), key=lambda c: c.name)

    def __len__(self) -> int:
        return len(self._cards)
