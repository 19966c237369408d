"""Embedding requests on the computing thread.

Between generation steps one of them gets a forward pass: of the highest priority, then of the key
that has received the fewest tokens for its weight, and of these the oldest one. A key whose
requests begin to wait has at least the tokens of the one that has the fewest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.engine.domain.fair_slots import Flow
from services.engine.domain.step_costs import StepCosts
from services.engine.generation.embedding import Embedder
from services.engine.generation.events import Admitted, Broken, Embedded, Event
from services.engine.generation.request import EmbedRequest
from services.engine.generation.runner import check_device
from services.engine.generation.sequences import flow_of
from shared.errors import EngineFailed, ThawError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    request: EmbedRequest
    vectors: list[bytes] = field(default_factory=list)


class EmbeddingJobs:
    """The queue of embedding requests."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._jobs: list[_Job] = []
        self._tags: dict[Flow, float] = {}
        self._has_computed = False

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._embedder.device

    def requests(self) -> list[EmbedRequest]:
        """Return the requests in the order of arrival."""
        return [job.request for job in self._jobs]

    def add(self, request: EmbedRequest) -> None:
        """Add a request."""
        flow = flow_of(request.share)
        waiting = {flow_of(job.request.share) for job in self._jobs}
        if flow not in waiting:
            tags = {f: t for f, t in self._tags.items() if f in waiting}
            self._tags = tags | {flow: max(self._tags.get(flow, 0.0), min(tags.values(), default=0.0))}
        self._jobs.append(_Job(request))

    def warm_up(self, tokens: Sequence[int]) -> None:
        """Embed a few tokens, unless something has been embedded."""
        if not self._has_computed:
            self._embedder.embed([tokens], None)
            self._has_computed = True

    def forget(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        self._jobs = [j for j in self._jobs if j.request.request_id != request_id]

    def _choose_next(self) -> _Job:
        """Return the job that is computed next. `min` keeps the order of arrival."""

        def place(job: _Job) -> tuple[int, float]:
            flow = flow_of(job.request.share)
            return -flow.priority, self._tags[flow]

        return min(self._jobs, key=place)

    def step(self, costs: StepCosts) -> list[Event]:
        """Run one forward pass for the next request, and charge it in `costs`."""
        if not self._jobs:
            return []
        job = self._choose_next()
        request_id, done = job.request.request_id, len(job.vectors)
        inputs = job.request.inputs[done : done + self._embedder.batch]
        self._tags[flow_of(job.request.share)] += sum(map(len, inputs)) / job.request.share.weight
        events: list[Event] = [] if done else [Admitted(request_id, time.monotonic())]
        try:
            vectors = self._embedder.embed(inputs, job.request.dimensions)
        except ThawError as e:
            return [*events, self._break(job, e)]
        except Exception as e:  # a process boundary: this request fails, the engine continues
            log.exception("an embedding failed")
            check_device(e, self.device)
            error = EngineFailed(f"The engine failed while embedding: {type(e).__name__}: {str(e)[:300]}")
            return [*events, self._break(job, error)]
        self._has_computed = True
        costs.split(time.monotonic(), {request_id: 1})
        job.vectors += [row.numpy().astype("<f4").tobytes() for row in vectors]
        if len(job.vectors) == len(job.request.inputs):
            self._jobs.remove(job)
            events.append(Embedded(request_id, tuple(job.vectors), vectors.shape[-1], costs.report(request_id)))
        return events

    def _break(self, job: _Job, error: ThawError) -> Broken:
        self._jobs.remove(job)
        return Broken(job.request.request_id, error)
