"""One request's conversation with an engine: numbered messages in, whatever its sink makes of them out."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from opentelemetry.trace import SpanContext
from pydantic import ValidationError
from pydantic_core import from_json

from services.gateway.domain.ask import Ask
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Ticket
from services.gateway.made import Made
from services.gateway.move import Move
from services.gateway.relay import Relay
from services.gateway.sink import Diverged, Key, Sink
from shared.contracts.base import ErrorBody
from shared.contracts.inference import (
    RESUME,
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
from shared.errors import Conflict, EngineFailed, InstanceDraining, NotFound, ThawError, Unavailable, Unreachable, from_body

_LARGEST_WHOLE = 256 * 1024 * 1024
"""Bytes of an answer that is kept until it is whole."""


_LAST: dict[str, type[Answered]] = {"finished": InferFinished, "embeddings": EmbeddingsFinished, "raw": InferRaw, "end": InferEnd}


@dataclass(slots=True)
class Handover:
    """The request went on at another instance. `since`: when the last was heard of the one before; None: nothing. `pause_ms`: until
    the first of the next."""

    kind: Literal["move", "failover"]
    source: str
    to: str
    tokens: int
    since: float | None
    at: float
    migration_id: str | None = None
    link: SpanContext | None = None
    pause_ms: float | None = None


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
        self.made = Made()
        self.resume: dict[str, Any] | None = None
        self.move: Move | None = None
        self.handovers: list[Handover] = []
        self.on_waiting: Callable[[], None] | None = None
        self.chunk_at = 0.0
        self.sent_at = 0.0
        self.fence = 0
        self._losses = 0
        self._dispatcher = dispatcher
        self._buffer_limit = buffer_limit
        self._seq = 0
        self._progressed = False
        self.instance_id = ""
        self.revision = ""
        self._waiter: asyncio.Future[None] | None = None

    # Towards the engine.

    def sent(self, now: float) -> None:
        """A (new) attempt begins: note the instance, and the start that the request waited for."""
        move = self.move if self.move is not None and self.move.to == self.ticket.instance_id else None
        self.resume = self._resume(move.prepared if move is not None else "")
        self._note_handover(move, now)
        if move is not None:
            move.left.set()
        if self.resume is None:
            self.restart()
            self.sent_at = now
        else:
            self._go_on()
        route = self._dispatcher.routes.get(self.ticket.instance_id or "")
        if route is None:
            return
        self.revision = route.status.revision
        if self.resume is not None:
            return
        self.instance = route.status
        self.cold_ready_at = None
        if route.ready_since is not None and route.ready_since > self.ticket.arrived:
            self.cold_ready_at = route.ready_since
            self.heard.append(Heard(route.ready_since, route.start_phases))

    def _note_handover(self, move: Move | None, now: float) -> None:
        """Where the request had got somewhere and goes on, or begins anew, somewhere else."""
        ticket, source = self.ticket, self.instance_id
        self.instance_id = ticket.instance_id or ""
        if not source or (move is None and self.resume is None and ticket.losses == self._losses):
            return
        self._losses = ticket.losses
        if self.handovers and self.handovers[-1].pause_ms is None:
            source = self.handovers.pop().source  # it did not come about
        tokens = self.made.tokens if self.resume is not None else 0
        handover = Handover(
            "move" if move is not None else "failover", source, self.instance_id, tokens, self.chunk_at or None, now
        )
        if move is not None:
            handover.migration_id, handover.link = move.migration_id, move.link
        self.handovers.append(handover)

    def _resume(self, prepared: str = "") -> dict[str, Any] | None:
        told = self.relay is None or self.relay.streams
        return self.made.resume(prepared, told=told) if self.ticket.resumes else None

    @property
    def continues(self) -> bool:
        """Whether the next attempt would go on from where this one is."""
        return self._resume() is not None

    def go_on(self) -> None:
        """Expect what an engine says that goes on from here."""
        self.resume = self._resume()
        self._go_on()

    def _go_on(self) -> None:
        """Expect the rest of an answer of which an engine has made a part."""
        self._seq, self._progressed = 0, False
        self.refusal = self.lost = None
        if self.relay is not None and not self.relay.streams:
            self.relay = None

    def restart(self) -> None:
        """Expect an answer from its first message on."""
        self._seq, self._progressed = 0, False
        self.made.reset()
        self.resume = None
        self.ticket.resumes = False
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
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as e:
            self._break(EngineFailed(f"{self.card.name} sent a message that cannot be understood: {type(e).__name__}"))

    def on_no_responders(self) -> None:
        self._refused(Unreachable(f"nobody answers for instance {self.ticket.instance_id}"), time.monotonic())

    def on_unsendable(self, error: ThawError) -> None:
        self._break(error)

    def _take(self, message: dict[str, Any]) -> None:
        if self.ended:
            return
        now = time.monotonic()
        if self.key is not None and (message["seq"] < self._seq or _repeated(message)):
            return
        if message["seq"] != self._seq:
            lost = EngineFailed(f"messages of {self.card.name} were lost: number {self._seq} is missing")
            self._dispatcher.on_gap(self.ticket, lost, now)
            return
        self._seq += 1
        self._dispatcher.on_heard(self.ticket, now)
        kind = message["kind"]
        if kind == "chunk":
            self._chunk(message, now)
        elif kind == "started":
            self._started(InferStarted.model_validate(message), now)
        elif kind == "data":
            self._data(message, now)
        elif kind == "response":
            self._respond(InferResponse.model_validate(message), now)
        elif kind == "failed":
            self._failed(from_body(ErrorBody.model_validate(message["error"])), now, lost=message.get("engine_lost") is True)
        elif kind == "yielded":
            self._dispatcher.on_yielded(self.ticket, self.move.to if self.move is not None else None, now)
        else:
            self._finished(message, now)

    def _started(self, message: InferStarted, now: float) -> None:
        self._begun(message)
        if self.resume is not None:
            return
        self.heard.append(Heard(now, message.phases))
        self.usage = Usage(prompt_tokens=message.prompt_tokens)
        self.ignored = message.ignored
        self.sink.started(message)

    def _begun(self, head: InferStarted | InferResponse) -> None:
        """An engine has taken the answer on. What the client has of it may now be such that nobody else could go on."""
        self.made.begin(head, self.revision)
        self.ticket.revision, self.ticket.admitted = self.revision, True
        if self.first_at is not None:
            self._note_told()

    def _note_told(self) -> None:
        fixed, sink = bool(self.made.fixed), self.sink
        streams = self.relay.streams if self.relay is not None else sink.streams and not sink.repeatable
        self.ticket.begun, self.ticket.resumes = fixed and streams, not fixed

    def _chunk(self, message: dict[str, Any], now: float) -> None:
        sink, choices = self.sink, message["choices"]
        if self.first_at is None or not self._progressed:
            self._first(message, now)
        self.chunk_at = now
        sink.chunk(choices)
        self.made.add(choices)
        if sink.pending > self._buffer_limit and not self.replayed:
            self._unread()
        else:
            self.wake()

    def _first(self, message: dict[str, Any], now: float) -> None:
        """The first words of an attempt."""
        self._progressed = True
        self._dispatcher.on_progress(self.ticket)
        if self.first_at is None or self.resume is None:
            self.first_at = self.first_at or now
            self.heard.append(Heard(now, _phases(message.get("phases"))))
        self._note_told()
        self._arrived(now)

    def _arrived(self, now: float) -> None:
        """Something has come from where the request was sent."""
        last = self.handovers[-1] if self.handovers else None
        if last is not None and last.pause_ms is None and last.to == self.ticket.instance_id:
            last.pause_ms = (now - last.since) * 1e3 if last.since is not None else 0.0
            if self.move is not None and self.move.to == last.to:
                self.move.arrive(last.tokens, last.pause_ms)
                self.move = None

    def _unread(self) -> None:
        self._break(EngineFailed("the client reads more slowly than the model writes; its buffer is full", should_retry=False))

    def _respond(self, head: InferResponse, now: float) -> None:
        if self.resume is not None and self.relay is not None:
            if not self.relay.takes(head):
                self._refused(EngineFailed(f"the engine answered with status {head.status} instead of going on"), now, cancel=True)
                return
            self._begun(head)
            return
        if self.relay is not None or self.told:
            raise ValueError("an answer has one head, before its first bytes")
        self.heard.append(Heard(now, head.phases))
        self.relay = Relay(head)
        self._begun(head)

    def _data(self, message: dict[str, Any], now: float) -> None:
        relay = self.relay
        if relay is None:
            raise ValueError("data came before the answer's head")
        if self.first_at is None or not self._progressed:
            self._first(message, now)
        self.chunk_at = now
        relay.add(base64.b64decode(message["data"], validate=True))
        if progress := message.get("progress"):
            self.made.add(progress)
        if relay.streams:
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
        self._arrived(now)
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
        if isinstance(error, InstanceDraining) or (self.resume is not None and self._seq == 1 and not lost):
            self.refusal = error
            self._refused(error, now)
            return
        if lost:
            self.lost = error
            self._dispatcher.on_engine_lost(self.ticket, error, now)
            return
        self._dispatcher.on_finished(self.ticket, now)
        self.fail(error)

    def _refused(self, error: ThawError, now: float, *, cancel: bool = False) -> None:
        if self.move is not None and self.move.to == self.ticket.instance_id:
            self.give_up_move(error)
        if cancel:
            self._dispatcher.on_gap(self.ticket, error, now)
        else:
            self._dispatcher.on_refused(self.ticket, error, now)

    def give_up_move(self, error: ThawError) -> None:
        """The move, if there is one, has not come about; the request goes on as it can."""
        move, self.move = self.move, None
        if move is not None:
            move.fail(error)

    def requeued(self) -> None:
        """It waits for an instance, having had one."""
        self.give_up_move(Unavailable("the instance that it was to go to did not answer"))
        if self.on_waiting is not None:
            self.on_waiting()

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
        self.give_up_move(NotFound("the request is over"))
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
    if message["kind"] != "failed":
        return False
    return bool(message["error"]["code"] == Conflict.code and message["error"].get("param") != RESUME)
