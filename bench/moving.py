"""Common parts of the migration benchmarks: timed streams, and migration orders."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import httpx
from pydantic import SecretStr

from shared.contracts import subjects
from shared.contracts.migration import FINAL, FindRequest, MoveRequest, RequestFound, RequestMoved
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.launcher import until
from tests.support.moving import Roomy, Stream

NODES = ("node-0", "node-1")
Values = dict[str, list[float]]


@dataclass
class Timed(Stream):
    """`at`: arrival times of the tokens, in seconds of the monotonic clock."""

    at: list[float] = field(default_factory=list)
    ended: float = 0.0

    def _take(self, data: str) -> None:
        now = time.monotonic()
        super()._take(data)
        self.at += [now] * (len(self.tokens) - len(self.at))
        self.ended = now

    def tokens_by(self, t: float) -> float:
        """Tokens that had arrived by then; between two tokens a part of the later one."""
        times = list(self.at)
        i = bisect_left(times, t)
        if i == 0 or i == len(times):
            return float(i)
        return i + (t - times[i - 1]) / (times[i] - times[i - 1])


class Bed(Roomy):
    """A mesh, called over HTTP.

    A command of the command line takes this process a tenth of a second, on a core that is
    measured.
    """

    @cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(trust_env=False)

    def close(self) -> None:
        self._client.close()
        super().close()

    def json(self, *arguments: str, timeout: float = 150.0) -> dict[str, Any]:
        match arguments:
            case ("ps",):
                migrations = self._request("GET", "migrations", timeout)["migrations"]
                under_way = [m for m in migrations if m["state"] not in FINAL]
                return self._request("GET", "cluster", timeout) | {"migrations": under_way}
            case ("wake" | "sleep" as verb, model):
                return self._request("POST", f"models/{model}/{verb}", timeout)
        return super().json(*arguments, timeout=timeout)

    def _request(self, method: str, path: str, timeout: float) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.endpoints['admin_key']}"}
        answer = self._client.request(method, f"{self.url}/admin/v1/{path}", headers=headers, timeout=timeout)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def completion(model: str, prompt: int, tokens: int) -> dict[str, Any]:
    """Token ids: exactly so many, whatever the tokeniser."""
    ids = [3 + (i * 7919) % 1000 for i in range(prompt)]
    return {"model": model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "logprobs": 0, "stop": [], "ignore_eos": True}


def begin(mesh: Roomy, model: str, prompt: int, tokens: int, tokens_before: int) -> Timed:
    """Start a stream, and wait until it has generated `tokens_before` tokens."""
    stream = Timed(mesh.url, completion(model, prompt, tokens))
    stream.start()
    await_tokens(stream, tokens_before)
    return stream


def await_tokens(stream: Stream, count: int) -> None:
    """Wait until the stream has generated `count` tokens."""
    until(lambda: len(stream.tokens) >= count or bool(stream.error) or stream.done, 240, f"{count} tokens")
    if stream.error or len(stream.tokens) < count:
        raise RuntimeError(stream.error or f"the stream ended after {len(stream.tokens)} tokens")


def paused_ms(stream: Stream, since: int) -> float:
    """The longest gap after `since` tokens, above the median."""
    gaps = stream.gaps[since:]
    return (max(gaps) - median(gaps)) * 1e3


def get_other_node(node: str) -> str:
    return NODES[1 - NODES.index(node)]


def order(mesh: Roomy, stream: Stream, node: str) -> dict[str, Any] | None:
    """Move the stream there in rounds; the record of its migration.

    None, and why is printed, if it was not done.
    """
    (record,) = mesh.order(request_id=stream.request_id, node=node)["migrations"]
    if record["state"] != "done":
        print(f"a migration is {record['state']}: {record['error']} {record['requests']} {record['rounds']}", flush=True)
        return None
    found: dict[str, Any] = record
    return found


def in_one_go(mesh: Roomy, stream: Stream, source: str, instance: str) -> float:
    """The gateway is asked at once, with nothing prepared.

    Seconds until the first token arrived from there.
    """

    async def move() -> float:
        nats = Mesh(CommonSettings(nats_url=SecretStr(mesh.endpoints["nats_url"])), "bench")
        await nats.start()
        try:
            found = await nats.request(subjects.FIND_REQUEST, FindRequest(request_id=stream.request_id), RequestFound)
            message = MoveRequest(
                deadline_ms=60_000,
                request_id=f"{found.request_id}-1",
                migration_id="bench",
                token=1,
                source_instance=source,
                instance_id=instance,
            )
            began = time.monotonic()
            await nats.request(subjects.gateway_control(found.gateway_id), message, RequestMoved)
            return time.monotonic() - began
        finally:
            await nats.stop()

    return asyncio.run(move())
