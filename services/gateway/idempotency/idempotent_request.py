"""One request with an Idempotency-Key: it generates for all who bring the key, or follows the one who does, or takes over from him.

Owner. Its request goes through the dispatcher as any other, but the engine is written down before it is asked, and answers on a captured
subject. At the end the key is `done`, also if a stream broke off of which the client has a part; it is forgotten if there is nothing to give
again.
Follower. Reads the captured answer from its first message on. It becomes the owner when the owner's lease runs out, and goes on where
that one was: in the queue, or with the engine that works already. An engine that may not have got the request is asked again under the
same name: it refuses a repetition of what it is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from nats.errors import Error as NatsError

from services.gateway.adapters.engine_client import Engines
from services.gateway.adapters.idempotency_store import (
    LEASE_S,
    RENEW_S,
    Claim,
    ClaimLost,
    Entry,
    Found,
    IdempotencyStore,
    Part,
    is_away,
    reachable,
)
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Stage
from services.gateway.idempotency.replay import REPLAY_S, Listener
from services.gateway.requests.active_request import Exchange
from shared.contracts import subjects
from shared.errors import DeadlineExceeded, IdempotencyKeyReused, ThawError, Unavailable
from shared.tasks import end

log = logging.getLogger(__name__)
T = TypeVar("T")
_AWAY_S, _ASK_AGAIN_S = 60.0, 0.5


def joinable(place: Claim | Found, request: str) -> Claim | Found:
    """`place`, unless it is another request's: then raises `IdempotencyKeyReused`."""
    if isinstance(place, Found) and place.entry.request != request:
        raise IdempotencyKeyReused()
    return place


