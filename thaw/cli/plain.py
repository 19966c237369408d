"""Read the gateway's JSON without pydantic, with attributes like the messages'.

`thaw ps` answers before pydantic is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Plain:
    """A JSON object whose fields are attributes.

    A missing field is None, as from an older gateway.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return to_plain(self._fields.get(name))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values, as a message does."""
        return ((name, to_plain(value)) for name, value in self._fields.items())


def to_plain(value: Any) -> Any:
    """Return `value` with objects as `Plain`."""
    if isinstance(value, dict):
        return Plain(value)
    return [to_plain(item) for item in value] if isinstance(value, list) else value
