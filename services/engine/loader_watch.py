"""Watch the statuses of the node's loader for an engine."""

from __future__ import annotations

import asyncio

from services.engine.loader_client import LoaderClient
from shared.contracts.loader import LoaderProgress, WeightsAttached
from shared.contracts.phases import Phase
from shared.contracts.segment import CudaIpcHandle, GpuUnitsHandle
from shared.engines.status_reporter import StatusReporter
from shared.errors import EngineFailed, ThawError

BOUND = 0.1
"""Progress once the model is bound.

The remainder, up to the warm-up, is the share of loaded bytes.
"""


class LoaderWatch:
    """Follows the progress of a load, and notices the end of a loader that owns GPU memory."""

    def __init__(self, weights: LoaderClient, reporter: StatusReporter) -> None:
        self._weights, self._reporter = weights, reporter
        self._owner: str | None = None
        self._owner_gone = asyncio.Event()

    @property
    def exit_conditions(self) -> dict[asyncio.Event, ThawError]:
        """The event that ends the engine, with its error."""
        return {self._owner_gone: EngineFailed("The loader that owns the weights' GPU memory has ended. Start the instance again")}

    def on_mapped(self, attached: WeightsAttached) -> None:
        """Note whose memory the engine maps: GPU memory ends with its loader."""
        self._owner = attached.boot_id if isinstance(attached.handle, CudaIpcHandle | GpuUnitsHandle) else None

    def on_status(self, status: LoaderProgress) -> None:
        self._weights.on_loader_status()
        if self._owner is not None and (status.stopping or status.boot_id != self._owner):
            self._owner_gone.set()
        if self._reporter.phase is not Phase.LOAD:
            return
        for segment in status.segments:
            if segment.weights_id == self._reporter.weights_id and segment.total_bytes:
                self._reporter.advance(BOUND + 0.8 * segment.loaded_bytes / segment.total_bytes, Phase.LOAD)
