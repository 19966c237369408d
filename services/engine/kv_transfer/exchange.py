"""Both ends of transfers of one engine, and the orders that use them. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from services.engine.generation.prepared_prefixes import Computed, Outcome, PrepareOrder
from services.engine.generation.request import GenerationRequest
from services.engine.kv_transfer.destination import MAX_TRANSFERS, STALL_S, Received, Transfer, Wanted
from services.engine.kv_transfer.source import KvSource, Transferring
from shared.contracts.kv_transfer import KvOffer
from shared.errors import ThawError

log = logging.getLogger(__name__)
REST_WITHIN_S = 0.5
"""Seconds for the tokens that the source generated last. The client waits meanwhile."""
_KEEP_S = 30.0
RECEIVED_KEPT = 1024


class Preparing(Transferring, Protocol):
    """The engine's batcher."""

    def prepare(self, order: PrepareOrder) -> None: ...


class Destination(Protocol):
    """Receives keys and values: `KvDestination`, or that of a group."""

    def has_source(self, name: str) -> bool:
        """True if more can be received for the sequences of this name."""
        ...

    def receive(self, transfer: Transfer, wanted: list[Wanted], offer: KvOffer | None) -> Received:
        """Receive what the sequences lack, on the calling thread. Never raises.

        Args:
            transfer: The order.
            wanted: Its sequences.
            offer: The source; None: that of the last call for this name.
        """
        ...

    def forget(self, name: str) -> None:
        """Close the connections for this name."""
        ...

    def close(self) -> None: ...


async def carry_out(batcher: Preparing, order: PrepareOrder) -> Outcome:
    """Have `order` carried out, and return its outcome. Its own `on_done` is replaced."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: Outcome) -> None:
        if not done.done():
            done.set_result(outcome)

    def on_done(outcome: Outcome) -> None:
        loop.call_soon_threadsafe(settle, outcome)

    batcher.prepare(replace(order, on_done=on_done))
    return await done


class KvExchange:
    """The transfers of one engine."""

    def __init__(self, source: KvSource, destination: Destination) -> None:
        self.source, self._destination = source, destination
        self._threads = ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="kv-in")
        self._received: dict[str, Received] = {}

    async def prepare(
        self, batcher: Preparing, order: PrepareOrder, offer: KvOffer | None, choices: Iterable[int], stall_s: float | None = None
    ) -> tuple[Outcome, Received]:
        """Receive the sequences of `order`, and have the rest computed if it wants that.

        Args:
            batcher: The engine's.
            order: Its `on_done`, `on_accepted` and `cache_salt` are replaced.
            offer: Of the source; None: the one of the last order of this name.
            choices: The choice of each sequence.
            stall_s: Seconds that the source may send nothing; None: `STALL_S`.
        """
        loop, wanted_choices = asyncio.get_running_loop(), tuple(choices)
        receiving: list[asyncio.Future[Received]] = []

        def receive(number: int, computed: tuple[int, ...]) -> Received:
            each = zip(wanted_choices, order.sequences, computed, strict=True)
            wanted = [Wanted(choice, tokens, has, index) for index, (choice, tokens, has) in enumerate(each)]
            silence_s = STALL_S if stall_s is None else stall_s
            transfer = Transfer(order.name, number, order.variant, order.reply_within_s, silence_s)
            try:
                return self._destination.receive(transfer, wanted, offer)
            finally:
                batcher.transfer(lambda t: t.end_receiving(number))

        def begin(number: int, computed: tuple[int, ...]) -> None:
            receiving.append(loop.run_in_executor(self._threads, receive, number, computed))

        def on_accepted(number: int, computed: tuple[int, ...]) -> None:
            loop.call_soon_threadsafe(begin, number, computed)

        accepted = replace(order, on_accepted=on_accepted)
        if offer is not None:
            accepted = replace(accepted, cache_salt=offer.cache_salt)
        outcome = await carry_out(batcher, accepted)
        received = await receiving[0] if receiving and isinstance(outcome, Computed) else Received()
        self._note(order.name, received)
        return outcome, received

    def has_rest(self, request: GenerationRequest) -> bool:
        """True if the source of a resumed request may still have tokens that it lacks."""
        return bool(request.prepared) and self._destination.has_source(request.prepared)

    async def receive_rest(self, batcher: Preparing, request: GenerationRequest) -> None:
        """Receive the tokens that the source has generated since the last order.

        Keys and values that do not arrive in time are computed with the request.
        """
        unfinished = [c for c in request.choices if c.resume_state is None or c.resume_state.unsent.finish_reason is None]
        sequences = [(*c.prompt, *(c.resume_state.tokens if c.resume_state is not None else ())) for c in unfinished]
        order = PrepareOrder(
            request.prepared,
            tuple(sequences),
            request.adapter,
            request.variant,
            _KEEP_S,
            _KEEP_S,
            lambda outcome: None,
            REST_WITHIN_S,
            computes=False,
            cache_salt=request.share.flow,
        )
        try:
            async with asyncio.timeout(2 * REST_WITHIN_S):
                await self.prepare(batcher, order, None, [c.index for c in unfinished], REST_WITHIN_S)
        except (TimeoutError, ThawError):
            pass
        except Exception:  # a boundary to the device: the request must get a response
            log.exception("failed to receive the rest of a request", extra={"request_id": request.request_id})
        finally:
            self._destination.forget(request.prepared)

    def take_received(self, name: str) -> Received:
        """Return what was received for a resumed request, in all orders of this name."""
        return self._received.pop(name, Received())

    def _note(self, name: str, more: Received) -> None:
        old = self._received.pop(name, Received())
        self._received[name] = Received(old.tokens + more.tokens, old.nbytes + more.nbytes, old.took_ms + more.took_ms)
        while len(self._received) > RECEIVED_KEPT:
            del self._received[next(iter(self._received))]

    def forget(self, name: str) -> None:
        """Drop the connection and the figures of a request that is not resumed here."""
        self._received.pop(name, None)
        self._destination.forget(name)

    async def close(self) -> None:
        """Close all connections."""
        self._destination.close()
        await self.source.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
