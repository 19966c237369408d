"""The loop's shell: commands become events, decisions become effects and replies. All of it runs on the event loop's thread."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.loader.adapters.inspection import described
from services.loader.adapters.records import Records, SegmentRecord
from services.loader.adapters.runs import Runs
from services.loader.adapters.small_files import read_part
from services.loader.domain.decide import decide
from services.loader.domain.events import (
    Abandoned,
    Accepted,
    Adopt,
    Attach,
    Attached,
    CancelRun,
    Effect,
    Event,
    Freed,
    NodeHeard,
    Prepare,
    Refused,
    Release,
    Remember,
    RemoveSegment,
    StartRun,
    Stop,
)
from services.loader.domain.state import Entry, State
from shared.contracts.base import Done, Message
from shared.contracts.loader import (
    AttachWeights,
    Inspected,
    InspectModel,
    LoaderCommand,
    LoaderStatus,
    ModelFilePart,
    PrepareWeights,
    ReadModelFile,
    ReleaseWeights,
    SegmentStatus,
    WeightsAttached,
    WeightsReleased,
)
from shared.contracts.node import InstanceState, NodeStatus
from shared.errors import from_body

log = logging.getLogger(__name__)
_INSPECTIONS_AT_ONCE = 8


class Loader:
    """Owns the state; `changed` is set whenever it has changed."""

    def __init__(
        self,
        node: str,
        boot_id: str,
        records: Records,
        runs: Callable[[Callable[[Event], None]], Runs],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._node, self._boot_id, self._records = node, boot_id, records
        self._state, self._clock = State(), clock
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._runs = runs(self._from_thread)
        self._inspections = ThreadPoolExecutor(_INSPECTIONS_AT_ONCE, thread_name_prefix="inspect")
        self.changed = asyncio.Event()

    # -- in ----------------------------------------------------------------------------------------------------------------------

    async def handle(self, command: LoaderCommand) -> Message:
        """The reply to one command. Raises the `ThawError` it is refused with."""
        match command:
            case InspectModel():
                return await self._inspect(command)
            case PrepareWeights():
                return await self._ask(lambda n: Prepare(n, command.instance_id, command.card, command.token, command.traceparent))
            case AttachWeights():
                return await self._ask(lambda n: Attach(n, command.instance_id, command.card, command.until, command.traceparent))
            case ReleaseWeights():
                return await self._ask(lambda n: Release(n, command.instance_id))

    async def hear_node(self, status: NodeStatus) -> None:
        """A status of this node's nodeagent."""
        known = frozenset(i.instance_id for i in status.instances if i.state is not InstanceState.STOPPED)
        self.dispatch(NodeHeard(known))

    def adopt(self, records: list[SegmentRecord]) -> None:
        for r in records:
            log.info("adopted a segment", extra={"model": r.model, "segment": r.segment, "holders": list(r.holders)})
            self.dispatch(Adopt(r.weights_id, r.model, r.segment, r.directory, r.total_bytes, r.holders))

    async def stop(self) -> None:
        """Refuse what waits, call off what loads, and wait until that is done. Complete segments stay for those who hold them."""
        self.dispatch(Stop())
        while not self._state.settled:
            self.changed.clear()
            await self.changed.wait()
        self._inspections.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._runs.close)

    async def _inspect(self, command: InspectModel) -> Inspected:
        return Inspected(info=await self._loop.run_in_executor(self._inspections, described, command.spec))

    async def read_file(self, request: ReadModelFile) -> ModelFilePart:
        """A part of a small file, for a gateway that counts tokens. Raises `NotFound` if it is not on this host."""
        return await self._loop.run_in_executor(self._inspections, read_part, request)

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

    def _from_thread(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self.dispatch, event)

    # -- the loop ----------------------------------------------------------------------------------------------------------------

    def dispatch(self, event: Event) -> None:
        before = self._state
        self._state, effects = decide(before, event, self._clock())
        if self._state is not before:
            self.changed.set()
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartRun():
                self._runs.start(effect)
            case CancelRun():
                self._runs.cancel(effect.run)
            case RemoveSegment():
                self._runs.remove(effect, self._records.remove)
            case Remember():
                self._remember(self._state.entries[effect.weights_id])
            case Accepted():
                self._answer(effect.reply, Done())
            case Attached():
                self._answer(effect.reply, self._attached(self._state.entries[effect.weights_id]))
            case Freed():
                self._answer(effect.reply, WeightsReleased(freed_bytes=effect.freed))
            case Refused():
                if (waiting := self._replies.get(effect.reply)) is not None and not waiting.done():
                    waiting.set_exception(from_body(effect.error))

    def _answer(self, number: int, message: Message) -> None:
        if (waiting := self._replies.get(number)) is not None and not waiting.done():
            waiting.set_result(message)

    # -- out ---------------------------------------------------------------------------------------------------------------------

    def _remember(self, e: Entry) -> None:
        self._records.write(
            SegmentRecord(
                weights_id=e.weights_id,
                model=e.model,
                segment=e.segment,
                directory=e.directory,
                total_bytes=e.total_bytes,
                holders=tuple(e.holders),
            )
        )

    def _attached(self, e: Entry) -> WeightsAttached:
        timeline = self._runs.timeline(e.run)
        return WeightsAttached(
            weights_id=e.weights_id,
            segment=e.segment,
            directory=e.directory,
            total_bytes=e.total_bytes,
            loaded_bytes=e.loaded_bytes,
            phases=timeline.spans() if timeline else (),
        )

    def status(self) -> LoaderStatus:
        self.changed.clear()
        return LoaderStatus(
            node=self._node,
            boot_id=self._boot_id,
            segments=tuple(_status(e) for e in self._state.entries.values()),
            bytes_per_second=self._runs.bytes_per_second,
        )


def _status(e: Entry) -> SegmentStatus:
    return SegmentStatus(
        weights_id=e.weights_id,
        model=e.model,
        segment=e.segment,
        total_bytes=e.total_bytes,
        loaded_bytes=e.loaded_bytes,
        fetched_bytes=e.fetched_bytes,
        holders=tuple(e.holders),
        error=e.error,
    )
