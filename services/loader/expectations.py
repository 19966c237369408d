"""Demand that the scheduler expects: it prices units, and shows which checkpoints to know of."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path

from shared.contracts.loader import ExpectedModel, ExpectModels
from shared.errors import ThawError
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import lay_out
from weights.sources.open import is_remote
from weights.sources.sources import Sources
from weights.store.residency import KnownUnits
from weights.store.units import Unit, cut_units
from weights.tiers.directory import DirectoryTier

log = logging.getLogger(__name__)


class Expectations:
    """The latest `ExpectModels`.

    Args:
        price_by: Sets the likelihoods of loads, by weights id, for the node's devices; None: all
            weights are equally likely.
        known: The units of weights, to which the hashes of indexes are added.
        threads: Reads indexes.
    """

    def __init__(
        self,
        price_by: Callable[[Mapping[str, float] | None], None],
        known: KnownUnits,
        sources: Sources,
        threads: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._price_by, self._known, self._sources, self._threads, self._clock = price_by, known, sources, threads, clock
        self._until: float | None = None
        self._read: set[str] = set()
        self._reading: Future[None] | None = None
        self._lock = threading.Lock()

    def apply(self, command: ExpectModels) -> None:
        """Price reloads by the command, and read the indexes of models that are new in it."""
        likelihoods: dict[str, float] = {}
        for m in command.models:
            likelihoods[m.weights_id] = max(likelihoods.get(m.weights_id, 0.0), m.likelihood * m.latency_sensitivity)
        self._until = self._clock() + command.valid_s
        self._price_by(likelihoods)
        with self._lock:
            self._read &= likelihoods.keys()
            new = [m for m in command.models if m.weights_id not in self._read]
        if new and (self._reading is None or self._reading.done()):
            self._reading = self._threads.submit(self._read_indexes, new)

    def expire(self) -> None:
        """Treat all models as equally likely if the latest command is too old."""
        if self._until is not None and self._clock() >= self._until:
            self._until = None
            self._price_by(None)

    def _read_indexes(self, models: list[ExpectedModel]) -> None:
        for m in models:
            try:
                if m.weights_id not in self._known and (units := self._units(m)):
                    self._known.suppose(m.weights_id, units)
            except (ThawError, OSError, ValueError) as e:
                log.info("failed to read the hashes of a model", extra={"weights": m.weights_id, "error": str(e)})
            with self._lock:
                self._read.add(m.weights_id)

    def _units(self, model: ExpectedModel) -> tuple[Unit, ...]:
        """Return the units of a model by the hashes in its index; none if it is not here."""
        if not is_remote(model.source):
            return indexed_units(DirectoryTier.open_source(model.source).directory, model.weights_id)
        with self._sources.open_complete(model.weights_id) as found:
            return indexed_units(found[0], model.weights_id) if found is not None else ()


def indexed_units(directory: Path, weights_id: str) -> tuple[Unit, ...]:
    """Return the units of a checkpoint; none if its index has no hashes.

    A directory that has changed may have other hashes than its index says: a load computes them.

    Raises:
        ThawError: The checkpoint cannot be read.
    """
    layout = lay_out(open_checkpoint(directory), weights_id)
    digests = {t.name: t.sha256 for p in layout.places for t in p.file.header.tensors if t.sha256}
    return cut_units(layout.tensors, digests, weights_id) if digests else ()
