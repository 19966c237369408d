"""A copy-on-write mapping: reads see both layers, writes stay in the upper one."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any, Final, TypeVar

V = TypeVar("V")
_GONE: Final[Any] = object()
"""Marks keys that are deleted in the upper layer."""


class Overlay(MutableMapping[str, V]):
    """Costs nothing to create, whatever the size of `below`, which must not change meanwhile.

    Values are never None. Order: as below, then new keys.
    """

    __slots__ = ("_above", "_below")

    def __init__(self, below: Mapping[str, V]) -> None:
        self._below = below
        self._above: dict[str, V] = {}

    @property
    def written(self) -> tuple[str, ...]:
        """Return the keys set or deleted here."""
        return tuple(self._above)

    @property
    def below(self) -> Mapping[str, V]:
        return self._below

    def __getitem__(self, key: str) -> V:
        value = self._above.get(key)
        if value is None:
            return self._below[key]
        if value is _GONE:
            raise KeyError(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = self._above.get(key)
        if value is None:
            return self._below.get(key, default)
        return default if value is _GONE else value

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None  # type: ignore[arg-type]  # any object may be asked for

    def __setitem__(self, key: str, value: V) -> None:
        self._above[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._above[key] = _GONE

    def write_to(self, into: MutableMapping[str, V]) -> None:
        """Apply the writes of this overlay to `into`."""
        for key, value in self._above.items():
            if value is _GONE:
                into.pop(key, None)
            else:
                into[key] = value

    def _merge(self) -> Mapping[str, V]:
        if not self._above:
            return self._below
        merged = {**self._below, **self._above}
        for key, value in self._above.items():
            if value is _GONE:
                del merged[key]
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._merge())

    def values(self) -> ValuesView[V]:
        return self._merge().values()

    def items(self) -> ItemsView[str, V]:
        return self._merge().items()

    def __len__(self) -> int:
        gone = sum(1 for key, value in self._above.items() if value is _GONE and key in self._below)
        new = sum(1 for key, value in self._above.items() if value is not _GONE and key not in self._below)
        return len(self._below) + new - gone
