"""Runs the batches of all API keys, at the gateway that has the lease.

A gateway asks for the lease only while there are active batches. Two gateways that run a batch at
the same time, after one was frozen for longer than the lease, do no harm: their requests have the
same Idempotency-Keys, and a result that is written twice replaces itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from functools import partial

from starlette.types import ASGIApp

from services.gateway.adapters.batch_store import RENEW_S, RunnerLease
from services.gateway.domain.batches.batch import Batch
from services.gateway.http.batches.batch_run import BatchRun
from services.gateway.loop import Gateway
from shared.errors import ThawError, Unavailable
from shared.tasks import end

log = logging.getLogger(__name__)
_MAX_RUNS = 64
"""Batches that run at the same time; later ones wait."""


class BatchRunner:
    """Acquire the lease while there is work, and run the active batches."""

    def __init__(self, gateway: Gateway, api: ASGIApp) -> None:
        """Create a runner.

        Args:
            gateway: The gateway, with its store of batches.
            api: Its HTTP application, which serves each line.
        """
        self._gateway = gateway
        self._api = api
        self._lease = RunnerLease(gateway.batches, gateway.id)
        self._slots = asyncio.Semaphore(gateway.settings.batch_concurrency)
        self._started: Counter[str] = Counter()
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        mirror = self._gateway.batches.mirror
        try:
            while True:
                active = mirror.active()
                mirror.changed.clear()
                if active and not self._gateway.closing.is_set():
                    await self._work(active)
                elif not active:
                    await self._end_runs()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(mirror.changed.wait(), RENEW_S if active else None)
        finally:
            await self._end_runs()

    async def _work(self, active: list[tuple[str, Batch]]) -> None:
        try:
            holds = await self._lease.hold(time.monotonic())
        except Unavailable as e:
            log.info("the lease of the batches cannot be renewed; retrying", extra={"error": e.message})
            return  # requests continue: they and their results wait for NATS by themselves
        if not holds:
            await self._end_runs()
            return
        for owner, batch in active:
            if batch.id not in self._runs and len(self._runs) < _MAX_RUNS:
                self._start(owner, batch)
            elif batch.id in self._runs and batch.status == "cancelling":
                self._runs[batch.id][0].cancel()

    def _start(self, owner: str, batch: Batch) -> None:
        run = BatchRun(self._gateway, self._api, owner, batch, self._slots, self._started)
        task = asyncio.create_task(self._run(run, batch.id), name="batch")
        self._runs[batch.id] = (run, task)
        task.add_done_callback(partial(self._on_ended, batch.id))

    def _on_ended(self, batch_id: str, _: asyncio.Task[None]) -> None:
        self._runs.pop(batch_id, None)

    @staticmethod
    async def _run(run: BatchRun, batch_id: str) -> None:
        """Run a batch. One that fails is continued after a while, as by another gateway."""
        try:
            await run.run()
        except* ThawError as e:
            log.warning("a batch was interrupted; retrying", extra={"batch": batch_id, "error": str(e.exceptions[0])})
        except* Exception:  # a bug must not end the other batches
            log.exception("a batch failed; retrying", extra={"batch": batch_id})

    async def _end_runs(self) -> None:
        """End all runs, and let another gateway continue them at once."""
        if not self._runs:
            return
        await end(*(task for _, task in self._runs.values()))
        with contextlib.suppress(Unavailable):
            await self._lease.release()
