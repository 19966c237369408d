"""One request that an engine has taken on: where its answers go, and what it has said."""

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


def fixed_of(request: GenerationRequest | EmbedRequest | None) -> str:
    """Why an answer cannot be continued elsewhere; empty: it can."""
    return "an embedding has no tokens to go on from" if isinstance(request, EmbedRequest) else ""


@dataclass
class Stream:
    request_id: str
    reply: str
    parent: str | None
    timeline: Timeline
    received: float
    request: GenerationRequest | EmbedRequest | None = None
    adapter: ModelCard | None = None
    fetching: asyncio.Task[None] | None = None
    holds_adapter: bool = False
    deadline: asyncio.TimerHandle | None = None
    admitted: float | None = None
    first_token_told: bool = False
    seq: int = 0
    spans: list[PhaseSpan] = field(default_factory=list)
    own: Callable[[BaseModel], None] | None = None
    """Hears the answers to a request of the engine's own (a probe), instead of a gateway."""
    _made: dict[int, list[int]] = field(default_factory=dict)
    _finish: dict[int, FinishReason | None] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))

    def take(self, request: GenerationRequest | EmbedRequest) -> None:
        self.request = request
        if isinstance(request, GenerationRequest):
            self._made = {c.index: list(c.begun.tokens) if c.begun else [] for c in request.choices}
            self._made |= {c.index: list(c.token_ids) for c in request.finished}
            self._finish = {c.index: c.finish_reason for c in request.finished}

    def progressed(self, event: Progressed) -> None:
        if event.tokens:
            self._steps.append(event.at)
        for delta in event.deltas:
            self._made[delta.index] += delta.token_ids
            if delta.finish_reason is not None:
                self._finish[delta.index] = delta.finish_reason

    @property
    def generated_tokens(self) -> int:
        """Here and elsewhere."""
        return sum(map(len, self._made.values()))

    @property
    def tokens_per_second(self) -> float:
        steps = self._steps
        return (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 and steps[-1] > steps[0] else 0.0

    @property
    def moves(self) -> bool:
        """Whether it is a gateway's, and not the engine's own (a probe)."""
        return self.reply.startswith(f"{subjects.PREFIX}.replies.")

    def running(self) -> RunningRequest:
        request = self.request
        return RunningRequest(
            request_id=self.request_id,
            gateway_id=subjects.gateway_of(self.reply),
            prompt_tokens=request.prompt_tokens if request is not None else 0,
            generated_tokens=self.generated_tokens,
            tokens_per_second=self.tokens_per_second,
            choices=max(1, len(self._made)),
            fixed=fixed_of(request),
            traceparent=self.parent,
        )

    def choices(self) -> tuple[RunningChoice, ...]:
        made = sorted(self._made.items())
        return tuple(RunningChoice(index=i, token_ids=tuple(ids), finish_reason=self._finish.get(i)) for i, ids in made)

    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Of each of `choices`; of those that were finished elsewhere none."""
        prompts = {c.index: c.prompt for c in self.request.choices} if isinstance(self.request, GenerationRequest) else {}
        return tuple(prompts.get(i, ()) for i in sorted(self._made))
