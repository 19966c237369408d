"""Several sources of the same model: if one fails, the next continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from shared.errors import CheckpointInvalid, InvalidModel, Unavailable
from weights.tiers.port import Tier, TierFile

log = logging.getLogger(__name__)


class FailoverTier:
    """`listed` says what there is; `places` are read in order.

    All are closed with it. `used`: the links that brought bytes.
    """

    def __init__(self, listed: Tier, places: Sequence[Tier]) -> None:
        self._listed, self._places = listed, list(places)
        self.source, self.revision = listed.source, listed.revision
        self._lock = threading.Lock()
        self._at = 0
        self.used: set[str] = set()

    @property
    def link(self) -> str:
        """Link of the place that is read now."""
        return self._places[self._at].link

    @property
    def directory(self) -> Path | None:
        return None

    def files(self) -> Sequence[TierFile]:
        return self._listed.files()

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        while True:
            at = self._at
            place = self._places[at]
            try:
                theirs = next((f for f in place.files() if f.name == file.name), None)
                if theirs is None or theirs.size != file.size:
                    raise CheckpointInvalid(f"{file.name} of {self.source} is another one at {place.link}")
                place.read(theirs, offset, into, cancelled)
                self.used.add(place.link)
                return
            except (Unavailable, CheckpointInvalid, InvalidModel) as e:
                if at + 1 >= len(self._places):
                    raise
                self._switch_source(at, e)

    def _switch_source(self, failed: int, error: Exception) -> None:
        with self._lock:
            if self._at == failed:
                self._at += 1
                log.warning(
                    "a source of the model failed; continuing at the next",
                    extra={"source": self.source, "failed": self._places[failed].link, "next": self.link, "error": str(error)},
                )

    def finish(self, cancelled: threading.Event | None = None) -> None:
        self._listed.finish(cancelled)

    def get_settled_event(self) -> threading.Event:
        return self._listed.get_settled_event()

    def close(self) -> None:
        for tier in {id(t): t for t in (self._listed, *self._places)}.values():
            tier.close()