class Keyed:
    """Drives one exchange from `run`; the others of its methods are called while that runs."""

    def __init__(
        self,
        gateway_id: str,
        store: IdempotencyStore,
        dispatcher: Dispatcher,
        engines: Engines,
        exchange: Exchange,
        place: Claim | Found,
        fresh: Entry,
    ) -> None:
        """`fresh`: the entry to make should the key be forgotten while it is followed."""
        self._gateway_id = gateway_id
        self._store = store
        self._dispatcher = dispatcher
        self._engines = engines
        self._exchange = exchange
        self._ticket = exchange.ticket
        self._place = place
        self._fresh = fresh
        self._claim: Claim | None = None
        self._listener = Listener(store, exchange)
        self._sending: asyncio.Task[None] | None = None
        self._handing_over = False
        self._settled = asyncio.Event()

    async def run(self) -> None:
        """Until the exchange has ended and the key says so."""
        spec = self._exchange.card.spec
        try:
            async with asyncio.timeout(spec.queue.timeout + spec.response_timeout) as limit:
                with reachable():
                    await self._run()
        except ThawError as e:
            late = DeadlineExceeded("the first request with this Idempotency-Key was not answered in time")
            self._exchange.fail(late if limit.expired() else e)
        finally:
            self._settled.set()
            await self._listener.stop()

    async def _run(self) -> None:
        place: Claim | Found | None = self._place
        while place is not None and not self._exchange.ended:
            place = await (self._own(place) if isinstance(place, Claim) else self._patiently(partial(self._follow, place)))

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask again while the store is away, for `_AWAY_S` at most: a restart of NATS ends no answer. Raises what `ask` raises."""
        until = time.monotonic() + _AWAY_S
        while True:
            try:
                return await ask()
            except Exception as e:
                if not is_away(e) or time.monotonic() > until:
                    raise
                log.info("the store of idempotency keys is away; asking again", extra={"error": repr(e)})
            await asyncio.sleep(_ASK_AGAIN_S)

    # The owner.

    async def _own(self, claim: Claim) -> None:
        self._claim = claim
        renewing = asyncio.create_task(claim.renew_forever(), name="idempotency lease")
        ends = [asyncio.create_task(e.wait()) for e in (self._exchange.over, claim.lost)]
        try:
            await self._begin(claim.entry)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(renewing, *ends)
        if self._exchange.ended:
            await self._settle(claim)
            return
        self._dispatcher.on_disowned(self._ticket, time.monotonic())
        self._exchange.fail(
            Unavailable("another gateway answers for this Idempotency-Key now; repeat the request", should_retry=True)
        )

    async def _begin(self, entry: Entry) -> None:
        dispatcher, now = self._dispatcher, time.monotonic()
        if not entry.reply:
            dispatcher.on_request(self._ticket, self._exchange.card.spec.queue.max_waiting, now)
            return
        dispatcher.on_adopted(self._ticket, entry.attempt_id, entry.instance_id, entry.node, now)
        if self._listener.heard != entry.reply:
            await self._patiently(partial(self._listener.listen, entry))
        if self._exchange.refusal is not None:
            dispatcher.on_refused(self._ticket, self._exchange.refusal, now)
        elif self._exchange.lost is not None:
            dispatcher.on_engine_lost(self._ticket, self._exchange.lost, now)
        elif not self._exchange.ended and not await self._patiently(partial(self._store.stored, entry.reply)):
            self._listener.also_end(await self._engines.ask_again(self._exchange, entry.reply))

    def send(self) -> None:
        """The dispatcher has chosen an instance: write that down, then ask it. What the one before may still say comes too late."""
        self._engines.forget(self._exchange)
        self._sending = asyncio.create_task(self._send(self._ticket.attempt_id), name="idempotency send")

    async def _send(self, attempt_id: str) -> None:
        assert self._claim is not None
        await self._listener.stop()
        reply, ticket, before = subjects.keyed_reply(self._gateway_id, attempt_id), self._ticket, self._claim.entry
        parts = (*before.parts, Part(reply=before.reply, messages=self._exchange.received)) if self._exchange.continues else ()
        route = self._dispatcher.routes.get(ticket.instance_id or "")
        revision = route.status.revision if route is not None else ""
        try:
            with reachable():
                entry = partial(self._claim.sending, reply, attempt_id, ticket.instance_id or "", ticket.node, revision, parts)
                await self._patiently(entry)
        except ClaimLost:
            return
        except Unavailable as e:
            if not self._exchange.ended:
                self._dispatcher.on_broken(self._ticket, e, time.monotonic())
            return
        if self._ticket.attempt_id == attempt_id and self._ticket.stage is Stage.SENT:
            self._engines.send(self._exchange, reply)

    async def _settle(self, claim: Claim) -> None:
        try:
            await self._patiently(partial(self._write_end, claim))
        except ClaimLost:
            log.info("an idempotency key was another gateway's when its request ended")
        except (NatsError, TimeoutError) as e:
            log.warning("the end of a request with an idempotency key could not be stored", extra={"error": repr(e)})

    async def _write_end(self, claim: Claim) -> None:
        exchange = self._exchange
        if self._handing_over:
            await claim.hand_over()
        elif not self._worth_keeping():
            await claim.drop()
        elif await self._store.until_stored(claim.entry.reply, exchange.received):
            await claim.done(exchange.received, exchange.error)

    def _worth_keeping(self) -> bool:
        """An answer is; and what a client has got of a stream that broke off: a repetition is to find that, and not another answer."""
        exchange = self._exchange
        if exchange.gone:
            return False
        if exchange.error is not None:
            return exchange.told and self._claim is not None and bool(self._claim.entry.reply)
        return exchange.relay is None or exchange.relay.kept

    def hand_over(self, error: ThawError) -> None:
        """This gateway ends; the engine goes on for the one that the client turns to next."""
        self._handing_over = True
        self._dispatcher.on_disowned(self._ticket, time.monotonic())
        self._exchange.fail(error)

    # The follower.

    async def _follow(self, found: Found) -> Claim | Found | None:
        """Until the answer has been read (None), or the key is free or ours."""
        self._ticket.stage = Stage.FOLLOWING
        self._exchange.replayed = True
        over = asyncio.create_task(self._exchange.over.wait(), name="over")
        try:
            async with self._store.waiting(found.key), self._store.watching(found.key) as watcher:
                place = await self._follow_changes(found, watcher, over)
        finally:
            over.cancel()
        if isinstance(place, Claim):
            self._exchange.replayed = bool(place.entry.reply)
        return place

    async def _follow_changes(self, found: Found, watcher: Any, over: asyncio.Task[bool]) -> Claim | Found | None:
        seen = False
        while True:
            patience = REPLAY_S if found.entry.state == "done" else LEASE_S
            update = asyncio.create_task(watcher.updates(timeout=patience), name="idempotency key")
            await asyncio.wait({over, update}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                await end(update)
                return None
            try:
                entry = update.result()
            except TimeoutError:
                return await self._take_over(found)
            if entry is None and seen:
                continue
            if entry is None or entry.operation is not None:
                return await self._anew(found.key)
            seen = True
            found = Found(found.key, Entry.model_validate_json(entry.value), entry.revision)
            if not await self._listener.there(found.entry):
                await self._store.forget(found)
                return await self._anew(found.key)
            if found.entry.state == "running" and not found.entry.owner:
                return await self._take_over(found)
            await self._listener.follow(found.entry)

    async def _take_over(self, found: Found) -> Claim | Found:
        if found.entry.state == "done":
            raise Unavailable("the answer to this Idempotency-Key could not be read in time", should_retry=True)
        claim = await self._store.take_over(found)
        if claim is not None:
            log.info("took over an idempotency key", extra={"instance": found.entry.instance_id, "model": self._ticket.model})
            return claim
        return joinable(await self._store.find(found.key, self._fresh), self._fresh.request)

    async def _anew(self, key: str) -> Claim | Found:
        """The key has been forgotten: its attempt failed."""
        self._listener.require_unbegun()
        self._exchange.restart()
        await self._listener.stop()
        return joinable(await self._store.find(key, self._fresh), self._fresh.request)

    # Clients.

    async def settled(self) -> None:
        """Wait until the key says how the request ended, so that a client that comes back at once finds it so."""
        await self._settled.wait()

    async def client_left(self) -> None:
        """End the exchange; but an answer that others wait for is finished."""
        claim = self._claim
        if claim is not None:
            try:
                async with self._store.told_of_leaving(claim.key, lambda: self._leave_alone(claim.key)):
                    while not self._exchange.ended:
                        await self._leave_alone(claim.key)
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._exchange.over.wait(), RENEW_S)
            except NatsError as e:
                log.info("could not hear who waits for an idempotency key", extra={"error": repr(e)})
        self._exchange.leave()

    async def _leave_alone(self, key: str) -> None:
        if not await self._store.anybody_waits(key):
            self._exchange.leave()
