"""Long requests whose responder reports that it still works on them.

NATS core delivers at most once: a server that ends between two processes takes requests and replies
with it, and the requester would wait for its whole deadline, which is minutes for some requests. A
requester that asks for reports (a header) therefore receives an empty message every two seconds
until the reply, and stops waiting when the reports stop. See docs/adr/0001.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from shared.errors import ReplyLost
from shared.tasks import end

_HEADER = "Thaw-Progress"
_REPORTS_EVERY_S = 2.0
_SILENT_S = 8.0
"""Seconds without a report after which a request counts as lost."""
_NO_RESPONDERS = "503"


async def request_with_reports(
    client: Client, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None
) -> Msg:
    """Send a request whose responder reports its progress, and return the reply.

    Raises:
        NoRespondersError: No process subscribes to the subject.
        nats.errors.TimeoutError: No reply within `timeout_s`.
        ReplyLost: The reports have stopped. The request may have been performed.
    """
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    try:
        await client.publish(subject, data, reply=inbox, headers={**(headers or {}), _HEADER: "wanted"})
        async with asyncio.timeout(timeout_s):
            while True:
                message = await subscription.next_msg(timeout=_SILENT_S)
                if (message.headers or {}).get("Status") == _NO_RESPONDERS:
                    raise NoRespondersError
                if _HEADER not in (message.headers or {}):
                    return message
    except NatsTimeoutError as e:
        raise ReplyLost(
            f"The process that works on the request has sent no report for {_SILENT_S:g} s: it has ended, or NATS lost the "
            "request. It may have been performed; repeat it"
        ) from e
    except TimeoutError as e:
        raise NatsTimeoutError from e
    finally:
        with contextlib.suppress(NatsError):
            await subscription.unsubscribe()


@contextlib.asynccontextmanager
async def reports(client: Client, reply: str, headers: Mapping[str, str]) -> AsyncIterator[None]:
    """Report progress to the subject `reply` inside the block, if the request asks for it."""
    if not reply or _HEADER not in headers:
        yield
        return
    task = asyncio.create_task(_report(client, reply), name="report progress")
    try:
        yield
    finally:
        await end(task)


async def _report(client: Client, reply: str) -> None:
    while True:
        await asyncio.sleep(_REPORTS_EVERY_S)
        with contextlib.suppress(NatsError):  # reconnecting: the next report follows
            await client.publish(reply, headers={_HEADER: "working"})
