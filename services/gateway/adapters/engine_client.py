"""Transport between the gateway and engines, on raw NATS.

One reply subscription serves all requests of the gateway. One task publishes in the order of the
calls, so that a cancellation never overtakes its request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from services.gateway.domain.engine_request import engine_card
from services.gateway.requests.infer_message import InferMessage
from shared.contracts import subjects
from shared.contracts.base import CONTRACT_VERSION
from shared.contracts.engine import DropAdapter, LoadAdapter
from shared.contracts.inference import CancelInfer
from shared.contracts.models import ModelCard
from shared.errors import PayloadTooLarge, ThawError
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_NO_RESPONDERS = "503"
_PENDING_MSGS = 1_000_000
_PENDING_BYTES = 512 * 1024 * 1024
ENVELOPE_BYTES = 64 * 1024
"""Upper bound of an `InferRequest` without its body: headers and a LoRA adapter's card included."""


class ReplyReceiver(Protocol):
    """Receiver of the replies to one request."""

    def on_message(self, data: bytes) -> None: ...
    def on_no_responders(self) -> None:
        """No engine listens on the instance's subject."""

    def on_unsendable(self, error: ThawError) -> None:
        """The request exceeds the size of a NATS message."""


class _Outgoing(NamedTuple):
    subject: str
    payload: bytes
    reply: str = ""
    headers: dict[str, str] | None = None
    receiver: ReplyReceiver | None = None


class EngineClient:
    """Send requests and commands to instances, and route replies to their requests."""

    def __init__(self, mesh: Mesh, gateway_id: str) -> None:
        self._mesh = mesh
        self._gateway_id = gateway_id
        self._receivers: dict[str, ReplyReceiver] = {}
        self._outbox: asyncio.Queue[_Outgoing] = asyncio.Queue()
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        for subject in (subjects.replies(self._gateway_id), subjects.keyed_replies(self._gateway_id)):
            subscription = await self._mesh.nc.subscribe(
                subject, cb=self._on_message, pending_msgs_limit=_PENDING_MSGS, pending_bytes_limit=_PENDING_BYTES
            )
            self._subscriptions.append(subscription)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            outgoing = await self._outbox.get()
            try:
                await self._mesh.nc.publish(outgoing.subject, outgoing.payload, reply=outgoing.reply, headers=outgoing.headers)
            except NatsError as e:
                log.warning("failed to publish to an engine", extra={"subject": outgoing.subject, "error": repr(e)})
                if outgoing.receiver is not None:
                    outgoing.receiver.on_no_responders()

    def send(self, message: InferMessage, receiver: ReplyReceiver, reply: str | None = None) -> None:
        """Send a request; its replies go to `receiver` until `forget`.

        Args:
            reply: Subject of the replies; None: the gateway's own subject for the attempt.
        """
        self._receivers[message.attempt_id] = receiver
        self._publish(message, receiver, reply or subjects.reply(self._gateway_id, message.attempt_id))

    async def send_again(self, message: InferMessage, receiver: ReplyReceiver, reply: str) -> Callable[[], Awaitable[None]]:
        """Repeat a request that a gateway which crashed may not have sent.

        The receiver reads the replies elsewhere; it only learns here if no engine listens.

        Returns:
            A function that ends the subscription.
        """

        async def on_message(message: Msg) -> None:
            if message.headers is not None and message.headers.get("Status") == _NO_RESPONDERS:
                receiver.on_no_responders()

        subscription = await self._mesh.nc.subscribe(reply, cb=on_message)
        self._publish(message, receiver, reply)
        return subscription.unsubscribe

    def _publish(self, message: InferMessage, receiver: ReplyReceiver, reply: str) -> None:
        if len(message.payload) > self._mesh.max_body:  # the tokens to resume from exceed the limit
            error = PayloadTooLarge(
                f"The request and the response so far have {len(message.payload)} bytes, and a message may have "
                f"{self._mesh.max_body}. Send a shorter prompt"
            )
            asyncio.get_running_loop().call_soon(receiver.on_unsendable, error)
            return
        headers = {"traceparent": message.traceparent} if message.traceparent else None
        self._outbox.put_nowait(_Outgoing(subjects.infer(message.instance_id), message.payload, reply, headers, receiver))

    def cancel(self, instance_id: str, attempt_id: str) -> None:
        """Have the instance stop working on the attempt."""
        self._command(instance_id, CancelInfer(request_id=attempt_id).model_dump_json().encode())

    def drop_adapter(self, instance_id: str, name: str) -> None:
        """Have the instance unload a LoRA adapter that is no longer registered."""
        self._command(instance_id, DropAdapter(name=name).model_dump_json().encode())

    def load_adapter(self, instance_id: str, adapter: ModelCard) -> None:
        """Have an instance that is starting load a LoRA adapter."""
        message = {
            "v": CONTRACT_VERSION,
            "kind": "load_adapter",
            "deadline_ms": LoadAdapter.usual_ms(),
            "card": engine_card(adapter),
        }
        self._command(instance_id, json.dumps(message).encode())

    def _command(self, instance_id: str, payload: bytes) -> None:
        self._outbox.put_nowait(_Outgoing(subjects.engine_control(instance_id), payload))

    def forget(self, attempt_id: str) -> None:
        """Drop the replies of an attempt from now on."""
        self._receivers.pop(attempt_id, None)

    async def _on_message(self, message: Msg) -> None:
        attempt_id = message.subject.rpartition(".")[2]
        receiver = self._receivers.get(attempt_id)
        if receiver is None:
            return
        if message.headers is not None and message.headers.get("Status") == _NO_RESPONDERS:
            self.forget(attempt_id)
            receiver.on_no_responders()
        else:
            receiver.on_message(message.data)
