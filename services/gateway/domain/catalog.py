"""The registered models by name and alias, as the scheduler publishes them."""

from __future__ import annotations

from shared.contracts.models import ModelCard
from shared.errors import ModelNotFound


def unknown_model(name: str) -> ModelNotFound:
    """Build the error for a model that does not exist, or not for the caller's key."""
    return ModelNotFound(f"The model `{name}` does not exist; GET /v1/models lists those that do", param="model")


class Catalog:
    """Model cards by name; a name takes precedence over an alias.

    Attributes:
        complete: True once all cards have been read.
    """

    def __init__(self) -> None:
        self._cards: dict[str, ModelCard] = {}
        self._aliases: dict[str, str] = {}
        self.complete = False

    def put(self, card: ModelCard) -> None:
        self._cards[card.name] = card
        self._index()

    def remove(self, name: str) -> bool:
        """Remove a model. Returns whether it was registered."""
        there = self._cards.pop(name, None) is not None
        self._index()
        return there

    def replace(self, cards: dict[str, ModelCard]) -> set[str]:
        """Replace all cards. Returns the names that are no longer registered."""
        gone = self._cards.keys() - cards.keys()
        self._cards = dict(cards)
        self._index()
        return gone

    def _index(self) -> None:
        self._aliases = {alias: card.name for card in self._cards.values() for alias in card.spec.aliases}

    def resolve(self, name: str) -> ModelCard:
        """Return the model whose instances serve `name`.

        Args:
            name: A model, or a LoRA adapter as `adapter` or `base:adapter`, which its base serves.

        Raises:
            ModelNotFound: Neither is registered.
        """
        card = self.find_model(name)
        return card if card.spec.base is None else self._cards[card.spec.base]

    def lora_adapter(self, name: str) -> ModelCard | None:
        """Return the LoRA adapter called `name`; None if that is a model.

        Raises `ModelNotFound`.
        """
        card = self.find_model(name)
        return card if card.spec.base is not None else None

    def find_model(self, name: str) -> ModelCard:
        """Return the model or LoRA adapter called `name`.

        Raises:
            ModelNotFound: There is none, or the base of the adapter is missing.
        """
        prefix, colon, last = name.rpartition(":")
        card = self._lookup(last)
        if card is None or not self._matches(card, prefix if colon else None):
            raise unknown_model(name)
        return card

    def has(self, name: str) -> bool:
        """True if `name` is a model or LoRA adapter, or an alias."""
        return self._lookup(name.rpartition(":")[2]) is not None

    def _matches(self, card: ModelCard, prefix: str | None) -> bool:
        """True if `prefix` is empty, or names the base of the LoRA adapter `card`."""
        if card.spec.base is None:
            return prefix is None
        base = self._lookup(card.spec.base)
        return base is not None and (prefix is None or self._lookup(prefix) is base)

    def _lookup(self, name: str) -> ModelCard | None:
        return self._cards.get(name) or self._cards.get(self._aliases.get(name, ""))

    def cards(self) -> list[ModelCard]:
        return sorted(self._cards.values(), key=lambda c: c.name)

    def __len__(self) -> int:
        return len(self._cards)
