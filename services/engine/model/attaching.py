"""Load a model into a process whose other models compute meanwhile (ADR 0105).

The answers of the loader are awaited while the model is bound:

    index       asked for first, and on a separate device together with `complete`
    segment     mapped as soon as the index is known
    bind        builds the model on the segment, beside the following steps
    pages       on a separate device: mapped as soon as the weights are complete, and entered into
                the process's page table
    complete    asked for when everything is mapped: the loader has then seen all mappings

All work runs on file threads, so that no step of another model waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from services.engine.loader_client import LoaderClient
from services.engine.model import loading
from services.engine.model.architectures import ModelCache
from services.engine.model.bound_model import BoundModel, bind_model, open_segment
from services.engine.model.model_files import ModelFiles, read_files
from services.engine.model.segment import Segment
from shared.contracts.engine import EngineStart
from shared.contracts.loader import WeightsAttached
from shared.contracts.phases import Phase
from shared.mapping import populate_for_reading
from shared.tasks import end
from shared.telemetry.timeline import Timeline

log = logging.getLogger(__name__)
T = TypeVar("T")
_POPULATED_BYTES = 256 << 20
"""Bytes of a model that are entered into the page table beside the binding: some milliseconds."""
RunOnThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
"""Runs a function on a thread that computes nothing."""


@dataclass(frozen=True)
class AttachedModel:
    """A bound model with all of its weights, its small files, and the loader's last answer."""

    bound: BoundModel
    files: ModelFiles
    attached: WeightsAttached


class Attaching:
    """The load of one model. Used on the event loop.

    Attributes:
        ranges: Addresses at which weights are mapped so far: first and end.
    """

    def __init__(
        self,
        start: EngineStart,
        weights: LoaderClient,
        models: ModelCache,
        timeline: Timeline,
        run: RunOnThread,
        on_index: Callable[[WeightsAttached], None],
        on_loaded: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Prepare a load.

        Args:
            weights: The process's client of the loader.
            models: The common parts of the process's models.
            timeline: Takes the phases of the load.
            run: Runs the parts of the load that block.
            on_index: Called with the loader's first answer.
            on_loaded: Called when all weights are loaded, while the model may still be bound.
        """
        self._start, self._weights, self._models = start, weights, models
        self._timeline, self._run, self._on_index, self._on_loaded = timeline, run, on_index, on_loaded
        self._tasks: list[asyncio.Task[Any]] = []
        self._index: asyncio.Task[WeightsAttached] | None = None
        self._complete: asyncio.Task[WeightsAttached] | None = None
        self.ranges: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Ask the loader. `load` or `end` follows."""
        self._index = self._begin(self._attach("index"))
        if self._start.separate_memory:
            self._complete = self._begin(self._attach("complete"))

    async def load(self) -> AttachedModel:
        """Load the weights. Call it once. Raises the error of the load."""
        if self._index is None:
            self.begin()
        assert self._index is not None
        try:
            index = await self._index
            self._on_index(index)
            with self._timeline.phase(Phase.INIT):
                files = self._begin(self._run(partial(read_files, Path(index.directory), self._start, self._models)))
                segment = await self._run(partial(self._open_segment, index))
                mapping = self._begin(self._map())
                bound: BoundModel = await self._run(partial(self._bind, index, segment))
                small: ModelFiles = await files
            attached, mapped = await mapping
        finally:
            await self.end()
        if not bound.segment.is_current(attached.segment, attached.extents):
            log.warning("the loader was restarted and has reloaded the weights; binding again")
            bound = await self._run(partial(self._bind, attached, None))
        if mapped is not None:
            mapped.give_to(bound)
        return AttachedModel(bound, small, attached)

    async def end(self) -> None:
        """Cancel the tasks that still run. Calling it again has no effect."""
        tasks, self._tasks, self._index, self._complete = self._tasks, [], None, None
        await end(*tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # `load` has raised it, or the engine was stopped

    async def _map(self) -> tuple[WeightsAttached, loading.MappedPages | None]:
        """Wait for the weights, and map them where the device has memory of its own."""
        attached = await (self._complete if self._complete is not None else self._attach("complete"))
        self._timeline.absorb(attached.phases)
        loading.check_device(attached)
        taking = self._begin(self._on_loaded())
        mapped = None
        if self._start.separate_memory:
            mapped = await loading.map_pages(attached, self._start, self._weights, self._open_pages)
            attached = mapped.attached
        await taking
        return attached, mapped

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def _attach(self, until: loading.Until) -> WeightsAttached:
        return await self._weights.attach(self._start.card, self._weights.holder, until)

    async def _open_pages(self, open_pages: Callable[[], torch.Tensor]) -> torch.Tensor:
        def work() -> torch.Tensor:
            memory = open_pages()
            self.ranges.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
            return memory

        found: torch.Tensor = await self._run(work)
        self._begin(self._run(partial(populate_for_reading, found.data_ptr(), min(found.nbytes, _POPULATED_BYTES))))
        return found

    # -- on a thread -------------------------------------------------------------------------------

    def _open_segment(self, index: WeightsAttached) -> Segment:
        segment = open_segment(index)
        self.ranges.append(segment.addresses)
        return segment

    def _bind(self, attached: WeightsAttached, segment: Segment | None) -> BoundModel:
        opened = segment or self._open_segment(attached)
        return bind_model(Path(attached.directory), attached, self._start, self._models, opened)
