"""Client of the node's loader: attaches and releases weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Literal

from nats.errors import Error as NatsError

from shared.contracts import subjects
from shared.contracts.engine import EngineStart
from shared.contracts.loader import AttachWeights, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.models import ModelCard
from shared.errors import DeadlineExceeded, ShuttingDown, ThawError, Unreachable
from shared.messaging import Mesh
from shared.telemetry.tracing import carried

log = logging.getLogger(__name__)
_RETRY_MS = 2_000
"""Requests are repeated: a request or its answer is lost without notice if the loader or NATS is
killed.
"""
_LOADER_AWAY_S = 1.0
"""The loader publishes a status every second; without one the client retries after this long."""


def holder_of(start: EngineStart) -> str:
    """Return the name under which the loader keeps an engine's own weights."""
    stage = start.stage
    return start.instance_id if stage is None or stage.holder is None else stage.holder


class LoaderClient:
    """Attaches weights for one engine process."""

    def __init__(self, mesh: Mesh, start: EngineStart) -> None:
        self._mesh = mesh
        self._start = start
        self._loader_alive = asyncio.Event()

    @property
    def holder(self) -> str:
        """Name under which the loader keeps the engine's own weights."""
        return holder_of(self._start)

    def on_loader_status(self) -> None:
        """Note that the loader is running."""
        self._loader_alive.set()

    async def attach(self, card: ModelCard, holder: str, until: Literal["index", "complete"]) -> WeightsAttached:
        """Attach weights, retrying until the loader answers.

        The caller bounds the time: a loader may be restarted meanwhile.

        Args:
            card: The model or adapter.
            holder: Name under which the loader keeps the weights.
            until: `index`: tensor locations are known; `complete`: all bytes are loaded.
        """
        parent = self._start.traceparent
        # LoRA adapters are small: the engine copies them from host memory.
        is_copied = self._start.device.startswith("cuda:") or self._start.separate_memory
        device = self._start.device if holder == self.holder and is_copied else None
        stage = self._start.stage if holder == self.holder else None
        request = AttachWeights(
            instance_id=holder,
            card=card,
            until=until,
            traceparent=parent,
            device=device,
            layers=stage.layers if stage is not None else None,
            deadline_ms=_RETRY_MS,
        )
        with carried({"traceparent": parent} if parent else None):
            while True:
                try:
                    return await self._mesh.request(subjects.loader_command(self._start.node), request, WeightsAttached)
                except DeadlineExceeded:
                    log.debug("the weights are still loading; retrying")
                except (Unreachable, ShuttingDown):
                    log.info("the loader is unreachable; retrying after its next status")
                    await self._wait_for_loader()

    async def release(self, holder: str) -> None:
        """Release weights.

        If the loader misses the message, it learns of the release from the node's status. So no
        error is raised: the caller frees the adapter's room in any case.
        """
        try:
            await self._mesh.request(subjects.loader_command(self._start.node), ReleaseWeights(instance_id=holder), WeightsReleased)
        except (ThawError, NatsError) as e:
            log.warning("failed to release weights", extra={"holder": holder, "error": str(e)})

    async def _wait_for_loader(self) -> None:
        self._loader_alive.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOADER_AWAY_S):
                await self._loader_alive.wait()
