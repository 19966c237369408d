"""Compute requests while the engine's weights arrive (Torpor, section 4.3).

    begin            follow the load over the loader's socket
    make_ready       bind the model to the addresses of the bytes; each layer waits for its bytes
    serve_with       compute requests from now on
    finish           wait for the loader's reply over NATS, which ends the load
    release_results  send results, once the engine has reported ready

The engine sends no result before the loader has confirmed over NATS that the bytes belong to this
instance. Results are therefore equal to those of any other engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from services.engine.generation.batcher import Batcher
from services.engine.generation.events import Event
from services.engine.loader_client import LoaderClient
from services.engine.model import loading
from services.engine.model.arriving import ArrivingPages, Follower
from services.engine.model.bound_model import BoundModel
from services.engine.model.gpu_units import ArrivingUnits
from services.engine.model.layer_gates import LayerGates
from services.engine.model.model_files import ModelFiles
from services.engine.model.ready_model import ReadyModel
from services.engine.server.serving import Serving
from services.engine.settings import EngineSettings
from shared.contracts.engine import EngineStart
from shared.contracts.loader import WeightsAttached
from shared.contracts.phases import Phase
from shared.contracts.segment import GpuUnitsHandle, PagesHandle, PagesLayout
from shared.errors import EngineFailed, ShuttingDown, ThawError, Unreachable
from shared.telemetry.timeline import Timeline

log = logging.getLogger(__name__)
_LAYOUT_WITHIN_S = 5.0
"""A loader that takes longer to reserve pages waits for memory. The engine then waits for the load.
"""


class Overlap:
    """The load of one engine, which computes requests during the load.

    Used on the event loop, except `make_ready` and `deliver`.
    """

    def __init__(
        self,
        follower: Follower,
        bound: BoundModel,
        index: WeightsAttached,
        start: EngineStart,
        loader: LoaderClient,
        timeline: Timeline,
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        self._follower, self._bound, self._start, self._loader = follower, bound, start, loader
        self._boot_id = index.boot_id
        self._timeline, self._deliver = timeline, deliver
        self._lock = threading.Lock()
        self._held: list[Event] | None = []
        self._gates: LayerGates | None = None
        self._serving: Serving | None = None
        self._batcher: Batcher | None = None

    @classmethod
    async def begin(
        cls,
        socket: Path,
        bound: BoundModel,
        index: WeightsAttached,
        start: EngineStart,
        loader: LoaderClient,
        timeline: Timeline,
        deliver: Callable[[Sequence[Event]], None],
    ) -> Overlap | None:
        """Follow the load.

        Returns:
            None if the engine cannot reach the loader's socket, or if the loader has no pages for
            the weights yet.
        """
        loop = asyncio.get_running_loop()
        laid_out: asyncio.Future[PagesLayout | None] = loop.create_future()

        def set_once(layout: PagesLayout | None) -> None:
            if not laid_out.done():
                laid_out.set_result(layout)

        def on_pages(layout: PagesLayout | None) -> None:
            loop.call_soon_threadsafe(set_once, layout)

        try:
            follower = await asyncio.to_thread(Follower, socket, start.instance_id, index.weights_id, on_pages)
        except Unreachable as e:
            log.info("computing starts when all weights are loaded", extra={"reason": e.message})
            return None
        if loading.has_own_memory(start):
            try:
                async with asyncio.timeout(_LAYOUT_WITHIN_S):
                    found = await laid_out
            except TimeoutError:
                found = None
            if found is None:
                log.info("computing starts when all weights are loaded", extra={"reason": "no pages were reported"})
                await asyncio.to_thread(follower.end)
                return None
        return cls(follower, bound, index, start, loader, timeline, deliver)

    def make_ready(self, files: ModelFiles, settings: EngineSettings) -> ReadyModel:
        """Bind the model to its future bytes. Runs on the computing thread."""
        ready, self._gates = loading.begin(self._bound, files, self._start, settings, self._follower.arriving, self._follower.pages)
        return ready

    def serve_with(self, serving: Serving, batcher: Batcher) -> None:
        """Set the open server and batcher, which compute requests from now on."""
        self._serving, self._batcher = serving, batcher

    def deliver(self, events: Sequence[Event]) -> None:
        """Pass events of the computing thread on, or keep them until `release_results`."""
        with self._lock:
            if self._held is not None:
                self._held.extend(events)
                return
        self._deliver(events)

    async def finish(self) -> WeightsAttached:
        """Wait for the load, confirm it, and return the loader's answer.

        Raises the error of the load.
        """
        try:
            attached = await self._attach()
            self._timeline.absorb(attached.phases)
            has_pages = self._start.separate_memory or self._follower.pages is not None
            attached = await (self._confirm_pages(attached) if has_pages else self._confirm_segment(attached))
        except ThawError as e:
            self._follower.arriving.fail(e)
            raise
        self._follower.arriving.mark_complete()
        await asyncio.to_thread(self._follower.end)
        assert self._serving is not None
        self._serving.weights_arrived(attached.phases)
        await self._warm_up()
        return attached

    def release_results(self) -> None:
        """Send the results. Call it once after `finish`, when the engine has reported ready."""
        with self._lock:
            held, self._held = self._held or [], None
            if held:
                self._deliver(held)

    async def close(self) -> None:
        """End the load: the computing thread stops waiting for weights."""
        self._follower.arriving.fail(ShuttingDown("The engine was stopped while its weights were loading"))
        await asyncio.to_thread(self._follower.end)

    async def _attach(self) -> WeightsAttached:
        return await self._loader.attach(self._start.card, self._start.instance_id, "complete")

    async def _confirm_pages(self, attached: WeightsAttached) -> WeightsAttached:
        """Map every unit where the loader has it, and verify that the pages are still this
        instance's.

        As in `Engine._map_pages`: after the second reply the loader sees this process's mappings.
        """
        while True:
            loading.check_device(attached)
            await asyncio.to_thread(self._follower.end)  # the follower maps no more units
            match self._follower.pages, attached.handle:
                case ArrivingPages() as pages, PagesHandle() as handle:
                    await asyncio.to_thread(pages.map_all, handle)
                case ArrivingUnits() as units, GpuUnitsHandle() as mapped if attached.boot_id == self._boot_id:
                    await asyncio.to_thread(units.map_all, mapped)
                case ArrivingUnits(), GpuUnitsHandle():
                    raise EngineFailed("The loader that owns the weights' GPU memory has ended. Start the instance again")
                case _:
                    raise EngineFailed(
                        f"The loader has no memory for {self._start.device}: set THAW_DEVICES for both services alike"
                    )
            confirmed = await self._attach()
            if confirmed.handle == attached.handle:
                self._bound.handle = confirmed.handle
                return attached
            attached = confirmed

    async def _confirm_segment(self, attached: WeightsAttached) -> WeightsAttached:
        """Map the segment of a restarted loader. The loader reuses no chunk that is mapped."""
        if not self._bound.segment.is_current(attached.segment, attached.extents):
            log.warning("the loader was restarted and has reloaded the weights; mapping again")
            await asyncio.to_thread(self._bound.segment.map_again, attached.segment, attached.extents)
        return attached

    async def _warm_up(self) -> None:
        """Remove the gates, and read every weight once if no request has done so."""
        loop, warm = asyncio.get_running_loop(), asyncio.Event()
        assert self._batcher is not None
        assert self._gates is not None
        assert self._serving is not None
        gates = self._gates

        def finish_warm_up() -> None:
            gates.remove()
            loop.call_soon_threadsafe(warm.set)

        self._batcher.warm_up(finish_warm_up)
        if not self._serving.streams:
            with self._timeline.phase(Phase.PROFILE):
                await warm.wait()
