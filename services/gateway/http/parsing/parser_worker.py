"""Worker process that parses large bodies for a gateway.

It reads a job from standard input (the length in 8 bytes, then a pickle), writes the result to
standard output in the same form, and ends with its input, so that it never outlives its gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.gateway.http.parsing.request_parser import BodyLimits, ParsedRequest, parse_body
from shared.contracts.base import ErrorBody
from shared.contracts.inference import Endpoint
from shared.errors import PayloadTooLarge, ThawError

log = logging.getLogger(__name__)
LENGTH = struct.Struct("!Q")
_NICENESS = 10
"""Small bodies, which the gateway parses itself, take precedence."""


@dataclass(frozen=True)
class Job:
    """A body, and the request fields that its parsing depends on."""

    endpoint: Endpoint
    body: bytes
    limits: BodyLimits
    route: str
    query: str
    headers: Mapping[str, str]
    history: bytes | None = None


def run_job(job: Job) -> ParsedRequest | ErrorBody:
    """Parse a job.

    Returns:
        The request without its body if that is the job's, which the gateway has, or the error that
        refuses it.
    """
    try:
        parsed = asyncio.run(parse_body(job.endpoint, job.body, job.limits, job.route, job.query, job.headers, job.history))
    except ThawError as e:
        return e.body()
    except MemoryError:
        return PayloadTooLarge("The body needs more memory to be parsed than there is. Send a smaller one").body()
    except Exception:  # the next body needs this process
        log.exception("failed to parse a body")
        return ThawError("The body could not be parsed because of an internal error").body()
    if parsed.engine_request.body is not job.body:  # translated
        return parsed
    return replace(parsed, engine_request=replace(parsed.engine_request, body=b""))


def _be_killed_first() -> None:
    """Have the kernel kill this process rather than the gateway when memory runs out."""
    with contextlib.suppress(OSError):  # no such file on other systems
        Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    """Serve jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent by a terminal; the gateway ends this process
    os.nice(_NICENESS)
    _be_killed_first()
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    results.write(LENGTH.pack(0))  # ready
    results.flush()
    while len(head := jobs.read(LENGTH.size)) == LENGTH.size:
        job = pickle.loads(jobs.read(LENGTH.unpack(head)[0]))
        result = pickle.dumps(run_job(job), pickle.HIGHEST_PROTOCOL)
        results.write(LENGTH.pack(len(result)) + result)
        results.flush()


if __name__ == "__main__":
    main()
