"""Write named samples to a file at once.

A long benchmark can be made in pieces, and a broken one loses nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench import report


class Samples:
    """`path`: where they are kept, with those of earlier runs; None: in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._found: dict[str, list[float]] = {}
        if path is not None and path.exists():
            self._found = json.loads(path.read_text())

    def add(self, name: str, *values: float) -> None:
        self._found.setdefault(name, []).extend(values)
        if self._path is not None:
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._found))
            new.replace(self._path)

    def names(self) -> list[str]:
        return list(self._found)

    def get_values(self, name: str) -> list[float]:
        """None, if there are none."""
        return self._found.get(name, [])

    def median(self, name: str, default: float | None = None) -> float:
        """Raises `KeyError` without samples and `default`."""
        if values := self.get_values(name):
            return report.median(values)
        if default is None:
            raise KeyError(name)
        return default
