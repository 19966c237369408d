"""What an engine says of one request: numbered messages in, whatever the request's sink makes of them out."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import Ask
from services.gateway.domain.ticket import Ticket
from services.gateway.requests.completion import Ending
from services.gateway.requests.engine_messages import last_of, phases_of, repeated
from services.gateway.requests.handoff import Move
from services.gateway.requests.handoff_history import Handovers
from services.gateway.requests.passthrough import Relay
from services.gateway.requests.replay_filter import Surplus
from services.gateway.requests.resume_state import Made
from services.gateway.requests.sink import Diverged, Key, Sink
from shared.contracts.base import ErrorBody
from shared.contracts.inference import (
    InferEnd,
    InferRaw,
    InferResponse,
    InferStarted,
    Usage,
)
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceStatus
from shared.contracts.phases import PhaseSpan
from shared.errors import EngineFailed, InstanceDraining, NotFound, ThawError, from_body

_LARGEST_WHOLE = 256 * 1024 * 1024
"""Bytes of an answer that is kept until it is whole."""


@dataclass(slots=True)
class Heard:
    """Phases that a message carried, and when it came."""

    at: float
    phases: tuple[PhaseSpan, ...]


class Reading(Ending):
    """The part of an `Exchange` that hears its engines.

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
        super().__init__()
        self.ticket = ticket
        self.card = card
        self.ask = ask
        self.sink = sink
        self.relay: Relay | None = None
        self.told = False
        self.key: Key | None = None
        self.replayed = False
        self.refusal: ThawError | None = None
        self.lost: ThawError | None = None
        self.first_at: float | None = None
        self.usage = Usage(prompt_tokens=0)
        self.ignored: tuple[str, ...] = ()
        self.heard: list[Heard] = []
        self.instance: InstanceStatus | None = None
        self.cold_ready_at: float | None = None
        self.reply_token = ""
        self.made = Made()
        self.resume: dict[str, Any] | None = None
        self.move: Move | None = None
        self.handovers = Handovers()
        self.surplus = Surplus()
        self.on_waiting: Callable[[], None] | None = None
        self.chunk_at = 0.0
        self.sent_at = 0.0
        self.fence = 0
        self._dispatcher = dispatcher
        self._buffer_limit = buffer_limit
        self._seq = 0
        self._progressed = False
        self.revision = ""

    def on_message(self, data: bytes) -> None:
        try:
            self._take(from_json(data))
        except Diverged as e:
            self._break(EngineFailed(f"{self.card.name} stopped while answering; its answer could not be continued: {e}"))
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as e:
            self._break(EngineFailed(f"{self.card.name} sent a message that cannot be understood: {type(e).__name__}"))

    def _take(self, message: dict[str, Any]) -> None:
        if self.ended:
            return
        now = time.monotonic()
        if self.key is not None and (message["seq"] < self._seq or repeated(message)):
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
        if self.surplus:
            choices = self.surplus.without(choices)
            if not choices:
                return
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
        self._dispatcher.on_progress(self.ticket, now)
        if self.first_at is None or self.resume is None:
            self.first_at = self.first_at or now
            self.heard.append(Heard(now, phases_of(message)))
        self._note_told()
        self._arrived(now)

    def _arrived(self, now: float) -> None:
        """Something has come from where the request was sent."""
        made = self.handovers.arrived(self.ticket.instance_id, now)
        if made is not None and self.move is not None and self.move.to == made.to:
            self.move.arrive(made.tokens, made.pause_ms or 0.0)
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
        if self.surplus and (progress := message.get("progress")) and self.surplus.covers(progress):
            return
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
        last = last_of(message)
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

    def _break(self, error: ThawError) -> None:
        if not self.ended:
            self._dispatcher.on_broken(self.ticket, error, time.monotonic())

    def fail(self, error: ThawError) -> None:
        if not self.ended:
            self.error = error
            self._end(time.monotonic())

    def _end(self, now: float) -> None:
        super()._end(now)
        self.give_up_move(NotFound("the request is over"))
