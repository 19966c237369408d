"""One request's conversation with an engine: numbered messages in, whatever its sink makes of them out."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from services.gateway.domain.ask import Ask
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Ticket
from services.gateway.relay import Relay
from services.gateway.sink import Diverged, Key, Sink
from shared.contracts.base import ErrorBody
from shared.contracts.inference import (
    Answered,
    EmbeddingsFinished,
    InferEnd,
    InferFinished,
    InferRaw,
    InferResponse,
    InferStarted,
    Usage,
)
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceStatus
from shared.contracts.phases import PhaseSpan
from shared.errors import Conflict, EngineFailed, InstanceDraining, ThawError, Unreachable, from_body

_LARGEST_WHOLE = 256 * 1024 * 1024
"""Bytes of an answer that is kept until it is whole."""


_LAST: dict[str, type[Answered]] = {"finished": InferFinished, "embeddings": EmbeddingsFinished, "raw": InferRaw, "end": InferEnd}


@dataclass(slots=True)
class Heard:
    """Phases that a message carried, and when it came."""

    at: float
    phases: tuple[PhaseSpan, ...]


class Exchange:
    """Everything about one request between its validation and its record. Only the gateway's loop touches it.

    An engine answers in tokens, of which `sink` makes the answer, or in HTTP's form, which is passed on by `relay`. `told`: the
    client has got some of the answer.
    """

    def __init__(
        self,
        ticket: Ticket,
        card: ModelCard,
        ask: Ask,
        sink: Sink,
        dispatcher: Dispatcher,
        buffer_limit: int,
    ) -> None:
        self.ticket = ticket
        self.card = card
        self.ask = ask
        self.sink = sink
        self.relay: Relay | None = None
        self.told = False
        self.error: ThawError | None = None
        self.ended = False
        self.gone = False
        self.over = asyncio.Event()
        self.key: Key | None = None
        self.replayed = False
        self.refusal: ThawError | None = None
        self.lost: ThawError | None = None
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self.usage = Usage(prompt_tokens=0)
        self.ignored: tuple[str, ...] = ()
        self.heard: list[Heard] = []
        self.instance: InstanceStatus | None = None
        self.cold_ready_at: float | None = None
        self.reply_token = ""
        self._dispatcher = dispatcher
        self._buffer_limit = buffer_limit
        self._seq = 0
        self._waiter: asyncio.Future[None] | None = None

    # Towards the engine.

    def sent(self, now: float) -> None:
        """A (new) attempt begins: note the instance, and the start that the request waited for."""
        self.restart()
        route = self._dispatcher.routes.get(self.ticket.instance_id or "")
        if route is None:
            return
        self.instance = route.status
        self.cold_ready_at = None
        if route.ready_since is not None and route.ready_since > self.ticket.arrived:
            self.cold_ready_at = route.ready_since
            self.heard.append(Heard(route.ready_since, route.start_phases))

    def restart(self) -> None:
        """Expect an answer from its first message on."""
        self._seq = 0
        self.refusal = self.lost = None
        self.relay = None
        self.first_at = self.first_at if self.told else None
        self.sink.reset()
        self.heard.clear()

    @property
    def received(self) -> int:
        """Messages of the present attempt that have been taken."""
        return self._seq

    # From the engine.

    def on_message(self, data: bytes) -> None:
        try:
            self._take(from_json(data))
        except Diverged as e:
            self._break(EngineFailed(f"{self.card.name} stopped while answering; its answer could not be continued: {e}"))
        except (ValueError, KeyError, TypeError, ValidationError) as e:
            self._break(EngineFailed(f"{self.card.name} sent a message that cannot be understood: {type(e).__name__}"))

    def on_no_responders(self) -> None:
        where = self.ticket.instance_id
        self._dispatcher.on_refused(self.ticket, Unreachable(f"nobody answers for instance {where}"), time.monotonic())

    def _take(self, message: dict[str, Any]) -> None:
        if self.ended:
            return
        now = time.monotonic()
        if self.key is not None and (message["seq"] < self._seq or _repeated(message)):
            return
        if message["seq"] != self._seq:
            self._break(EngineFailed(f"messages of {self.card.name} were lost: number {self._seq} is missing"))
            return
        self._seq += 1
        self._dispatcher.on_heard(self.ticket, now)
        kind = message["kind"]
        if kind == "chunk":
            self._chunk(message, now)
        elif kind == "started":
            started = InferStarted.model_validate(message)
            self.heard.append(Heard(now, started.phases))
            self.usage = Usage(prompt_tokens=started.prompt_tokens)
            self.ignored = started.ignored
            self.sink.started(started)
        elif kind == "data":
            self._data(message, now)
        elif kind == "response":
            self._respond(InferResponse.model_validate(message), now)
        elif kind == "failed":
            self._failed(from_body(ErrorBody.model_validate(message["error"])), now, lost=message.get("engine_lost") is True)
        else:
            self._finished(message, now)

    def _chunk(self, message: dict[str, Any], now: float) -> None:
        sink = self.sink
        if self.first_at is None:
            self._first(message, now)
            self.ticket.begun = sink.streams and not sink.repeatable
        sink.chunk(message["choices"])
        if sink.pending > self._buffer_limit and not self.replayed:
            self._unread()
        else:
            self.wake()

    def _first(self, message: dict[str, Any], now: float) -> None:
        self.first_at = now
        self.heard.append(Heard(now, _phases(message.get("phases"))))

    def _unread(self) -> None:
        self._break(EngineFailed("the client reads more slowly than the model writes; its buffer is full", should_retry=False))

    def _respond(self, head: InferResponse, now: float) -> None:
        if self.relay is not None or self.told:
            raise ValueError("an answer has one head, before its first bytes")
        self.heard.append(Heard(now, head.phases))
        self.relay = Relay(head)

    def _data(self, message: dict[str, Any], now: float) -> None:
        relay = self.relay
        if relay is None:
            raise ValueError("data came before the answer's head")
        if self.first_at is None:
            self._first(message, now)
        relay.add(base64.b64decode(message["data"], validate=True))
        if relay.streams:
            self.ticket.begun = True
            if relay.size > self._buffer_limit and not self.replayed:
                self._unread()
            else:
                self.wake()
        elif relay.size > _LARGEST_WHOLE:
            self._break(EngineFailed(f"the answer of {self.card.name} is over {_LARGEST_WHOLE} bytes", should_retry=False))

    def _finished(self, message: dict[str, Any], now: float) -> None:
        last = _LAST[message["kind"]].model_validate(message)
        self.usage = last.usage
        if self.first_at is None:
            self.first_at = now
        if isinstance(last, InferRaw):
            self._respond(InferResponse(status=200), now)
        if self.relay is None:
            self.sink.finished(last)
        elif isinstance(last, InferRaw):
            self.relay.add(json.dumps(last.body, ensure_ascii=False, separators=(",", ":")).encode())
        elif not isinstance(last, InferEnd):
            raise ValueError("an answer in HTTP's form ended as one of tokens")
        self._end(now)
        self._dispatcher.on_finished(self.ticket, now)

    def _failed(self, error: ThawError, now: float, *, lost: bool) -> None:
        if isinstance(error, InstanceDraining):
            self.refusal = error
            self._dispatcher.on_refused(self.ticket, error, now)
            return
        if lost:
            self.lost = error
            self._dispatcher.on_engine_lost(self.ticket, error, now)
            return
        self._dispatcher.on_finished(self.ticket, now)
        self.fail(error)

    def _break(self, error: ThawError) -> None:
        if not self.ended:
            self._dispatcher.on_broken(self.ticket, error, time.monotonic())

    # Towards the client.

    def fail(self, error: ThawError) -> None:
        if not self.ended:
            self.error = error
            self._end(time.monotonic())

    async def client_left(self) -> None:
        """The client is gone; whether that ends the request is for its Idempotency-Key to say, if it has one."""
        if self.key is not None:
            await self.key.client_left()
        else:
            self.leave()

    async def settled(self) -> None:
        """Wait until a failed request may be repeated."""
        if self.key is not None:
            await self.key.settled()

    def leave(self) -> None:
        """The client is gone: leave the queue, or have the engine stop."""
        if not self.ended:
            self.gone = True
            self._dispatcher.on_cancel(self.ticket, time.monotonic())
            self._end(time.monotonic())

    def _end(self, now: float) -> None:
        self.ended, self.ended_at = True, now
        self.over.set()
        self.wake()

    def wake(self) -> None:
        """Let whoever writes the answer look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def changed(self) -> None:
        """Wait for `wake`. One waiter at a time; state is to be looked at before and after."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def _phases(raw: list[Any] | None) -> tuple[PhaseSpan, ...]:
    return tuple(PhaseSpan.model_validate(p) for p in raw or ())


def _repeated(message: dict[str, Any]) -> bool:
    """Whether an engine says that it is at this request already: it was asked twice, to be sure."""
    return bool(message["kind"] == "failed" and message["error"]["code"] == Conflict.code)
