"""A file that remembers which kinds of API keys have ever existed, should NATS's disk be lost with the keys."""

from __future__ import annotations

import logging
from pathlib import Path

from shared.contracts.keys import Scope
from shared.private import make_private, require_private, write_durably

log = logging.getLogger(__name__)
_SCOPES: tuple[Scope, ...] = ("inference", "admin")


class KeyMarker:
    """One scope a line, in a private directory. Where none can be written, the marker in the bucket of keys is the only one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "keys-existed"

    def read(self) -> frozenset[Scope]:
        """The scopes on file. A file that cannot be read counts as all of them. Blocks."""
        try:
            if not self._path.exists():
                return frozenset()
            require_private(self._directory)
            lines = self._path.read_text().split()
        except (OSError, ValueError) as e:
            log.warning("the marker of API keys cannot be read; keys are required", extra={"error": str(e)})
            return frozenset(_SCOPES)
        return frozenset(s for s in _SCOPES if s in lines)

    def write(self, scopes: frozenset[Scope]) -> None:
        """Add `scopes`, durably. Blocks; a failure is logged."""
        try:
            kept = self.read() | scopes
            make_private(self._directory)
            write_durably(self._path, "".join(f"{s}\n" for s in sorted(kept)).encode())
        except OSError as e:
            log.info("the marker of API keys lies on NATS only: the state directory cannot be written", extra={"error": str(e)})
