"""A running request: where its responses go, and its tokens so far."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

from services.engine.generation.events import Progressed
from services.engine.generation.request import EmbedRequest, GenerationRequest
from shared.contracts import subjects
from shared.contracts.inference import FinishReason
from shared.contracts.migration import RunningChoice, RunningRequest
from shared.contracts.models import ModelCard
from shared.contracts.phases import PhaseSpan
from shared.telemetry.timeline import Timeline

_STEPS = 64
"""The token rate is that of the last so many steps."""


def not_resumable_reason(request: GenerationRequest | EmbedRequest | None) -> str:
    """The reason why another engine cannot resume the response; empty if it can."""
    return "an embedding has no tokens to resume from" if isinstance(request, EmbedRequest) else ""


@dataclass
class Stream:
    """One running request."""

    request_id: str
    reply: str
    parent: str | None
    timeline: Timeline
    received: float
    request: GenerationRequest | EmbedRequest | None = None
    adapter: ModelCard | None = None
    submitting: asyncio.Task[None] | None = None
    has_lora: bool = False
    reading: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None
    admitted: float | None = None
    first_token_sent: bool = False
    seq: int = 0
    spans: list[PhaseSpan] = field(default_factory=list)
    device_s: float = 0.0
    """Device seconds of it, as last sent."""
    internal_listener: Callable[[BaseModel], None] | None = None
    """Receives the responses to a request of the engine itself (a probe) instead of a gateway."""
    _generated_ids: dict[int, list[int]] = field(default_factory=dict)
    _finish: dict[int, FinishReason | None] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))

    def take(self, request: GenerationRequest | EmbedRequest) -> None:
        self.request = request
        if isinstance(request, GenerationRequest):
            self._generated_ids = {c.index: list(c.resume_state.tokens) if c.resume_state else [] for c in request.choices}
            self._generated_ids |= {c.index: list(c.token_ids) for c in request.finished}
            self._finish = {c.index: c.finish_reason for c in request.finished}

    def record_progress(self, event: Progressed) -> None:
        if event.tokens:
            self._steps.append(event.at)
        for delta in event.deltas:
            self._generated_ids[delta.index] += delta.token_ids
            if delta.finish_reason is not None:
                self._finish[delta.index] = delta.finish_reason

    @property
    def generated_tokens(self) -> int:
        """Tokens generated here and by earlier engines."""
        return sum(map(len, self._generated_ids.values()))

    @property
    def tokens_per_second(self) -> float:
        steps = self._steps
        return (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 and steps[-1] > steps[0] else 0.0

    @property
    def is_movable(self) -> bool:
        """True for a gateway's request, false for the engine's own probes."""
        return self.reply.startswith(f"{subjects.PREFIX}.replies.")

    def running(self) -> RunningRequest:
        request = self.request
        return RunningRequest(
            request_id=self.request_id,
            gateway_id=subjects.gateway_of(self.reply),
            prompt_tokens=request.prompt_tokens if request is not None else 0,
            generated_tokens=self.generated_tokens,
            tokens_per_second=self.tokens_per_second,
            choices=max(1, len(self._generated_ids)),
            fixed=not_resumable_reason(request),
            traceparent=self.parent,
        )

    def choices(self) -> tuple[RunningChoice, ...]:
        generated = sorted(self._generated_ids.items())
        return tuple(RunningChoice(index=i, token_ids=tuple(ids), finish_reason=self._finish.get(i)) for i, ids in generated)

    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Prompt token ids of each of `choices`.

        Empty for choices that another engine finished.
        """
        prompts = {c.index: c.prompt for c in self.request.choices} if isinstance(self.request, GenerationRequest) else {}
        return tuple(prompts.get(i, ()) for i in sorted(self._generated_ids))
