"""Reader of the numbered messages that an engine sends for one request."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Ticket
from services.gateway.requests.client_response import ClientResponse
from services.gateway.requests.completion import Completion
from services.gateway.requests.engine_messages import is_duplicate_refusal, parse_final, phases_of
from services.gateway.requests.handoff import Handoffs
from services.gateway.requests.passthrough import PassthroughResponse
from services.gateway.requests.resume_state import ResumeState
from services.gateway.requests.sink import Diverged
from services.gateway.requests.stats import RequestStats
from shared.compact_json import encode_json
from shared.contracts.base import ErrorBody
from shared.contracts.inference import InferEnd, InferRaw, InferResponse, InferStarted, Usage
from shared.errors import BodyLost, EngineFailed, InstanceDraining, ThawError, from_body

_MAX_BUFFERED_BYTES = 256 * 1024 * 1024
"""Largest HTTP body that is buffered until it is complete."""


@dataclass(slots=True)
class Attempt:
    """The request's present attempt on one instance.

    Attributes:
        id: Names the attempt on the mesh; empty before the first.
        revision: Revision of the instance's weights.
        resume: Fields of the `Resume` message; None if the attempt starts the response.
        next_seq: Number of the next message, which is also the count of messages read.
        has_output: The attempt has sent output.
        vectors: First vectors of an answer that arrives in several messages.
        refusal: The reason why the instance refused the attempt.
        engine_loss: The loss of the engine that its host reported.
        device_s: Seconds that the instance's devices have computed for it, as last reported.
    """

    id: str = ""
    revision: str = ""
    resume: dict[str, Any] | None = None
    next_seq: int = 0
    has_output: bool = False
    vectors: list[str] = field(default_factory=list)
    refusal: ThawError | None = None
    engine_loss: ThawError | None = None
    device_s: float = 0.0


class ResponseReader:
    """Apply an engine's messages to the parts of a request.

    Events are reported to the dispatcher.

    Attributes:
        attempt: The present attempt.
        accepts_duplicates: Skip messages that arrive twice, as from a captured stream.
        recover_gap: Called when messages are missing; true if they will be read elsewhere.
    """

    def __init__(
        self,
        ticket: Ticket,
        model: str,
        dispatcher: Dispatcher,
        response: ClientResponse,
        resume_state: ResumeState,
        handoffs: Handoffs,
        stats: RequestStats,
        completion: Completion,
    ) -> None:
        self.attempt = Attempt()
        self.accepts_duplicates = False
        self.recover_gap: Callable[[], bool] = lambda: False
        self._ticket = ticket
        self._model = model
        self._dispatcher = dispatcher
        self._response = response
        self._resume_state = resume_state
        self._handoffs = handoffs
        self._stats = stats
        self._completion = completion
        self._received_bytes = 0
        """Of the messages of the response so far; their output may be all in memory."""

    def restart(self) -> None:
        """Expect the first message of a response."""
        self._stats.earlier_device_s += self.attempt.device_s
        self.attempt = Attempt(self.attempt.id, self.attempt.revision)
        self._received_bytes = 0

    def resume(self, fields: dict[str, Any] | None) -> None:
        """Expect the first message of an engine that continues the response.

        Args:
            fields: Fields of the `Resume` message.
        """
        self._stats.earlier_device_s += self.attempt.device_s
        self.attempt = Attempt(self.attempt.id, self.attempt.revision, fields)

    def on_message(self, data: bytes) -> None:
        """Read one message. A malformed one fails the request."""
        self._received_bytes += len(data)
        try:
            self._read(from_json(data))
        except Diverged as e:
            self.abort(
                EngineFailed(f"{self._model} stopped before its response was complete, and the response cannot be resumed: {e}")
            )
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as e:
            self.abort(EngineFailed(f"The engine of {self._model} sent a malformed message: {type(e).__name__}"))

    def abort(self, error: ThawError) -> None:
        """Cancel the request on its instance, and fail it."""
        if not self._completion.is_done:
            self._dispatcher.on_abort(self._ticket, error, time.monotonic())

    def _abort_oversized(self, remedy: str) -> None:
        """Fail a response that would take too much memory until it is complete."""
        text = f"The response of {self._model} is larger than {_MAX_BUFFERED_BYTES} bytes. {remedy}"
        self.abort(EngineFailed(text, should_retry=False))

    def on_refused(self, error: ThawError, now: float, *, cancel: bool = False) -> None:
        """Handle an instance that does not serve the attempt.

        Args:
            error: The instance's reason.
            now: Monotonic seconds.
            cancel: Cancel the attempt on the instance as well.
        """
        if self._handoffs.ordered_to(self._ticket.instance_id) is not None:
            self._handoffs.abandon(error)
        if cancel:
            self._dispatcher.on_message_gap(self._ticket, error, now)
        else:
            self._dispatcher.on_refused(self._ticket, error, now)

    def _read(self, message: dict[str, Any]) -> None:
        if self._completion.is_done:
            return
        now, attempt = time.monotonic(), self.attempt
        if self.accepts_duplicates and (message["seq"] < attempt.next_seq or is_duplicate_refusal(message)):
            return
        if message["seq"] != attempt.next_seq:
            if self.recover_gap():
                return
            gap = EngineFailed(f"Messages of {self._model} were lost: number {attempt.next_seq} is missing")
            self._dispatcher.on_message_gap(self._ticket, gap, now)
            return
        attempt.next_seq += 1
        self._dispatcher.on_message(self._ticket, now)
        kind = message["kind"]
        if kind == "chunk":
            self._on_chunk(message, now)
        elif kind == "started":
            self._on_started(InferStarted.model_validate(message), now)
        elif kind == "data":
            self._on_data(message, now)
        elif kind == "vectors":
            self._on_vectors(message, now)
        elif kind == "response":
            self._on_response(InferResponse.model_validate(message), now)
        elif kind == "failed":
            error = from_body(ErrorBody.model_validate(message["error"]))
            self._on_failed(error, now, is_engine_lost=message.get("engine_lost") is True)
        elif kind == "yielded":
            ordered = self._handoffs.ordered
            self._dispatcher.on_yielded(self._ticket, ordered.destination if ordered else None, now)
        else:
            self._on_final(message, now)

    # Responses in tokens.

    def _on_started(self, message: InferStarted, now: float) -> None:
        self._on_admitted(message)
        if self.attempt.resume is not None:
            return
        self._stats.add_phases(now, message.phases)
        self._stats.usage = Usage(prompt_tokens=message.prompt_tokens)
        self._stats.ignored_parameters = message.ignored
        self._response.sink.on_started(message)

    def _on_chunk(self, message: dict[str, Any], now: float) -> None:
        response, choices, resume_state = self._response, message["choices"], self._resume_state
        self.attempt.device_s = float(message.get("device_s", 0.0))
        if resume_state.replay_filter:
            choices = resume_state.replay_filter.remove_from(choices)
            if not choices:
                return
        if self._stats.first_token_at is None or not self.attempt.has_output:
            self._on_first_output(message, now)
        self._stats.last_token_at = now
        sink = response.sink
        sink.chunk(choices)
        resume_state.add(choices)
        if not sink.streams and self._received_bytes > _MAX_BUFFERED_BYTES:
            self._abort_oversized("Request it as a stream")
        else:
            self._forward(sink.pending)

    def _on_vectors(self, message: dict[str, Any], now: float) -> None:
        vectors = self.attempt.vectors
        vectors += message["vectors"]
        self._stats.last_token_at = now
        if sum(map(len, vectors)) > _MAX_BUFFERED_BYTES:
            self._abort_oversized("Send fewer inputs")

    # Responses in HTTP.

    def _on_response(self, head: InferResponse, now: float) -> None:
        passthrough = self._response.passthrough
        if self.attempt.resume is not None and passthrough is not None:
            if not passthrough.matches(head):
                error = EngineFailed(f"The engine answered with status {head.status} instead of resuming the response")
                self.on_refused(error, now, cancel=True)
                return
            self._on_admitted(head)
            return
        if passthrough is not None or self._response.has_started:
            raise ValueError("a response has one head, before its first bytes")
        self._stats.add_phases(now, head.phases)
        self._response.passthrough = PassthroughResponse(head)
        self._on_admitted(head)

    def _on_data(self, message: dict[str, Any], now: float) -> None:
        passthrough, resume_state = self._response.passthrough, self._resume_state
        if passthrough is None:
            raise ValueError("data arrived before the head of its response")
        progress = message.get("progress")
        self.attempt.device_s = message.get("device_s") or self.attempt.device_s
        if progress and resume_state.replay_filter and resume_state.replay_filter.covers(progress):
            return
        if self._stats.first_token_at is None or not self.attempt.has_output:
            self._on_first_output(message, now)
        self._stats.last_token_at = now
        passthrough.add(base64.b64decode(message["data"], validate=True))
        if progress:
            resume_state.add(progress)
        if passthrough.streams:
            self._forward(passthrough.size)
        elif passthrough.size > _MAX_BUFFERED_BYTES:
            self._abort_oversized("Request it as a stream")

    # Both forms.

    def _on_admitted(self, head: InferStarted | InferResponse) -> None:
        """An engine starts or resumes the response."""
        self._resume_state.response_started(head, self.attempt.revision)
        self._ticket.revision, self._ticket.is_admitted = self.attempt.revision, True
        if self._stats.first_token_at is not None:
            self._update_resumability()

    def _update_resumability(self) -> None:
        is_fixed = bool(self._resume_state.not_resumable_reason)
        self._ticket.is_committed = is_fixed and self._response.is_irrevocable
        self._ticket.is_resumable = not is_fixed

    def _on_first_output(self, message: dict[str, Any], now: float) -> None:
        """The attempt sends its first output."""
        stats = self._stats
        self.attempt.has_output = True
        self._dispatcher.on_progress(self._ticket, now)
        if stats.first_token_at is None or self.attempt.resume is None:
            stats.first_token_at = stats.first_token_at or now
            stats.add_phases(now, phases_of(message))
        self._update_resumability()
        self._handoffs.output_arrived(self._ticket.instance_id, now)

    def _forward(self, pending_bytes: int) -> None:
        """Wake the response writer, or fail a client that reads too slowly."""
        if self._response.overflows(pending_bytes):
            self.abort(
                EngineFailed(
                    "The client reads more slowly than the model generates, and its buffer is full. Read the stream faster, "
                    "or raise THAW_STREAM_BUFFER_BYTES",
                    should_retry=False,
                )
            )
        else:
            self._completion.wake()

    def _on_final(self, message: dict[str, Any], now: float) -> None:
        if self.attempt.vectors:
            message["vectors"] = [*self.attempt.vectors, *message["vectors"]]
        final = parse_final(message)
        self._stats.usage = final.usage
        self.attempt.device_s = final.usage.device_s or self.attempt.device_s
        if self._stats.first_token_at is None:
            self._stats.first_token_at = now
        self._handoffs.output_arrived(self._ticket.instance_id, now)
        if isinstance(final, InferRaw):
            self._on_response(InferResponse(status=200), now)
        passthrough = self._response.passthrough
        if passthrough is None:
            self._response.sink.on_finished(final)
        elif isinstance(final, InferRaw):
            passthrough.add(encode_json(final.body))
        elif not isinstance(final, InferEnd):
            raise ValueError("an HTTP response ended as a response in tokens")
        self._completion.finish(now)
        self._dispatcher.on_finished(self._ticket, now)

    def _on_failed(self, error: ThawError, now: float, *, is_engine_lost: bool) -> None:
        is_refusal_to_resume = self.attempt.resume is not None and self.attempt.next_seq == 1 and not is_engine_lost
        if isinstance(error, InstanceDraining | BodyLost) or is_refusal_to_resume:
            self.attempt.refusal = error
            self.on_refused(error, now)
        elif is_engine_lost:
            self.attempt.engine_loss = error
            self._dispatcher.on_engine_lost(self._ticket, error, now)
        else:
            self._dispatcher.on_finished(self._ticket, now)
            self._completion.fail(error)
