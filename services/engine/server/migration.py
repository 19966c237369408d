"""Migration commands of an engine: list, read, prefill, yield."""

from __future__ import annotations

import asyncio
import math
import time

from services.engine.generation.prepared_prefixes import Outcome, PrepareOrder
from services.engine.server.serving import Serving
from services.engine.server.streams import Stream
from shared.contracts.migration import PrepareResume, RequestsListed, ResumePrepared, TokensRead
from shared.errors import Conflict, InstanceDraining, InvalidRequest, NotFound, ThawError


class EngineMigration:
    """Runs on the event loop."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def list(self) -> RequestsListed:
        return RequestsListed(requests=tuple(s.running() for s in self._serving.streams.values() if s.is_movable))

    def _stream(self, request_id: str) -> Stream:
        stream = self._serving.streams.get(request_id)
        if stream is None:
            raise NotFound(f"Request {request_id} is not running on this instance")
        return stream

    def read(self, request_id: str) -> TokensRead:
        """Raises `NotFound`."""
        stream = self._stream(request_id)
        return TokensRead(
            running=stream.running(), prompt_token_ids=stream.prompts(), choices=stream.choices(), adapter=stream.adapter
        )

    def yield_(self, request_id: str) -> None:
        """Stop a request, which another engine will resume.

        Raises:
            NotFound: The request is not running here.
            Conflict: The request cannot be resumed elsewhere.
        """
        stream = self._stream(request_id)
        if reason := stream.running().fixed:
            raise Conflict(reason)
        self._serving.yield_(stream)

    async def prepare(self, order: PrepareResume) -> ResumePrepared:
        """Prefill the sequences of a request that will be resumed here.

        Raises:
            Conflict: The weights have another revision.
            InsufficientMemory: The sequences do not fit.
            InstanceDraining: The engine accepts no requests.
        """
        serving = self._serving
        if serving.reader is None or serving.batcher is None or serving.draining:
            raise InstanceDraining
        serving.reader.check_revision(order.revision)
        if not order.sequences or not all(order.sequences):
            raise InvalidRequest("There are no tokens to compute", param="sequences")
        serving.reader.check_sequences(order.sequences)
        begun, loop = time.monotonic(), asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not done.done():
                done.set_result(outcome)

        def on_done(outcome: Outcome) -> None:
            loop.call_soon_threadsafe(settle, outcome)

        card, adapter = order.adapter, None
        if card is not None:
            if serving.adapters is None:
                raise InvalidRequest("This engine takes no LoRA adapters", param="adapter")
            adapter = await serving.adapters.acquire(card)
        try:
            serving.batcher.prepare(
                PrepareOrder(
                    order.prepared,
                    order.sequences,
                    adapter,
                    card.info.revision if card is not None else "",
                    order.keep_ms / 1e3,
                    order.deadline_ms / 1e3,
                    on_done,
                    order.within_ms / 1e3 if order.within_ms is not None else math.inf,
                )
            )
            outcome = await done
        finally:
            if card is not None and serving.adapters is not None:
                serving.adapters.release(card.info.revision)
        if isinstance(outcome, ThawError):
            raise outcome
        return ResumePrepared(tokens=outcome.tokens, took_ms=(time.monotonic() - begun) * 1e3, left=outcome.left)

    def forget(self, name: str) -> None:
        if self._serving.batcher is not None:
            self._serving.batcher.discard_prepared(name)
