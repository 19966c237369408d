"""The sources of the console's feeds: the scheduler's view, active requests, and traces."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from services.gateway.adapters.gateway_replies import collect_replies
from services.gateway.domain.console_view import View, active_view, cluster_view, list_latest
from services.gateway.loop import Gateway
from shared.contracts import subjects
from shared.contracts.active_requests import RequestsViewed, ViewRequests
from shared.contracts.admin import ClusterView, ViewCluster
from shared.contracts.traces import RequestTrace, parse_trace
from shared.errors import Unavailable, Unreachable
from shared.messaging.replies import decode_reply

LISTED_REQUESTS = 200
_MAX_READ = 200
"""Traces that one reading fetches. A gateway that is further behind skips the rest."""
_EVERY = f"{subjects.PREFIX}.traces.request.*"


class ClusterSource:
    """The scheduler's view of the cluster."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def read(self) -> Callable[[], View]:
        """Request the view. Raises `Unreachable` while no scheduler leads."""
        try:
            reply = await self._gateway.mesh.fetch(subjects.ADMIN, ViewCluster(brief=True), with_reports=True)
        except Unreachable as e:
            raise Unreachable("No scheduler is the leader: it is stopped, starting, or PostgreSQL refuses it") from e
        return lambda: cluster_view(decode_reply(reply, ClusterView))


class RequestSource:
    """The active requests of all gateways, and the latest traces.

    Traces are read from where the last reading ended.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._traces: deque[RequestTrace] = deque(maxlen=LISTED_REQUESTS)
        self._next = 0

    async def read(self) -> Callable[[], View]:
        """Read active requests and new traces. Raises `Unavailable` while NATS does not answer."""
        active, _ = await asyncio.gather(self._read_active(), self._read_traces())
        traces = list(self._traces)
        return lambda: {"requests": list_latest(traces, LISTED_REQUESTS), **active_view(active)}

    async def _read_active(self) -> list[RequestsViewed]:
        own = self._gateway.view_requests()
        return await collect_replies(self._gateway.mesh, subjects.VIEW_REQUESTS, ViewRequests(), own)

    async def _read_traces(self) -> None:
        js = self._gateway.mesh.nc.jetstream(timeout=2)
        try:
            state = (await js.stream_info(subjects.TRACE_STREAM)).state
            # A stream that was deleted and made again counts from the beginning.
            if self._next > state.last_seq + 1:
                self._traces.clear()
                self._next = 0
            self._next = max(self._next, state.last_seq - _MAX_READ + 1, 1)
            while self._next <= state.last_seq:
                message = await js.get_msg(subjects.TRACE_STREAM, seq=self._next, subject=_EVERY, next=True)
                if (trace := parse_trace(message.data)) is not None:
                    self._traces.append(trace)
                self._next = (message.seq or self._next) + 1
        except NotFoundError:
            pass  # no trace yet, or none after the last one
        except (NatsError, TimeoutError) as e:
            raise Unavailable(f"The traces cannot be read now ({type(e).__name__})") from e
