"""The latest requests and starts of the mesh as the files that the simulator reads.

`thaw simulate --from-mesh` writes the same files. Traces are copied as they are stored: the gateway
parses only what selects them.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from pathlib import Path

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from shared.contracts import subjects
from shared.contracts.admin import ClusterView
from shared.contracts.simulation import MAX_REPLAYED, MAX_STARTS
from shared.errors import Unavailable
from shared.messaging import Mesh

_EVERY = f"{subjects.PREFIX}.traces.request.*"
_MAX_READ = 2 * MAX_REPLAYED
"""Stored traces that are read at most; those of starts lie between those of requests."""


async def write_recording(mesh: Mesh, view: ClusterView, directory: Path, since: float) -> None:
    """Write the cluster, the requests received since a time, and the starts that they waited for.

    Args:
        since: Unix seconds.

    Raises:
        Unavailable: The traces cannot be read now.
    """
    js = mesh.nc.jetstream(timeout=5)
    try:
        requests, plans = await _read_requests(js, since)
        loads = [found for plan in plans if (found := await _read_load(js, plan)) is not None]
    except (NatsError, TimeoutError) as e:
        raise Unavailable(f"The traces cannot be read now ({type(e).__name__}). Repeat the request", should_retry=True) from e
    await asyncio.to_thread(_write, directory, view, requests, loads)


async def _read_requests(js: JetStreamContext, since: float) -> tuple[list[bytes], list[str]]:
    """Return the requests in the order in which they were stored, and the plans of their starts."""
    requests: deque[bytes] = deque(maxlen=MAX_REPLAYED)
    plans: deque[str] = deque(maxlen=MAX_REPLAYED)
    try:
        state = (await js.stream_info(subjects.TRACE_STREAM)).state
        at = max(1, state.last_seq - _MAX_READ + 1)
        while at <= state.last_seq:
            message = await js.get_msg(subjects.TRACE_STREAM, seq=at, subject=_EVERY, next=True)
            at = (message.seq or at) + 1
            # A trace is stored after its request was received.
            if message.time is not None and message.time.timestamp() < since:
                continue
            trace = json.loads(message.data or b"{}")
            if trace.get("received", 0.0) >= since:
                requests.append(message.data or b"")
                plans.append(trace.get("load_plan_id") or "")
    except NotFoundError:
        pass  # no trace yet, or none after the last one
    return list(requests), list(dict.fromkeys(filter(None, plans)))[-MAX_STARTS:]


async def _read_load(js: JetStreamContext, plan_id: str) -> bytes | None:
    try:
        return (await js.get_last_msg(subjects.TRACE_STREAM, subjects.load_trace(plan_id))).data
    except NotFoundError:
        return None


def _write(directory: Path, view: ClusterView, requests: list[bytes], loads: list[bytes]) -> None:
    (directory / "mesh.json").write_text(view.model_dump_json())
    (directory / "requests.jsonl").write_bytes(b"".join(r + b"\n" for r in requests))
    (directory / "loads.jsonl").write_bytes(b"".join(r + b"\n" for r in loads))
