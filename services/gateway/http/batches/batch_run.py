"""The run of one batch: validate its input, answer its requests, publish its results.

Every step can be repeated. A gateway that continues a batch reads which lines have a result, and
sends the others. A request that another gateway had sent has the same Idempotency-Key, so that it
gets that request's response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial

from opentelemetry.trace import SpanKind
from starlette.types import ASGIApp

from services.gateway.adapters.batch_store import ANONYMOUS
from services.gateway.domain.batches import batch as transitions
from services.gateway.domain.batches.batch import Batch, BatchError
from services.gateway.domain.batches.input_lines import InputCheck, InputLine, parse_line
from services.gateway.domain.batches.line_splitter import LineSplitter, RawLine
from services.gateway.domain.batches.owner_state import change_batch, end_batch
from services.gateway.domain.batches.pacing import load_of, may_start, retry_delay_s
from services.gateway.domain.catalog import unknown_model
from services.gateway.http.batches.call import CallResponse, call
from services.gateway.http.batches.results import Results
from services.gateway.http.parsing.cooperative import TimeSlice
from services.gateway.http.parsing.json_cost import check_json_cost
from services.gateway.loop import Gateway
from shared.errors import AuthenticationFailed, NotFound, StoreFull, ThawError, Unavailable
from shared.tasks import end
from shared.telemetry.tracing import tracer

log = logging.getLogger(__name__)
_POLL_S = 0.1
"""Interval of the check whether a paused batch may continue: no event reports an idle mesh."""
_REPORT_S = 1.0
_STORE_RETRY_S = 1.0


def _input_error(error: BaseException) -> BatchError:
    """Describe why the input cannot be used, or can no longer be."""
    assert isinstance(error, ThawError)
    return BatchError(code=error.code, message=f"{error.message}.", param="body.model" if error.param == "model" else error.param)


class BatchRun:
    """Run one batch until it has ended, on the gateway that has the lease."""

    def __init__(
        self, gateway: Gateway, api: ASGIApp, owner: str, batch: Batch, slots: asyncio.Semaphore, started: Counter[str]
    ) -> None:
        """Prepare to run or to continue a batch.

        Args:
            slots: One for each request that all batches may have at once, while it is sent.
            started: Requests of all batches that have not ended, by model.
        """
        self._gateway = gateway
        self._api = api
        self._owner = owner
        self._key_hash = "" if owner == ANONYMOUS else owner
        self._batch = batch
        self._slots = slots
        self._started = started
        self._turn = asyncio.Lock()
        """Held by the request that waits for a place."""
        self._stop = asyncio.Event()
        self._results = Results(gateway.files, owner, batch.id, gateway.settings.files_bytes_per_key)

    def cancel(self) -> None:
        """End the requests of the batch: its owner cancels it."""
        self._stop.set()

    async def run(self) -> None:
        """Run to the end. Raises `Unavailable` or `StoreFull` if the stores cannot be used."""
        attributes = {"thaw.batch.id": self._batch.id, "thaw.batch.endpoint": self._batch.endpoint}
        with tracer.start_as_current_span("batch", kind=SpanKind.INTERNAL, attributes=attributes) as span:
            timer = asyncio.get_running_loop().call_later(max(0.0, self._batch.expires_at - time.time()), self._stop.set)
            try:
                await self._run()
            finally:
                timer.cancel()
                span.set_attribute("thaw.batch.status", self._batch.status)

    async def _run(self) -> None:
        self._batch = (await self._gateway.batches.read(self._owner)).batch(self._batch.id)
        if not self._batch.is_active:  # the mirror has not seen its end yet
            return
        if self._batch.status == "cancelling":
            self._stop.set()
        if self._batch.status == "validating":
            await self._validate()
        await self._results.load()
        if self._batch.status == "in_progress":
            reporting = asyncio.create_task(self._report(), name="batch progress")
            try:
                await self._answer_all()
            except* NotFound as e:
                await self._change(partial(transitions.fail, errors=(_input_error(e.exceptions[0]),), now=int(time.time())))
            finally:
                await end(reporting)
        if self._batch.is_active:
            await self._finish()
        log.info("batch ended", extra={"batch": self._batch.id, "status": self._batch.status})
        self._gateway.request_log.metrics.batches.add(1, {"thaw.status": self._batch.status})

    async def _change(self, change: transitions.Change) -> None:
        state = await self._gateway.batches.change(self._owner, lambda s: change_batch(s, self._batch.id, change))
        self._batch = state.batch(self._batch.id)

    # The input.

    async def _lines(self) -> AsyncGenerator[InputLine | BatchError, None]:
        """Read the requests of the input file."""
        number, splitter, time_slice = 0, LineSplitter(self._gateway.mesh.max_body), TimeSlice()
        async for part in self._parts():
            for line in splitter.split(part) if part else [splitter.end_line()]:
                number += 1
                if line.data.strip() or line.is_over:
                    yield await self._parse(number, line)
                await time_slice.pause()

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        """Read the parts of the input file, and then an empty one."""
        files, file_id = self._gateway.files, self._batch.input_file_id
        numbers = await files.numbers(self._owner, file_id)
        if not numbers:
            raise NotFound("The content of the input file has expired")
        async for part in files.read(self._owner, file_id, numbers):
            yield part
        yield b""

    async def _parse(self, number: int, line: RawLine) -> InputLine | BatchError:
        settings = self._gateway.settings
        if line.is_over:
            message = f"This line has {line.nbytes} bytes, and the limit is {self._gateway.mesh.max_body}."
            return BatchError(code="line_too_large", message=message, line=number)
        try:
            await check_json_cost(line.data, settings.max_body_values)
        except ThawError as e:
            return BatchError(code="line_too_large", message=f"{e.message}.", line=number)
        return parse_line(number, line.data, self._batch.endpoint)

    async def _validate(self) -> None:
        check, now = InputCheck(self._gateway.settings.batch_max_requests), int(time.time())
        try:
            async with contextlib.aclosing(self._lines()) as lines:
                async for line in lines:
                    check.add(line)
                    if self._stop.is_set():
                        return
                    if check.is_over:
                        break
            errors = check.result()
            if not errors and check.model is not None:
                self._check_model(check.model)
        except (NotFound, AuthenticationFailed) as e:
            errors = (_input_error(e),)
        if errors:
            await self._change(partial(transitions.fail, errors=errors, now=now))
        else:
            await self._change(partial(transitions.begin, model=check.model or "", total=check.count, now=now))

    def _check_model(self, name: str) -> None:
        """Raise `NotFound` if the key has no such model."""
        catalog = self._gateway.catalog
        card = catalog.lora_adapter(name) or catalog.resolve(name)
        caller = self._gateway.authorizer.find_caller(self._key_hash)
        if caller is not None and not caller.may_use(card):
            raise unknown_model(name)

    # The requests.

    async def _answer_all(self) -> None:
        unanswered = asyncio.Semaphore(self._gateway.settings.batch_concurrency)
        async with asyncio.TaskGroup() as group, contextlib.aclosing(self._lines()) as lines:
            async for line in lines:
                if isinstance(line, BatchError) or self._results.has(line.number):
                    continue
                await unanswered.acquire()
                if self._stop.is_set():
                    break
                task = group.create_task(self._answer(line), name="batch request")
                task.add_done_callback(lambda _: unanswered.release())

    async def _answer(self, line: InputLine) -> None:
        """Send a request until its response is final, and store that."""
        failures = 0
        while await self._wait_for_place():
            try:
                response = await self._send(line)
            finally:
                self._started[line.model] -= 1
                self._slots.release()
            if response is None:
                return
            failures += 1
            delay_s = retry_delay_s(response.status, failures, response.retry_after_s)
            if delay_s is None:
                await self._store(line, response)
                return
            await self._pause(delay_s)

    async def _send(self, line: InputLine) -> CallResponse | None:
        name = f"{self._batch.id}-{line.number}"
        return await call(self._api, self._batch.endpoint, line.body, self._key_hash, name, self._stop)

    async def _wait_for_place(self) -> bool:
        """Wait until a request may start, take a slot, and count it.

        A request that waits for its model has no slot: batches of other models need them.

        Returns:
            False if the batch is to stop.
        """
        model = self._batch.model or ""
        try:
            base = self._gateway.catalog.resolve(model).name
        except NotFound:  # it was removed: the request is answered with that
            base = model
        async with self._turn:
            while not self._stop.is_set():
                if self._may_start(base):
                    await self._slots.acquire()
                    if self._may_start(base) and not self._stop.is_set():
                        self._started[model] += 1
                        return True
                    self._slots.release()
                await self._pause(_POLL_S)
        return False

    def _may_start(self, base_model: str) -> bool:
        started = self._started[self._batch.model or ""]
        load = load_of(self._gateway.dispatcher, base_model, started, time.monotonic())
        return may_start(load, self._gateway.settings.batch_start_after_idle)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    async def _store(self, line: InputLine, response: CallResponse) -> None:
        while True:
            try:
                await self._results.add_response(line, response)
            except (Unavailable, StoreFull) as e:
                log.warning("failed to store a result of a batch; retrying", extra={"batch": self._batch.id, "error": e.message})
                await asyncio.sleep(_STORE_RETRY_S)
                if self._stop.is_set():
                    return
            else:
                self._gateway.request_log.metrics.batch_requests.add(1, {"http.response.status_code": response.status})
                return

    async def _report(self) -> None:
        """Record the progress now and then."""
        reported = (0, 0)
        while True:
            await asyncio.sleep(_REPORT_S)
            counts = (self._results.completed, self._results.failed)
            if counts == reported:
                continue
            with contextlib.suppress(Unavailable, StoreFull):
                await self._change(partial(transitions.count, completed=counts[0], failed=counts[1]))
                reported = counts

    # The end.

    async def _finish(self) -> None:
        """Publish all results, or those that exist if the batch was cancelled or has expired."""
        if self._stop.is_set():
            self._batch = (await self._gateway.batches.read(self._owner)).batch(self._batch.id)
            if self._batch.status == "in_progress":
                await self._add_expired()
        else:
            await self._change(partial(transitions.finalize, now=int(time.time())))
        counts = (self._results.completed, self._results.failed)
        files = self._results.stored_files(self._batch, self._gateway.settings.files_ttl)
        output, error = (files[kind].id if kind in files else None for kind in ("output", "error"))

        def finish(batch: Batch) -> Batch:
            counted = transitions.count(batch, *counts)
            return transitions.finish(counted, output, error, int(time.time()))

        state = await self._gateway.batches.change(
            self._owner, lambda s: end_batch(s, self._batch.id, finish, tuple(files.values()))
        )
        self._batch = state.batch(self._batch.id)

    async def _add_expired(self) -> None:
        with contextlib.suppress(NotFound):  # of the content: which requests there were is not known
            await self._add_missing()

    async def _add_missing(self) -> None:
        async with contextlib.aclosing(self._lines()) as lines:
            async for line in lines:
                if isinstance(line, InputLine) and not self._results.has(line.number):
                    await self._results.add_error(
                        line, "batch_expired", "This request could not be executed before the completion window expired"
                    )
