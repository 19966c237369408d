"""Typed replies: what a handler returns or raises, as bytes, and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from shared.contracts.base import Failure, Message, Request
from shared.errors import DeadlineExceeded, InvalidRequest, PayloadTooLarge, ThawError, from_body

log = logging.getLogger(__name__)
M = TypeVar("M")
R = TypeVar("R", bound=Message)
_MAX_FAULTS = 5


async def answer(subject: str, adapter: TypeAdapter[M], handler: Callable[[M], Awaitable[Message]], body: bytes) -> Message:
    """Return the handler's reply to a request. Every exception becomes a `Failure`."""
    try:
        request = adapter.validate_json(body)
        if isinstance(request, Request):
            async with asyncio.timeout(request.deadline_ms / 1000):
                return await handler(request)
        return await handler(request)
    except ValidationError as e:
        return Failure(error=InvalidRequest(f"Malformed message on {subject}: {faults_of(e)}").body())
    except ThawError as e:
        return Failure(error=e.body())
    except TimeoutError:
        return Failure(error=DeadlineExceeded(f"Not done within the deadline on {subject}").body())
    except Exception as e:
        log.exception("a handler failed", extra={"subject": subject})
        return Failure(error=ThawError(f"{type(e).__name__} while answering {subject}: {e}").body())


def encode_reply(subject: str, reply: Message, limit: int) -> bytes:
    """Return a reply as JSON; a `Failure` instead of one that NATS would not take."""
    data = reply.model_dump_json().encode()
    return data if len(data) <= limit else _too_long(subject, len(data), limit)


def _too_long(subject: str, size: int, limit: int) -> bytes:
    log.warning("an answer was too long to be sent", extra={"subject": subject, "bytes": size})
    error = PayloadTooLarge(
        f"The answer on {subject} would have {size} bytes, and NATS takes {limit}; ask for less, or raise its max_payload"
    )
    return Failure(error=error.body()).model_dump_json().encode()


def decode_reply(data: bytes, reply: type[R]) -> R:
    """Parse a reply. Raises the `ThawError` that the other side answered with."""
    try:
        return reply.model_validate_json(data)
    except ValidationError:
        try:
            failure = Failure.model_validate_json(data)
        except ValidationError as e:
            raise ThawError(f"An unintelligible reply (a newer major version?): {faults_of(e)}") from e
    raise from_body(failure.error)


def faults_of(error: ValidationError) -> str:
    """List a message's validation errors for logs and replies.

    The list has no values, which may be prompts or keys.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [f"{'.'.join(map(str, fault['loc'])) or 'message'}: {fault['msg']}" for fault in found[:_MAX_FAULTS]]
    return "; ".join(shown) + ("; …" if len(found) > _MAX_FAULTS else "")
