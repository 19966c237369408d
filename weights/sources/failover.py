"""Several sources of the same model: read one after the other, or at once (ADR 0089)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CheckpointInvalid, InvalidModel, Unavailable
from weights.tiers.port import Tier, TierFile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourcePlace:
    """A place to read from.

    Attributes:
        is_reserve: Others are read first, as long as they make progress.
        is_peer: Another node.
    """

    tier: Tier
    is_reserve: bool = False
    is_peer: bool = False


class FailoverTier:
    """A model that several places have.

    `read` tries the places in order, without those that failed. A place may have some of the files
    only.

    Args:
        listed: Lists the files.
        places: Where to read them. They are closed with the tier.
    """

    def __init__(self, listed: Tier, places: Sequence[SourcePlace]) -> None:
        self._listed, self.places = listed, tuple(places)
        self.source, self.revision = listed.source, listed.revision
        self._lock = threading.Lock()
        self._failed: set[int] = set()
        self._used: dict[str, set[str]] = {}

    @property
    def link(self) -> str:
        """Link of the place that `read` reads now."""
        return self.places[self._list_usable()[0]].tier.link

    @property
    def directory(self) -> Path | None:
        return None

    def files(self) -> Sequence[TierFile]:
        return self._listed.files()

    def list_links(self, file: TierFile) -> frozenset[str]:
        """Return the links over which bytes of a file were read."""
        with self._lock:
            return frozenset(self._used.get(file.name, ()))

    def read(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> None:
        usable = self._list_usable()
        # One that lists no such file is asked last, and its error says so.
        usable.sort(key=lambda place: all(f.name != file.name for f in self.places[place].tier.files()))
        for place in usable:
            try:
                self.read_place(place, file, offset, into, cancelled)
            except (Unavailable, CheckpointInvalid, InvalidModel):
                if place == usable[-1]:
                    raise
            else:
                return

    def read_place(
        self, place: int, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None
    ) -> None:
        """Read from one of the places, and leave it out after an error."""
        tier = self.places[place].tier
        try:
            theirs = next((f for f in tier.files() if f.name == file.name), None)
            if theirs is None or theirs.size != file.size:
                raise CheckpointInvalid(f"{file.name} of {self.source} is another one at {tier.link}")
            with self._lock:
                self._used.setdefault(file.name, set()).add(tier.link)
            tier.read(theirs, offset, into, cancelled)
        except (Unavailable, CheckpointInvalid, InvalidModel) as e:
            self._leave_out(place, e)
            raise

    def _list_usable(self) -> list[int]:
        """Return the places that did not fail; the last one if all did."""
        with self._lock:
            return [i for i in range(len(self.places)) if i not in self._failed] or [len(self.places) - 1]

    def _leave_out(self, place: int, error: Exception) -> None:
        with self._lock:
            if place in self._failed:
                return
            self._failed.add(place)
            is_last = len(self._failed) == len(self.places)
        if not is_last:
            log.warning(
                "a source of the model failed; the load continues without it",
                extra={"source": self.source, "failed": self.places[place].tier.link, "error": str(error)},
            )

    def finish(self, cancelled: threading.Event | None = None) -> None:
        self._listed.finish(cancelled)

    def get_settled_event(self) -> threading.Event:
        return self._listed.get_settled_event()

    def close(self) -> None:
        for tier in {id(t): t for t in (self._listed, *(p.tier for p in self.places))}.values():
            tier.close()
