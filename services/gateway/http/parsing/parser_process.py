"""Parsing of large bodies in a worker process.

A JSON parser holds the interpreter lock for a whole body: 1 MB made to be slow delays every other
request by 20 ms. Bodies of `LARGE_BYTES` or more go to one worker process, in order. It starts with
the first large body, which the gateway parses itself without waiting; the next ones wait until the
worker is ready. The worker ends when no large body has arrived for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import sys
from collections.abc import Mapping

from services.gateway.http.parsing.parser_worker import LENGTH, Job
from services.gateway.http.parsing.request_parser import ParsedRequest, parse_body
from shared.contracts.base import ErrorBody
from shared.contracts.inference import Endpoint
from shared.errors import Unavailable, from_body

log = logging.getLogger(__name__)

LARGE_BYTES = 64 * 1024
_START_S = 60.0
_JOB_S = 60.0
_IDLE_S = 300.0
_MAX_RESULT_BYTES = 1 << 30


class ParserProcess:
    """Parse request bodies, large ones in a worker process."""

    def __init__(self, max_values: int, *, idle_s: float = _IDLE_S) -> None:
        self._max_values = max_values
        self._idle_s = idle_s
        self._turn = asyncio.Lock()
        self._worker: asyncio.subprocess.Process | None = None
        self._is_ready = False
        self._starting: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id once it accepts jobs."""
        return self._worker.pid if self._worker is not None and self._is_ready else None

    async def parse(self, endpoint: Endpoint, body: bytes, route: str, query: str, headers: Mapping[str, str]) -> ParsedRequest:
        """Return the parsed request.

        Raises:
            ThawError: The body is refused; see `parse_body`.
            Unavailable: The worker process ended, or took too long.
        """
        if len(body) < LARGE_BYTES or not await self._has_worker():
            return await parse_body(endpoint, body, self._max_values, route, query, headers)
        job = Job(endpoint, body, self._max_values, route, query, headers)
        async with self._turn:
            result = await self._run(job)
        if isinstance(result, ErrorBody):
            raise from_body(result)
        return ParsedRequest(result.request, result.engine_request.with_body(body))

    async def close(self) -> None:
        """End the worker process."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._end()

    async def _has_worker(self) -> bool:
        """Whether a worker accepts jobs.

        Waits for one that is starting, and starts one if there is none.
        """
        while self._starting is not None and not self._starting.done():  # another body may start the next worker meanwhile
            await asyncio.shield(self._starting)
        if self._is_ready and self._worker is not None and self._worker.returncode is None:
            return True
        self._is_ready = False
        self._starting = asyncio.create_task(self._start(), name="parser")
        return False

    async def _start(self) -> None:
        await self._end()
        command = (sys.executable, "-m", parser_module())
        try:
            self._worker = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20
            )
            async with asyncio.timeout(_START_S):
                await self._receive(self._worker)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as e:
            log.warning("failed to start the parser process; the gateway parses large bodies", extra={"error": repr(e)})
            await self._end()
            return
        self._is_ready = True
        self._await_idle()

    async def _run(self, job: Job) -> ParsedRequest | ErrorBody:
        worker = self._worker
        if worker is None or not self._is_ready:  # ended while this body waited for its turn
            raise _worker_ended()
        self._await_idle()
        try:
            async with asyncio.timeout(_JOB_S):
                return await self._exchange(worker, job)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as e:
            log.warning("parser process failed", extra={"error": repr(e), "body_bytes": len(job.body)})
            await self._end()
            raise _worker_ended() from e
        except asyncio.CancelledError:
            await self._end()  # its result would be read as that of the next job
            raise

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


def _worker_ended() -> Unavailable:
    return Unavailable("The process that parses large bodies ended. Repeat the request")
