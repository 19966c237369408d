"""Embedding requests on the computing thread.

Between generation steps the oldest one gets a forward pass.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.engine.domain.step_costs import StepCosts
from services.engine.generation.embedding import Embedder
from services.engine.generation.events import Admitted, Broken, Embedded, Event
from services.engine.generation.request import EmbedRequest
from shared.errors import EngineFailed, ThawError

log = logging.getLogger(__name__)


@dataclass
class _Job:
    request: EmbedRequest
    vectors: list[bytes] = field(default_factory=list)


class EmbeddingJobs:
    """The queue of embedding requests."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._jobs: deque[_Job] = deque()
        self._has_computed = False

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, request: EmbedRequest) -> None:
        self._jobs.append(_Job(request))

    def warm_up(self, tokens: Sequence[int]) -> None:
        """Embed a few tokens, unless something has been embedded."""
        if not self._has_computed:
            self._embedder.embed([tokens], None)
            self._has_computed = True

    def forget(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        self._jobs = deque(j for j in self._jobs if j.request.request_id != request_id)

    def step(self, costs: StepCosts) -> list[Event]:
        """Run one forward pass for the oldest request, and charge it in `costs`."""
        if not self._jobs:
            return []
        job = self._jobs[0]
        request_id, done = job.request.request_id, len(job.vectors)
        events: list[Event] = [] if done else [Admitted(request_id, time.monotonic())]
        try:
            vectors = self._embedder.embed(job.request.inputs[done : done + self._embedder.batch], job.request.dimensions)
        except ThawError as e:
            return [*events, self._pop_broken(e)]
        except Exception as e:  # a process boundary: this request fails, the engine continues
            log.exception("an embedding failed")
            error = EngineFailed(f"The engine failed while embedding: {type(e).__name__}: {str(e)[:300]}")
            return [*events, self._pop_broken(error)]
        self._has_computed = True
        costs.split(time.monotonic(), {request_id: 1})
        job.vectors += [row.numpy().astype("<f4").tobytes() for row in vectors]
        if len(job.vectors) == len(job.request.inputs):
            self._jobs.popleft()
            events.append(Embedded(request_id, tuple(job.vectors), vectors.shape[-1], costs.report(request_id)))
        return events

    def _pop_broken(self, error: ThawError) -> Broken:
        return Broken(self._jobs.popleft().request.request_id, error)
