"""The loop's shell: commands become events, decisions become effects and replies. All of it runs on the event loop's thread."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from services.loader import telling
from services.loader.adapters.cards import bare_card, card_for
from services.loader.adapters.inspection import described
from services.loader.adapters.records import Records, WeightsRecord
from services.loader.adapters.runs import Runs
from services.loader.adapters.shm import free_bytes, short_of_memory
from services.loader.adapters.small_files import read_part
from services.loader.cache.sharing import Shared
from services.loader.domain.chunks import Chunks
from services.loader.domain.decide import decide
from services.loader.domain.events import (
    Abandoned,
    Accepted,
    Adopt,
    Adopted,
    Attach,
    Attached,
    CancelRun,
    CloseArena,
    Deny,
    Effect,
    Event,
    Forget,
    Freed,
    Grant,
    Hurry,
    NodeHeard,
    OpenArena,
    Prepare,
    Pressed,
    Quiet,
    Refused,
    Release,
    Remember,
    StartRun,
    Stop,
    Vacate,
)
from services.loader.domain.state import Entry, Stage, State
from services.loader.pool.giving_back import GivingBack
from services.loader.prefetching import Prefetching
from services.loader.tiers.sources import Sources
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
    WeightsReleased,
)
from shared.contracts.models import ModelCard
from shared.contracts.node import WEIGHTS_ON_GPU, InstanceState, NodeStatus
from shared.errors import NotFound, ShuttingDown, StaleToken, from_body

log = logging.getLogger(__name__)
_INSPECTIONS_AT_ONCE = 8
_QUIET_S = 10.0
"""Without a load, before memory is made ready for the next ones."""


class Loader:
    """Owns the state; `changed` is set whenever it has changed."""

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
        self._loop = asyncio.get_running_loop()
        self._node, self._boot_id, self._records, self._sources = node, boot_id, records, sources
        self._state, self._clock = State(chunks=chunks), clock
        self._busy_at = clock()
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._runs, self._giving_back = workers(self._from_thread)
        self._shares = False
        self._prefetching = Prefetching(self._bring, self._end_hold)
        self._inspections = ThreadPoolExecutor(_INSPECTIONS_AT_ONCE, thread_name_prefix="inspect")
        self.changed = asyncio.Event()
        self._moved = asyncio.Event()

    # -- in ----------------------------------------------------------------------------------------------------------------------

    async def handle(self, command: LoaderCommand) -> Message:
        """The reply to one command. Raises the `ThawError` it is refused with."""
        match command:
            case InspectModel():
                return await self._inspect(command)
            case PrefetchWeights():
                if command.token >> 32 < self._state.epoch:
                    raise StaleToken(f"a prefetch is from leader epoch {command.token >> 32}; {self._state.epoch} was seen")
                self._prefetching.begin(command)
                return Done()
            case CancelPrefetch(weights_id=weights_id):
                self._prefetching.cancel(weights_id)
                return Done()
            case PrepareWeights():
                if not command.background:
                    self._prefetching.make_way(command.card.info.revision)
                return await self._ask(
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
                return await self._ask(
                    lambda n: Attach(n, command.instance_id, command.card, command.until, command.traceparent, device=device)
                )
            case ReleaseWeights():
                return await self._ask(lambda n: Release(n, command.instance_id))

    async def hear_node(self, status: NodeStatus) -> None:
        """A status of this node's nodeagent."""
        self._shares = any(c.name == WEIGHTS_ON_GPU and c.available for c in status.capabilities)
        known = frozenset(i.instance_id for i in status.instances if i.state is not InstanceState.STOPPED)
        self.dispatch(NodeHeard(known))
        if (short := short_of_memory()) > 0:
            self.dispatch(Pressed(short))

    def adopt(self, records: list[WeightsRecord], mapped: tuple[int, ...] = (), ready: int = 0, *, at_once: bool = True) -> None:
        """Take over what an earlier loader left. `ready`: chunks to have memory before a load asks for them; from now on (`at_once`), or when
        there is time (`keep_ready`)."""
        for r in records:
            log.info("adopted weights", extra={"model": r.model, "weights": r.weights_id, "holders": list(r.holders)})
            self.dispatch(Adopt(r.weights_id, r.model, r.chunks, r.directory, r.total_bytes, r.holders, r.source, pinned=r.pinned))
        self.dispatch(Adopted(mapped, ready, free_bytes() if at_once else 0))

    async def keep_ready(self) -> None:
        """Whenever nothing has been loaded for a while, have memory populated for the loads to come. Never returns."""
        while True:
            left = self._busy_at + _QUIET_S - self._clock()
            if left <= 0:
                self.dispatch(Quiet(free_bytes()))
            await asyncio.sleep(left if left > 0 else _QUIET_S)

    @property
    def is_held(self) -> bool:
        """Whether instances hold weights."""
        return any(e.holders for e in self._state.entries.values())

    async def stop(self) -> None:
        """Refuse what waits, call off what loads, and wait until that is done. Complete weights stay for those who hold them, or cached."""
        await self._prefetching.stop()
        self.dispatch(Stop())
        while not self._state.settled:
            self.changed.clear()
            await self.changed.wait()
        self._inspections.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._runs.close)
        await asyncio.to_thread(self._giving_back.close)

    async def _bring(self, holder: str, command: PrefetchWeights) -> Message:
        there = await self._ask(lambda n: Attach(n, holder, command.card, "complete", None, local=True, background=True))
        if command.tier == "ssd":  # what was read is written to the disk from its memory
            await asyncio.to_thread(self._runs.settled, command.card.info.revision)
        return there

    def _end_hold(self, holder: str, keep: bool) -> None:
        self.dispatch(Release(next(self._numbers), holder, keep))

    async def _inspect(self, command: InspectModel) -> Inspected:
        return Inspected(info=await self._loop.run_in_executor(self._inspections, described, command.spec, self._sources))

    async def read_file(self, request: ReadModelFile) -> ModelFilePart:
        """A part of a small file, for a gateway that counts tokens. Raises `NotFound` if it is not on this host."""
        return await self._loop.run_in_executor(self._inspections, read_part, self._sources, request)

    async def _ask(self, event: Callable[[int], Event]) -> Message:
        number = next(self._numbers)
        reply: asyncio.Future[Message] = self._loop.create_future()
        self._replies[number] = reply
        try:
            self.dispatch(event(number))
            return await reply
        finally:
            del self._replies[number]
            if reply.cancelled():
                self.dispatch(Abandoned(number))

    # -- readers without NATS ----------------------------------------------------------------------------------------------------

    async def hold(self, holder: str, card: ModelCard, *, background: bool) -> WeightsAttached:
        """Weights held by a connection; returns when their index is there."""
        try:
            found = await self._ask(lambda n: Attach(n, holder, card, "index", None, local=True, background=background))
        finally:
            self._sources.listed.drop(card.info.revision)
        assert isinstance(found, WeightsAttached)
        return found

    def let_go(self, holder: str) -> None:
        """The connection has ended."""
        self.dispatch(Release(next(self._numbers), holder))

    async def watermarks(self, weights_id: str) -> AsyncIterator[int]:
        """How far the load is, at once and on every change, up to its end. Raises the load's error."""
        run = self._state.entries[weights_id].run
        while True:
            moved, entry = self._moved, self._state.entries.get(weights_id)
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
            asked = self._loop.run_in_executor(self._inspections, bare_card, self._sources, source)
            try:
                return await asyncio.shield(asked)
            except asyncio.CancelledError:
                asked.add_done_callback(self._unwanted)
                raise
        entry = self._state.entries.get(weights_id or "")
        if entry is None:
            raise NotFound(f"this node has no weights {weights_id}; attach with their source")
        return card_for(entry.source, entry.weights_id, entry.total_bytes)

    def _unwanted(self, asked: asyncio.Future[ModelCard]) -> None:
        """The reader was gone before its source had answered."""
        if not asked.cancelled() and asked.exception() is None:
            self._sources.listed.drop(asked.result().info.revision)

    def _device(self, wanted: str | None) -> str | None:
        """Where weights are to be brought to: nowhere unless the nodeagent has said that its engines may map them there."""
        return wanted if wanted is not None and self._shares and self._runs.copies is not None else None

    def _from_thread(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self.dispatch, event)

    # -- the loop ----------------------------------------------------------------------------------------------------------------

    def dispatch(self, event: Event) -> None:
        before = self._state
        self._state, effects = decide(before, event, self._clock())
        if before.is_loading or self._state.is_loading:
            self._busy_at = self._clock()
        for effect in effects:
            self._perform(effect)
        if self._state is not before:
            self.changed.set()
            self._moved.set()
            self._moved = asyncio.Event()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartRun():
                self._runs.start(effect)
            case CancelRun():
                self._runs.cancel(effect.run)
            case Hurry():
                self._runs.hurry(effect.run)
            case Grant():
                self._runs.grant(effect.run, effect.chunks)
            case Deny():
                self._runs.grant(effect.run, None)
            case OpenArena():
                assert self._runs.copies is not None
                self._runs.copies.open(effect)
            case CloseArena():
                assert self._runs.copies is not None
                self._runs.copies.close(effect)
            case Forget():
                self._records.remove(effect.weights_id)
            case Vacate():
                self._giving_back.start(effect, self._runs.forget(effect.run))
            case Remember():
                entry = self._state.entries[effect.weights_id]
                if entry.stage is Stage.CACHED:
                    self._runs.past(entry.run)
                self._records.write(telling.record(self._state, entry))
            case Accepted():
                self._answer(effect.reply, Done())
            case Attached():
                self._answer(effect.reply, self._attached(self._state.entries[effect.weights_id], effect.device))
            case Freed():
                self._answer(
                    effect.reply,
                    WeightsReleased(freed_bytes=effect.freed, cached_bytes=effect.cached, device_bytes=effect.on_devices),
                )
            case Refused():
                if (waiting := self._replies.get(effect.reply)) is not None and not waiting.done():
                    waiting.set_exception(from_body(effect.error))

    def _answer(self, number: int, message: Message) -> None:
        if (waiting := self._replies.get(number)) is not None and not waiting.done():
            waiting.set_result(message)

    # -- out ---------------------------------------------------------------------------------------------------------------------

    def _attached(self, e: Entry, device: str | None) -> WeightsAttached:
        timeline, copies = self._runs.timeline(e.run), self._runs.copies
        handle = copies.handle(e.run, device) if copies is not None and device is not None else None
        told = telling.attached(self._state, e, self._records.pool_name, timeline.spans() if timeline else ())
        return told.model_copy(update={"handle": handle, "boot_id": self._boot_id})

    def status(self, shared: Shared) -> LoaderStatus:
        """`shared`: what is on this host's disk for other nodes too."""
        self.changed.clear()
        on_devices = self._runs.copies.on_devices if self._runs.copies is not None else lambda _: {}
        status = telling.status(self._state, self._records.pool_name, self._node, self._boot_id, shared, on_devices)
        return status.model_copy(update={"bytes_per_second": self._runs.bytes_per_second, "links": self._runs.links()})
