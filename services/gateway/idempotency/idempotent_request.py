"""Execution of one request with an Idempotency-Key, as its owner or as a follower.

Owner: the request passes through the dispatcher as any other, but the gateway records the engine
under the key before it sends the request, and the engine replies on a captured subject. At the end
the key is `done`, also if the stream broke off after the client received some of it; the key is
deleted if there is nothing to replay.

Follower: the gateway replays the captured response from its first message on. It becomes the owner
when the owner's lease expires, and continues from the owner's state: in the queue, or with the
engine that already works. If that engine may not have received the request, the gateway sends it
again under the same attempt id; an engine refuses a duplicate of what it serves.

Metering: the owner records what the request used. It may be lost between the end of the response
and this record, or between the record and the key's end. A follower that has read the response to
its end therefore waits for the key's end in the background, and takes over the key of an owner that
is gone. Records of one response have its id, so that it counts once (docs/adr/0095).

Missed and lost messages: NATS may have stored messages that the owner missed, as during a restart,
and may have lost messages that the owner received. Before another engine continues a response, the
owner therefore reads the stored messages; the engine continues where they end (docs/adr/0039).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from nats.errors import Error as NatsError

from services.gateway.adapters.engine_client import EngineClient
from services.gateway.adapters.idempotency_store import (
    LEASE_S,
    RENEW_S,
    Claim,
    ClaimLost,
    Entry,
    ExistingKey,
    IdempotencyStore,
    ResponsePart,
    store_errors_as_unavailable,
)
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.followed_usage import FollowedResponse
from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Stage
from services.gateway.idempotency.abandoned import claim_if_abandoned
from services.gateway.idempotency.missed_messages import MissedMessages
from services.gateway.idempotency.replay import REPLAY_TIMEOUT_S, Replay
from services.gateway.idempotency.store_retry import retry_store
from services.gateway.requests.active_request import ActiveRequest
from shared.contracts import subjects
from shared.errors import DeadlineExceeded, EngineFailed, IdempotencyKeyReused, ThawError, Unavailable
from shared.tasks import end

log = logging.getLogger(__name__)


def require_same_request(place: Claim | ExistingKey, request: str) -> Claim | ExistingKey:
    """Return `place` unless its key was used for another request.

    Args:
        request: Digest of the request.

    Raises:
        IdempotencyKeyReused: The key was used for another request.
    """
    if isinstance(place, ExistingKey) and place.entry.request != request:
        raise IdempotencyKeyReused()
    return place


class IdempotentRequest:
    """Drive one request from `run`; other methods are called meanwhile."""

    def __init__(
        self,
        gateway_id: str,
        store: IdempotencyStore,
        dispatcher: Dispatcher,
        engines: EngineClient,
        request: ActiveRequest,
        place: Claim | ExistingKey,
        new_entry: Entry,
        on_metered: Callable[[str], None],
        on_followed_end: Callable[[], None],
    ) -> None:
        """Start as the owner of the key if `place` is a claim, else as a follower.

        Args:
            place: The claim on the key, or the key's entry that another request owns.
            new_entry: The entry to create if the key is deleted while it is followed.
            on_metered: Called with the id of the response when the key has ended and no other
                gateway can have recorded what it used.
            on_followed_end: Called when the key of a followed response has ended: its owner has
                recorded the usage.
        """
        self._gateway_id = gateway_id
        self._store = store
        self._dispatcher = dispatcher
        self._engines = engines
        self._request = request
        self._ticket = request.ticket
        self._place = place
        self._new_entry = new_entry
        self._on_metered = on_metered
        self._on_followed_end = on_followed_end
        self._found: ExistingKey | None = None
        """The followed key, as last read; None for an owner."""
        self._claim: Claim | None = None
        self._replay = Replay(store, request)
        self._sending: asyncio.Task[None] | None = None
        self._send_lock = asyncio.Lock()
        self._attempt_reply = ""
        self._missed = MissedMessages(self._replay, request, dispatcher, self._find_live_entry)
        self._releases_key = False
        self._settled = asyncio.Event()

    async def run(self) -> None:
        """Run until the request has ended and the key records it."""
        spec = self._request.card.spec
        try:
            async with asyncio.timeout(spec.queue.timeout + spec.response_timeout):
                with store_errors_as_unavailable():
                    await self._run()
        except TimeoutError:  # of this limit: those of the store are `Unavailable`
            if not self._request.completion.is_done:
                error = DeadlineExceeded("The first request with this Idempotency-Key was not answered in time. Repeat the request")
                self._dispatcher.on_abort(self._ticket, error, time.monotonic())
        except ThawError as e:
            self._fail_here(e)
        finally:
            self._settled.set()
            await self._missed.stop()
            await self._replay.stop()

    def _fail_here(self, error: ThawError) -> None:
        """Fail the request here; its engine, if it has one, continues for the key's next owner."""
        if not self._request.completion.is_done:
            self._dispatcher.on_disowned(self._ticket, time.monotonic())
            self._request.completion.fail(error)

    async def _run(self) -> None:
        place: Claim | ExistingKey | None = self._place
        while place is not None and not self._request.completion.is_done:
            if isinstance(place, Claim):
                await self._hold_claim(place)
                return
            place = await retry_store(partial(self._follow, place))

    @property
    def metered_as(self) -> str | None:
        """Id of the response whose usage this gateway reports; None: the owner of the key does."""
        claim = self._claim
        if claim is None or claim.lost.is_set() or self._releases_key:
            return None
        return claim.entry.answer_id

    @property
    def followed(self) -> FollowedResponse | None:
        """The response of another gateway that was read to its end, and may not be recorded yet."""
        found, completion = self._found, self._request.completion
        if found is None or found.entry.state == "done" or not found.entry.reply or found.entry.reply != self._replay.subject:
            return None
        if not completion.is_done or completion.error is not None or completion.has_client_left:
            return None
        entry = found.entry
        return FollowedResponse(found.key, entry.answer_id, entry.reply, self._request.attempt.next_seq, entry.instance_id)

    # The owner.

    async def _hold_claim(self, claim: Claim) -> None:
        self._claim, self._found = claim, None
        ends = [asyncio.create_task(e.wait()) for e in (self._request.completion.done, claim.lost)]
        try:
            async with claim.renewed():
                await self._start(claim.entry)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self._request.completion.is_done:
                    await self._record_end(claim)  # while the lease is renewed: this may wait for the store
                    return
        finally:
            await end(*ends)
        self._fail_here(Unavailable("Another gateway serves this Idempotency-Key now. Repeat the request", should_retry=True))

    async def _start(self, entry: Entry) -> None:
        """Queue the request, or continue with the engine that the entry names."""
        dispatcher, now = self._dispatcher, time.monotonic()
        if not entry.reply:
            if entry.parts:
                await self._read_parts(entry)
            if not self._request.completion.is_done:
                dispatcher.on_request(self._ticket, self._request.card.spec.queue.max_waiting, time.monotonic())
            return
        dispatcher.on_adopted(self._ticket, entry.attempt_id, entry.instance_id, entry.node, now)
        self._note_instance(entry)
        self._attempt_reply = entry.reply
        if self._replay.subject != entry.reply:
            await retry_store(partial(self._replay.read, entry))
        attempt = self._request.attempt
        if attempt.refusal is not None:
            dispatcher.on_refused(self._ticket, attempt.refusal, now)
        elif attempt.engine_loss is not None:
            dispatcher.on_engine_lost(self._ticket, attempt.engine_loss, now)
        elif not self._request.completion.is_done and not await retry_store(partial(self._store.captured_messages, entry.reply)):
            message = self._request.infer_message()
            self._replay.on_stop(await self._engines.send_again(message, self._request, entry.reply))

    def _note_instance(self, entry: Entry) -> None:
        """Note the instance whose devices generate the response, if it is known."""
        route = self._dispatcher.routes.get(entry.instance_id)
        if route is not None and self._request.stats.instance is None:
            self._request.stats.instance = route.status

    async def _read_parts(self, entry: Entry) -> None:
        """Read the parts of a response whose last attempt has ended.

        Raises:
            EngineFailed: The response can neither be continued nor start again.
        """
        await retry_store(partial(self._replay.read, entry))
        if not self._request.can_resume:
            self._replay.require_restartable()

    def send(self, route: Route) -> None:
        """Record the instance that the dispatcher chose, then send the request to it."""
        self._engines.forget(self._request.attempt.id)  # late replies of the previous attempt
        self._sending = asyncio.create_task(self._send(self._ticket.attempt_id, route), name="idempotency send")

    async def _send(self, attempt_id: str, route: Route) -> None:
        try:
            async with self._send_lock:
                with store_errors_as_unavailable():
                    await self._begin_attempt(attempt_id, route)
        except ClaimLost:
            return
        except ThawError as e:
            if not self._request.completion.is_done:
                self._dispatcher.on_abort(self._ticket, e, time.monotonic())

    async def _begin_attempt(self, attempt_id: str, route: Route) -> None:
        claim, ticket = self._claim, self._ticket
        assert claim is not None
        await self._missed.stop()
        await self._replay.stop()
        if not self._is_sent_as(attempt_id):
            return
        parts = await self._parts_to_continue(claim.entry)
        if not self._is_sent_as(attempt_id):
            return  # the response was complete in the store, or the instance is gone already
        reply = subjects.keyed_reply(self._gateway_id, attempt_id)
        record = partial(
            claim.record_attempt, reply, attempt_id, ticket.instance_id or "", ticket.node, route.status.revision, parts
        )
        await retry_store(record)
        if self._is_sent_as(attempt_id):
            self._engines.forget(self._request.attempt.id)
            self._request.begin_attempt(route, time.monotonic())
            self._attempt_reply = reply
            self._engines.send(self._request.infer_message(), self._request, reply)

    def _is_sent_as(self, attempt_id: str) -> bool:
        return self._ticket.attempt_id == attempt_id and self._ticket.stage is Stage.SENT

    async def _parts_to_continue(self, before: Entry) -> tuple[ResponsePart, ...]:
        """Read the missed messages of the last attempt; return the parts that the next continues.

        Raises:
            EngineFailed: The response has begun, and cannot be continued.
        """
        parts = before.parts
        if before.reply and before.reply == self._attempt_reply:
            messages = await retry_store(partial(self._replay.read_missed, before))
            parts = (*parts, ResponsePart(reply=before.reply, messages=messages))
        if self._request.can_resume:
            return parts
        if self._ticket.is_committed and not self._request.completion.is_done:
            raise EngineFailed(f"{self._ticket.model} stopped before its response was complete, and it cannot be resumed")
        return ()

    # Messages that the live subscription missed.

    def catch_up(self) -> None:
        """Read the engine's messages from the store too; live ones may have been missed."""
        self._missed.catch_up()

    def recover_gap(self) -> bool:
        """Expect the missing messages from the store; False if it does not have them either."""
        return self._missed.recover_gap()

    def _find_live_entry(self) -> Entry | None:
        """Return the key's entry while this gateway receives the messages of the attempt in it."""
        entry = self._claim.entry if self._claim is not None else None
        if entry is None or not entry.reply or entry.reply != self._attempt_reply or not self._is_sent_as(entry.attempt_id):
            return None
        return entry

    # The end of the key.

    async def _record_end(self, claim: Claim) -> None:
        try:
            await retry_store(partial(self._write_end, claim))
        except ClaimLost:
            log.info("another gateway owned the idempotency key when its request ended")
        except (NatsError, TimeoutError) as e:
            log.warning("failed to record the end of an idempotent request", extra={"error": repr(e)})

    async def _write_end(self, claim: Claim) -> None:
        request = self._request
        messages = request.attempt.next_seq
        if self._releases_key:
            await claim.release()
        elif not self._is_worth_keeping():
            await claim.delete()
            self._on_key_ended(claim)
        elif await self._store.wait_until_captured(claim.entry.reply, messages):
            await claim.complete(messages, request.completion.error)
            self._on_key_ended(claim)
        else:
            await self._give_up_key(claim)

    def _on_key_ended(self, claim: Claim) -> None:
        if not claim.is_taken_over:  # the previous owner may have recorded the usage as well
            self._on_metered(claim.entry.answer_id)

    async def _give_up_key(self, claim: Claim) -> None:
        """Give up the key of a response of which NATS has lost messages."""
        entry = claim.entry
        part = await self._replay.stored_part(entry)
        is_resumable = self._ticket.is_resumable and self._request.completion.error is None
        log.warning(
            "messages of an idempotent response are lost; releasing its key",
            extra={"model": self._ticket.model, "stored": part.messages, "resumable": is_resumable},
        )
        if not part.messages:
            await claim.release()  # the next owner sends the same attempt again
        elif is_resumable:
            await claim.release_parts((*entry.parts, part))
        else:
            await claim.delete()

    def _is_worth_keeping(self) -> bool:
        """True if a repetition of the request shall get this response.

        Once a client has received some of a stream that broke off, a repetition replays that stream
        rather than generate another response.
        """
        completion, response = self._request.completion, self._request.response
        if completion.has_client_left:
            return False
        if completion.error is not None:
            return response.has_started and self._claim is not None and bool(self._claim.entry.reply)
        return response.passthrough is None or response.passthrough.is_cacheable

    def release_key(self, error: ThawError) -> None:
        """Release the key, and fail the request here with `error`.

        The engine continues for the gateway that the client retries on.
        """
        self._releases_key = True
        self._fail_here(error)

    # The follower.

    async def _follow(self, found: ExistingKey) -> Claim | ExistingKey | None:
        """Replay the response of another request.

        Returns:
            None once the response has been read; else the claim on the key, or the key to follow.
        """
        self._ticket.stage = Stage.FOLLOWING
        self._request.response.is_replay = True
        done = asyncio.create_task(self._request.completion.done.wait(), name="done")
        try:
            async with self._store.announce_waiter(found.key), self._store.watch(found.key) as watcher:
                place = await self._follow_changes(found, watcher, done)
        finally:
            done.cancel()
        if isinstance(place, Claim):
            self._request.response.is_replay = bool(place.entry.reply or place.entry.parts)
        elif place is None:
            self._settled.set()
            completion = self._request.completion
            if completion.error is None and not completion.has_client_left:
                await self._end_for_owner(found.key)
        return place

    async def _end_for_owner(self, key: str) -> None:
        """Wait until the key has ended; record the usage and the end if its owner is gone."""
        claim = await claim_if_abandoned(self._store, key)
        if claim is None:
            self._on_followed_end()
            return
        async with claim.renewed():
            if claim.entry.reply == self._replay.subject:
                self._claim = claim
                self._note_instance(claim.entry)
                self._request.meter()
                await self._record_end(claim)
            else:
                await claim.release()  # its owner began another attempt, which this gateway has not read
                self._on_followed_end()

    async def _follow_changes(self, found: ExistingKey, watcher: Any, done: asyncio.Task[bool]) -> Claim | ExistingKey | None:
        has_entry = False
        while True:
            timeout_s = REPLAY_TIMEOUT_S if found.entry.state == "done" else LEASE_S
            update = asyncio.create_task(watcher.updates(timeout=timeout_s), name="idempotency key")
            await asyncio.wait({done, update}, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                await end(update)
                return None
            try:
                entry = update.result()
            except TimeoutError:
                return await self._take_over(found)
            if entry is None and has_entry:
                continue
            if entry is None or entry.operation is not None:
                return await self._restart(found.key)
            has_entry = True
            self._found = found = ExistingKey(found.key, Entry.model_validate_json(entry.value), entry.revision)
            if not await self._replay.is_available(found.entry):
                await self._store.delete(found)
                return await self._restart(found.key)
            if found.entry.state == "running" and not found.entry.owner:
                return await self._take_over(found)
            if found.entry.reply and await self._replay.has_lost_parts(found.entry):
                continue  # its owner may still finish for its own client; the key's next owner starts again
            await self._replay.follow(found.entry)

    async def _take_over(self, found: ExistingKey) -> Claim | ExistingKey:
        """Claim a key whose owner stopped renewing it."""
        if found.entry.state == "done":
            raise Unavailable(
                "The response under this Idempotency-Key could not be read in time. Repeat the request", should_retry=True
            )
        if await self._replay.has_lost_parts(found.entry):
            log.warning("parts of an idempotent response are lost; generating it again", extra={"model": self._ticket.model})
            await self._store.delete(found)
            return await self._restart(found.key)
        claim = await self._store.take_over(found)
        if claim is not None:
            log.info("took over an idempotency key", extra={"instance": found.entry.instance_id, "model": self._ticket.model})
            return claim
        return require_same_request(await self._store.claim_or_get(found.key, self._new_entry), self._new_entry.request)

    async def _restart(self, key: str) -> Claim | ExistingKey:
        """Claim a key that was deleted, because its attempt failed or its response is gone."""
        self._replay.require_restartable()
        self._request.restart()
        await self._replay.stop()
        return require_same_request(await self._store.claim_or_get(key, self._new_entry), self._new_entry.request)

    # Clients.

    async def wait_until_settled(self) -> None:
        """Wait until the key records the end, so that an immediate retry finds it."""
        await self._settled.wait()

    async def client_left(self) -> None:
        """End the request once no other client waits for its response."""
        claim = self._claim
        if claim is not None:
            try:
                async with self._store.on_waiter_left(claim.key, lambda: self._cancel_unless_awaited(claim.key)):
                    while not self._request.completion.is_done:
                        await self._cancel_unless_awaited(claim.key)
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._request.completion.done.wait(), RENEW_S)
            except NatsError as e:
                log.info("failed to watch the waiters of an idempotency key", extra={"error": repr(e)})
        self._request.cancel()

    async def _cancel_unless_awaited(self, key: str) -> None:
        if not await self._store.has_waiters(key):
            self._request.cancel()
