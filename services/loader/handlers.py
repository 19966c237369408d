"""What the mesh and the readers without it may ask, as events of the loop. All of it runs on the event loop's thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from services.loader import status_publisher as telling
from services.loader.adapters.cards import bare_card, card_for
from services.loader.adapters.inspection import described
from services.loader.adapters.peer_sharing import Shared
from services.loader.adapters.reclaim import GivingBack
from services.loader.adapters.records import Records, WeightsRecord
from services.loader.adapters.runs import Runs
from services.loader.adapters.small_files import read_part
from services.loader.domain.events import (
    Adopt,
    Adopted,
    Attach,
    Event,
    NodeHeard,
    Prepare,
    Pressed,
    Quiet,
    Release,
    Stop,
)
from services.loader.domain.state import Stage
from services.loader.loop import Loop
from services.loader.prefetching import Prefetching
from shared.contracts.base import Done, Message
from shared.contracts.loader import (
    AttachWeights,
    CancelPrefetch,
    Inspected,
    InspectModel,
    LoaderCommand,
    LoaderStatus,
    ModelFilePart,
    PrefetchWeights,
    PrepareWeights,
    ReadModelFile,
    ReleaseWeights,
    WeightsAttached,
)
from shared.contracts.models import ModelCard
from shared.contracts.node import WEIGHTS_ON_GPU, InstanceState, NodeStatus
from shared.errors import NotFound, ShuttingDown, StaleToken, from_body
from weights.pool.chunks import Chunks
from weights.pool.shm import free_bytes, short_of_memory
from weights.sources.sources import Sources

log = logging.getLogger(__name__)
_INSPECTIONS_AT_ONCE = 8
_QUIET_S = 10.0
"""Without a load, before memory is made ready for the next ones."""


class Loader:
    """What the mesh and readers without it ask, in the loop's events."""

    def __init__(
        self,
        node: str,
        boot_id: str,
        records: Records,
        sources: Sources,
        workers: Callable[[Callable[[Event], None]], tuple[Runs, GivingBack]],
        chunks: Chunks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = Loop(boot_id, records, workers, chunks, clock)
        self._node, self._boot_id, self._sources = node, boot_id, sources
        self._shares = False
        self._prefetching = Prefetching(self._bring, self._end_hold)
        self._inspections = ThreadPoolExecutor(_INSPECTIONS_AT_ONCE, thread_name_prefix="inspect")

    @property
    def changed(self) -> asyncio.Event:
        """Set whenever the state has changed."""
        return self._loop.changed

    # -- in ----------------------------------------------------------------------------------------------------------------------

    async def handle(self, command: LoaderCommand) -> Message:
        """The reply to one command. Raises the `ThawError` it is refused with."""
        match command:
            case InspectModel():
                return await self._inspect(command)
            case PrefetchWeights():
                if command.token >> 32 < self._loop.state.epoch:
                    raise StaleToken(f"a prefetch is from leader epoch {command.token >> 32}; {self._loop.state.epoch} was seen")
                self._prefetching.begin(command)
                return Done()
            case CancelPrefetch(weights_id=weights_id):
                self._prefetching.cancel(weights_id)
                return Done()
            case PrepareWeights():
                if not command.background:
                    self._prefetching.make_way(command.card.info.revision)
                return await self._loop.ask(
                    lambda n: Prepare(
                        n,
                        command.instance_id,
                        command.card,
                        command.token,
                        command.traceparent,
                        command.background,
                        self._device(command.device),
                    )
                )
            case AttachWeights():
                self._prefetching.make_way(command.card.info.revision)
                device = self._device(command.device)
                return await self._loop.ask(
                    lambda n: Attach(n, command.instance_id, command.card, command.until, command.traceparent, device=device)
                )
            case ReleaseWeights():
                return await self._loop.ask(lambda n: Release(n, command.instance_id))

    async def hear_node(self, status: NodeStatus) -> None:
        """A status of this node's nodeagent."""
        self._shares = any(c.name == WEIGHTS_ON_GPU and c.available for c in status.capabilities)
        known = frozenset(i.instance_id for i in status.instances if i.state is not InstanceState.STOPPED)
        self._loop.dispatch(NodeHeard(known))
        if (short := short_of_memory()) > 0:
            self._loop.dispatch(Pressed(short))

    def adopt(self, records: list[WeightsRecord], mapped: tuple[int, ...] = (), ready: int = 0, *, at_once: bool = True) -> None:
        """Take over what an earlier loader left. `ready`: chunks to have memory before a load asks for them; from now on (`at_once`), or when
        there is time (`keep_ready`)."""
        for r in records:
            log.info("adopted weights", extra={"model": r.model, "weights": r.weights_id, "holders": list(r.holders)})
            self._loop.dispatch(
                Adopt(r.weights_id, r.model, r.chunks, r.directory, r.total_bytes, r.holders, r.source, pinned=r.pinned)
            )
        self._loop.dispatch(Adopted(mapped, ready, free_bytes() if at_once else 0))

    async def keep_ready(self) -> None:
        """Whenever nothing has been loaded for a while, have memory populated for the loads to come. Never returns."""
        while True:
            left = self._loop.busy_at + _QUIET_S - self._loop.clock()
            if left <= 0:
                self._loop.dispatch(Quiet(free_bytes()))
            await asyncio.sleep(left if left > 0 else _QUIET_S)

    @property
    def is_held(self) -> bool:
        """Whether instances hold weights."""
        return any(e.holders for e in self._loop.state.entries.values())

    async def stop(self) -> None:
        """Refuse what waits, call off what loads, and wait until that is done. Complete weights stay for those who hold them, or cached."""
        await self._prefetching.stop()
        self._loop.dispatch(Stop())
        while not self._loop.state.settled:
            self.changed.clear()
            await self.changed.wait()
        self._inspections.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._loop.runs.close)
        await asyncio.to_thread(self._loop.giving_back.close)

    async def _bring(self, holder: str, command: PrefetchWeights) -> Message:
        there = await self._loop.ask(lambda n: Attach(n, holder, command.card, "complete", None, local=True, background=True))
        if command.tier == "ssd":  # what was read is written to the disk from its memory
            await asyncio.to_thread(self._loop.runs.settled, command.card.info.revision)
        return there

    def _end_hold(self, holder: str, keep: bool) -> None:
        self._loop.dispatch(Release(self._loop.number(), holder, keep))

    async def _inspect(self, command: InspectModel) -> Inspected:
        return Inspected(
            info=await asyncio.get_running_loop().run_in_executor(self._inspections, described, command.spec, self._sources)
        )

    async def read_file(self, request: ReadModelFile) -> ModelFilePart:
        """A part of a small file, for a gateway that counts tokens. Raises `NotFound` if it is not on this host."""
        return await asyncio.get_running_loop().run_in_executor(self._inspections, read_part, self._sources, request)

    # -- readers without NATS ----------------------------------------------------------------------------------------------------

    async def hold(self, holder: str, card: ModelCard, *, background: bool) -> WeightsAttached:
        """Weights held by a connection; returns when their index is there."""
        try:
            found = await self._loop.ask(lambda n: Attach(n, holder, card, "index", None, local=True, background=background))
        finally:
            self._sources.listed.drop(card.info.revision)
        assert isinstance(found, WeightsAttached)
        return found

    def let_go(self, holder: str) -> None:
        """The connection has ended."""
        self._loop.dispatch(Release(self._loop.number(), holder))

    async def watermarks(self, weights_id: str) -> AsyncIterator[int]:
        """How far the load is, at once and on every change, up to its end. Raises the load's error."""
        run = self._loop.state.entries[weights_id].run
        while True:
            moved, entry = self._loop.moved, self._loop.state.entries.get(weights_id)
            if entry is None or entry.run != run or entry.stage is Stage.LEAVING:
                raise ShuttingDown("the load was called off; attach again")
            if entry.error is not None:
                raise from_body(entry.error)
            yield entry.loaded_bytes
            if entry.stage is Stage.COMPLETE:
                return
            await moved.wait()

    async def card_of(self, *, weights_id: str | None, source: str | None) -> ModelCard:
        """A card to attach with. Raises `NotFound` for weights that nobody has asked this node for, and what reading the source raises."""
        if source is not None:
            asked = asyncio.get_running_loop().run_in_executor(self._inspections, bare_card, self._sources, source)
            try:
                return await asyncio.shield(asked)
            except asyncio.CancelledError:
                asked.add_done_callback(self._unwanted)
                raise
        entry = self._loop.state.entries.get(weights_id or "")
        if entry is None:
            raise NotFound(f"this node has no weights {weights_id}; attach with their source")
        return card_for(entry.source, entry.weights_id, entry.total_bytes)

    def _unwanted(self, asked: asyncio.Future[ModelCard]) -> None:
        """The reader was gone before its source had answered."""
        if not asked.cancelled() and asked.exception() is None:
            self._sources.listed.drop(asked.result().info.revision)

    def _device(self, wanted: str | None) -> str | None:
        """Where weights are to be brought to: nowhere unless the nodeagent has said that its engines may map them there."""
        return wanted if wanted is not None and self._shares and self._loop.runs.copies is not None else None

    # -- out ---------------------------------------------------------------------------------------------------------------------

    def status(self, shared: Shared) -> LoaderStatus:
        """`shared`: what is on this host's disk for other nodes too."""
        self.changed.clear()
        on_devices = self._loop.runs.copies.on_devices if self._loop.runs.copies is not None else lambda _: {}
        status = telling.status(self._loop.state, self._loop.records.pool_name, self._node, self._boot_id, shared, on_devices)
        return status.model_copy(update={"bytes_per_second": self._loop.runs.bytes_per_second, "links": self._loop.runs.links()})
