"""A file that records which kinds of API keys have existed.

It keeps the endpoint closed if NATS loses the keys.
"""

from __future__ import annotations

import logging
from pathlib import Path

from shared.contracts.keys import Scope
from shared.private import make_private, require_private, write_durably

log = logging.getLogger(__name__)
_SCOPES: tuple[Scope, ...] = ("inference", "admin")


class KeyMarker:
    """A private file with one scope per line.

    If it cannot be written, the marker in the bucket of keys is the only one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "keys-existed"

    def read(self) -> frozenset[Scope]:
        """Return the recorded scopes; all of them if the file cannot be read. Blocks."""
        try:
            if not self._path.exists():
                return frozenset()
            require_private(self._directory)
            lines = self._path.read_text().split()
        except (OSError, ValueError) as e:
            log.warning("failed to read the marker of API keys; keys are required", extra={"error": str(e)})
            return frozenset(_SCOPES)
        return frozenset(s for s in _SCOPES if s in lines)

    def write(self, scopes: frozenset[Scope]) -> None:
        """Add `scopes` durably. Blocks; logs a failure."""
        try:
            recorded = self.read() | scopes
            make_private(self._directory)
            write_durably(self._path, "".join(f"{s}\n" for s in sorted(recorded)).encode())
        except OSError as e:
            log.info("failed to write the marker of API keys; only NATS has it", extra={"error": str(e)})
