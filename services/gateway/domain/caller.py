"""The sender of a request: the scope of its API key, and the models that it may use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shared.contracts.keys import ApiKey, Scope
from shared.contracts.models import ModelCard
from shared.errors import PermissionDenied

_INCLUDES: dict[Scope, frozenset[Scope]] = {
    "inference": frozenset({"inference"}),
    "read-only": frozenset({"read-only"}),
    "admin": frozenset({"admin", "read-only"}),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        name: Name of its key; for a key of the settings a name made from its hash; empty without a
            key.
        digest: Hash of its key; empty without a key.
        key: Its key with the limits; None for keys of the settings, and without a key.
    """

    name: str
    scope: Scope
    digest: str = ""
    key: ApiKey | None = None

    @property
    def is_admin(self) -> bool:
        """True if the caller may change the mesh, and see its secrets."""
        return "admin" in _INCLUDES[self.scope]

    def require(self, scope: Scope) -> None:
        """Raise `PermissionDenied` unless the caller's scope includes `scope`."""
        if scope not in _INCLUDES[self.scope]:
            raise PermissionDenied(f"The API key {self.name} has the scope {self.scope}, and this route needs {scope}")

    def priority(self, asked: int | None) -> int:
        """Return the priority of a request: what it asks for, at most that of its key."""
        highest = (self.key.priority if self.key is not None else None) or 0
        return min(asked or 0, highest)

    @property
    def weight(self) -> float:
        """Share of a model relative to other keys."""
        return (self.key.weight if self.key is not None else None) or 1.0

    def may_use(self, card: ModelCard) -> bool:
        """True if the key's patterns match the model's name, an alias, or `base:adapter`."""
        if self.key is None or not self.key.models or "*" in self.key.models:
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.key.models for name in _names_of(card))


def _names_of(card: ModelCard) -> Iterable[str]:
    yield card.name
    yield from card.spec.aliases
    if card.spec.base is not None:
        yield f"{card.spec.base}:{card.name}"


ANONYMOUS = Caller("", "inference")
"""A client without a key, where none is needed."""
ADMIN = Caller("", "admin")
"""A client of an admin API that needs no key."""
