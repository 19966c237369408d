"""Parsing of large bodies in a worker process.

A JSON parser holds the interpreter lock for a whole body: 1 MB made to be slow delays every other
request by 20 ms. Bodies of `LARGE_BYTES` or more go to one worker process, in order. The first one
starts it, and it ends when no large body has arrived for a while.

A body whose worker crashes or exceeds the time limit is refused; the bodies behind it go to the
next worker. Once a worker has crashed, the gateway parses no large body itself. See docs/adr/0053.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace

from services.gateway.http.parsing.parser_worker import LENGTH, Job
from services.gateway.http.parsing.request_parser import BodyLimits, ParsedRequest, parse_body
from shared.contracts.base import ErrorBody
from shared.contracts.inference import Endpoint
from shared.errors import DeadlineExceeded, Unavailable, from_body
from shared.tasks import run_within

log = logging.getLogger(__name__)

LARGE_BYTES = 64 * 1024
_START_S = 30.0
_JOB_S = 20.0
"""Longest time for one body; 8 MB take less than a second on an idle machine. Pauses of the machine
do not count.
"""
_IDLE_S = 300.0
_MAX_RESULT_BYTES = 1 << 30


class ParserProcess:
    """Parse request bodies, large ones in a worker process."""

    def __init__(self, limits: BodyLimits, *, idle_s: float = _IDLE_S) -> None:
        self._limits = limits
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._worker: asyncio.subprocess.Process | None = None
        self._is_ready = False
        self._has_crashed = False
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id once it accepts jobs."""
        return self._worker.pid if self._worker is not None and self._is_ready else None

    async def parse(
        self, endpoint: Endpoint, body: bytes, route: str, query: str, headers: Mapping[str, str], history: bytes | None = None
    ) -> ParsedRequest:
        """Return the parsed request; the arguments are those of `parse_body`.

        Raises:
            ThawError: The body is refused; see `parse_body`.
            Unavailable: The worker process crashed on this body, or none starts after a crash.
            DeadlineExceeded: The worker process took too long.
        """
        result = None
        if len(body) + len(history or b"") >= LARGE_BYTES:
            result = await self._parse_in_worker(Job(endpoint, body, self._limits, route, query, headers, history))
        if result is None:
            return await parse_body(endpoint, body, self._limits, route, query, headers, history)
        if isinstance(result, ErrorBody):
            raise from_body(result)
        return result if result.engine_request.body else replace(result, engine_request=result.engine_request.with_body(body))

    async def close(self) -> None:
        """End the worker process."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        await self._end()

    async def _parse_in_worker(self, job: Job) -> ParsedRequest | ErrorBody | None:
        """Run a job in its turn; None if there is no worker."""
        async with self._turn:
            try:
                worker = await self._ready_worker()
                return await self._run(worker, job) if worker is not None else None
            except asyncio.CancelledError:
                await self._end()  # its result would be read as that of the next job
                raise

    async def _ready_worker(self) -> asyncio.subprocess.Process | None:
        """Return a worker that accepts jobs; None if it does not start."""
        if self._is_ready and self._worker is not None and self._worker.returncode is None:
            return self._worker
        await self._end()
        try:
            return await self._start()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as e:
            await self._end()
            log.warning("failed to start the parser process", extra={"error": repr(e)})
            if self._has_crashed:
                raise Unavailable("The process that parses large bodies cannot be started. Repeat the request later") from e
            return None

    async def _start(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", parser_module())
        pipe = asyncio.subprocess.PIPE
        self._worker = worker = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
        async with asyncio.timeout(_START_S):
            await self._receive(worker)
        self._is_ready = True
        return worker

    async def _run(self, worker: asyncio.subprocess.Process, job: Job) -> ParsedRequest | ErrorBody:
        self._await_idle()
        try:
            return await run_within(_JOB_S, self._exchange(worker, job))
        except TimeoutError as e:
            await self._on_crash(e, job)
            raise DeadlineExceeded(
                f"The body could not be parsed within {_JOB_S:g} s. Send a smaller or a simpler one", should_retry=False
            ) from e
        except (OSError, asyncio.IncompleteReadError) as e:
            await self._on_crash(e, job)
            raise Unavailable("The process that parses large bodies ended while it parsed this one. Repeat the request") from e

    async def _on_crash(self, error: Exception, job: Job) -> None:
        log.warning("parser process failed", extra={"error": repr(error), "body_bytes": len(job.body)})
        self._has_crashed = True
        await self._end()

    async def _exchange(self, worker: asyncio.subprocess.Process, job: Job) -> ParsedRequest | ErrorBody:
        assert worker.stdin is not None
        message = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        worker.stdin.write(LENGTH.pack(len(message)))
        worker.stdin.write(message)
        await worker.stdin.drain()
        result = pickle.loads(await self._receive(worker))
        assert isinstance(result, ParsedRequest | ErrorBody)
        return result

    async def _receive(self, worker: asyncio.subprocess.Process) -> bytes:
        assert worker.stdout is not None
        (size,) = LENGTH.unpack(await worker.stdout.readexactly(LENGTH.size))
        if size > _MAX_RESULT_BYTES:
            raise OSError(f"a result of {size} bytes")
        return await worker.stdout.readexactly(size)

    def _await_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._retire)

    def _retire(self) -> None:
        """Close the worker's input, which ends it, unless a job is in progress."""
        if self._turn.locked() or self._worker is None or self._worker.stdin is None:
            self._await_idle()
            return
        self._is_ready = False
        self._worker.stdin.close()

    async def _end(self) -> None:
        worker, self._worker, self._is_ready = self._worker, None, False
        if worker is None:
            return
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


def parser_module() -> str:
    """Return the name of the worker's module."""
    return "services.gateway.http.parsing.parser_worker"
