"""The engine's side of its node's loader: weights are asked for until they come, and let go of."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Literal

from shared.contracts import subjects
from shared.contracts.engine import EngineStart
from shared.contracts.loader import AttachWeights, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.models import ModelCard
from shared.errors import DeadlineExceeded, ShuttingDown, ThawError, Unreachable
from shared.messaging import Mesh
from shared.telemetry.tracing import carried

log = logging.getLogger(__name__)
_ASK_AGAIN_MS = 2_000
"""A question is repeated: it, or its answer, is lost if the loader or NATS is killed meanwhile, and nothing tells of that."""
_LOADER_AWAY_S = 1.0
"""The loader says that it lives every second; without a word it is asked again after this long."""


class Weights:
    def __init__(self, mesh: Mesh, start: EngineStart) -> None:
        self._mesh = mesh
        self._start = start
        self._loader_alive = asyncio.Event()

    def loader_heard(self) -> None:
        """The loader lives."""
        self._loader_alive.set()

    async def attach(self, card: ModelCard, holder: str, until: Literal["index", "complete"]) -> WeightsAttached:
        """Asks until there is an answer: how long it may take is the caller's to judge, and a loader may be restarted."""
        parent = self._start.traceparent
        # Adapters are small, and are kept beside the weights.
        device = self._start.device if holder == self._start.instance_id and self._start.device.startswith("cuda:") else None
        request = AttachWeights(
            instance_id=holder, card=card, until=until, traceparent=parent, device=device, deadline_ms=_ASK_AGAIN_MS
        )
        with carried({"traceparent": parent} if parent else None):
            while True:
                try:
                    return await self._mesh.request(subjects.loader_command(self._start.node), request, WeightsAttached)
                except DeadlineExceeded:
                    log.debug("the weights are still on their way; asking again")
                except (Unreachable, ShuttingDown):
                    log.info("the loader is away; asking again when it is back")
                    await self._until_loader_heard()

    async def release(self, holder: str) -> None:
        """Let go. A loader that does not hear of it learns it from the node's status when the instance is gone."""
        try:
            await self._mesh.request(subjects.loader_command(self._start.node), ReleaseWeights(instance_id=holder), WeightsReleased)
        except ThawError as e:
            log.warning("weights could not be released", extra={"holder": holder, "error": e.message})

    async def _until_loader_heard(self) -> None:
        self._loader_alive.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOADER_AWAY_S):
                await self._loader_alive.wait()
