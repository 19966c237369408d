"""Requests to engines and their streams back: one reply subscription for the whole gateway, raw NATS both ways."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from services.gateway.domain.engine_request import sent_card
from services.gateway.requests.active_request import Exchange
from shared.contracts import subjects
from shared.contracts.base import CONTRACT_VERSION
from shared.contracts.engine import DropAdapter, LoadAdapter
from shared.contracts.inference import CancelInfer
from shared.contracts.models import ModelCard
from shared.errors import PayloadTooLarge
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_NO_RESPONDERS = "503"
_PENDING_MSGS = 1_000_000
_PENDING_BYTES = 512 * 1024 * 1024
ENVELOPE_BYTES = 64 * 1024
"""More than `InferRequest` needs around its body, headers and an adapter's card included."""


class Engines:
    """Sends in the order asked, from one task, so that a cancellation never overtakes its request."""

    def __init__(self, mesh: Mesh, gateway: str) -> None:
        self._mesh = mesh
        self._gateway = gateway
        self._open: dict[str, Exchange] = {}
        self._outbox: asyncio.Queue[tuple[Exchange | None, str, bytes, str, dict[str, str] | None]] = asyncio.Queue()
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        for subject in (subjects.replies(self._gateway), subjects.keyed_replies(self._gateway)):
            subscription = await self._mesh.nc.subscribe(
                subject, cb=self._on_message, pending_msgs_limit=_PENDING_MSGS, pending_bytes_limit=_PENDING_BYTES
            )
            self._subscriptions.append(subscription)

    async def run(self) -> None:
        """Publish what is asked until cancelled."""
        while True:
            exchange, subject, payload, reply, headers = await self._outbox.get()
            try:
                await self._mesh.nc.publish(subject, payload, reply=reply, headers=headers)
            except NatsError as e:
                log.warning("could not publish", extra={"subject": subject, "error": repr(e)})
                if exchange is not None:
                    exchange.on_no_responders()

    def send(self, exchange: Exchange, reply: str | None = None) -> None:
        """Publish the request to the instance its ticket names; what comes back (on `reply`) goes to `exchange`."""
        ticket = exchange.ticket
        self.forget(exchange)
        exchange.reply_token = ticket.attempt_id
        self._open[exchange.reply_token] = exchange
        exchange.sent(time.monotonic())
        self._ask(exchange, reply or subjects.reply(self._gateway, ticket.attempt_id))

    async def ask_again(self, exchange: Exchange, reply: str) -> Callable[[], Awaitable[None]]:
        """Publish a request that a gateway which is gone may not have published; what comes back on `reply` is not taken here, but for
        NATS's own word that nobody listens. Returns what ends that."""

        async def on_message(message: Msg) -> None:
            if message.headers is not None and message.headers.get("Status") == _NO_RESPONDERS:
                exchange.on_no_responders()

        subscription = await self._mesh.nc.subscribe(reply, cb=on_message)
        self._ask(exchange, reply)
        return subscription.unsubscribe

    def _ask(self, exchange: Exchange, reply: str) -> None:
        ticket = exchange.ticket
        instance = ticket.instance_id or ""
        envelope = {
            "v": CONTRACT_VERSION,
            "kind": "infer",
            "deadline_ms": max(1, int((ticket.response_timeout - ticket.spent) * 1e3)),
            "request_id": ticket.attempt_id,
            "instance_id": instance,
            "model": ticket.model,
            **exchange.ask.envelope(),
        }
        if exchange.resume is not None:
            envelope["resume"] = exchange.resume
        # JSON goes on as it came: it has been validated, and making it anew costs more than all the rest of this.
        body = b'"body":%b' % exchange.ask.body if exchange.ask.is_json else b'"data":"%b"' % base64.b64encode(exchange.ask.body)
        payload = b"%b,%b}" % (json.dumps(envelope).encode()[:-1], body)
        if len(payload) > self._mesh.max_body:  # the tokens that are there made it so
            too_much = PayloadTooLarge(f"the request and what there is of its answer have {len(payload)} bytes")
            asyncio.get_running_loop().call_soon(exchange.on_unsendable, too_much)
            return
        headers = {"traceparent": ticket.traceparent} if ticket.traceparent else None
        self._outbox.put_nowait((exchange, subjects.infer(instance), payload, reply, headers))

    def cancel(self, exchange: Exchange) -> None:
        ticket = exchange.ticket
        message = CancelInfer(request_id=ticket.attempt_id).model_dump_json().encode()
        self._outbox.put_nowait((None, subjects.engine_control(ticket.instance_id or ""), message, "", None))

    def drop_adapter(self, instance_id: str, name: str) -> None:
        """Tell an instance that the adapter is registered no longer."""
        message = DropAdapter(name=name).model_dump_json().encode()
        self._outbox.put_nowait((None, subjects.engine_control(instance_id), message, "", None))

    def load_adapter(self, instance_id: str, adapter: ModelCard) -> None:
        """Tell an instance that starts of an adapter that requests wait for."""
        message = {
            "v": CONTRACT_VERSION,
            "kind": "load_adapter",
            "deadline_ms": LoadAdapter.usual_ms(),
            "card": sent_card(adapter),
        }
        self._outbox.put_nowait((None, subjects.engine_control(instance_id), json.dumps(message).encode(), "", None))

    def forget(self, exchange: Exchange) -> None:
        """No message of this request's present attempt is wanted any more."""
        self._open.pop(exchange.reply_token, None)

    async def _on_message(self, message: Msg) -> None:
        exchange = self._open.get(message.subject.rpartition(".")[2])
        if exchange is None:
            return
        if message.headers is not None and message.headers.get("Status") == _NO_RESPONDERS:
            self.forget(exchange)
            exchange.on_no_responders()
        else:
            exchange.on_message(message.data)
