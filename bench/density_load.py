"""Requests of many models at random times over raw sockets, for bench.density.

A request is due at its time whatever became of the earlier ones, and its latency counts from then:
a client that is late, or a connection that is opened for it, is part of the latency.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

OK = 200
LOST = 0
"""The status of a request without a response in time."""


@dataclass(frozen=True)
class Outcome:
    """One request.

    Attributes:
        at_s: When it was due, from the beginning.
        latency_ms: From then to the end of its response.
        status: Of HTTP, or `LOST`.
    """

    model: str
    at_s: float
    latency_ms: float
    status: int


@dataclass
class Load:
    """The outcomes of all requests, and what sending them cost."""

    outcomes: list[Outcome] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    """By how much the client was late, by request."""
    cpu_s: float = 0.0


def draw_arrivals(rates: Mapping[str, float], seconds: float, seed: int) -> list[tuple[float, str]]:
    """Draw the times of the requests of each model (Poisson), in order.

    Args:
        rates: Requests per second by model.
        seconds: The end of the last request.
        seed: The same seed gives the same requests.
    """
    found = []
    for model, rate in rates.items():
        draw = random.Random(f"{seed}/{model}")
        at = draw.expovariate(rate)
        while at < seconds:
            found.append((at, model))
            at += draw.expovariate(rate)
    return sorted(found)


class _Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._done: asyncio.Future[int] | None = None
        self.is_open = True

    async def ask(self, request: bytes) -> int:
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            self._done.set_result(LOST)

    def close(self) -> None:
        self.is_open = False
        self._transport.close()


@dataclass(frozen=True)
class Asking:
    """How models are asked.

    Attributes:
        port: Of the gateway.
        tokens: To generate.
        patience_s: How long a response is waited for.
        words: Random words in a prompt; 0: the same few words in each.
    """

    port: int
    tokens: int
    patience_s: float
    words: int = 0

    def request_of(self, model: str) -> bytes:
        prompt = " ".join(random.choices(_WORDS, k=self.words)) if self.words else "Once upon a time"
        fields = {"model": model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer none\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


_WORDS = ("winter", "river", "a", "the", "stone", "light", "of", "and", "moves", "under", "cold", "sky")


class Client:
    """Asks one gateway, over as many connections as requests are open."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._idle: deque[_Connection] = deque()

    async def ask(self, model: str) -> int:
        """Send one request; return the status of its response, or `LOST`."""
        connection = await self._connect()
        try:
            async with asyncio.timeout(self._asking.patience_s):
                status = await connection.ask(self._asking.request_of(model))
        except TimeoutError:
            connection.close()
            return LOST
        if connection.is_open:
            self._idle.append(connection)
        return status

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        _, made = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", self._asking.port)
        return made

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def ask_each(asking: Asking, models: Sequence[str], at_once: int) -> dict[str, int]:
    """Ask each model once, and return the statuses."""
    client, gate = Client(asking), asyncio.Semaphore(at_once)

    async def ask(model: str) -> int:
        async with gate:
            return await client.ask(model)

    statuses = await asyncio.gather(*map(ask, models))
    client.close()
    return dict(zip(models, statuses, strict=True))


async def ask_in_turn(asking: Asking, models: Sequence[str]) -> list[float]:
    """Return the latency in milliseconds of one request after the other."""
    client, found = Client(asking), []
    for model in models:
        began = time.perf_counter()
        if (status := await client.ask(model)) != OK:
            raise RuntimeError(f"{model} answered with status {status}")
        found.append((time.perf_counter() - began) * 1e3)
    client.close()
    return found


async def measure_capacity(asking: Asking, models: Sequence[str], seconds: float, at_once: int) -> float:
    """Return the requests per second that all models together answer, `at_once` at a time."""
    client, names = Client(asking), itertools.cycle(models)
    answered, began = 0, time.perf_counter()

    async def ask_on() -> None:
        nonlocal answered
        while time.perf_counter() < began + seconds:
            answered += await client.ask(next(names)) == OK

    await asyncio.gather(*(ask_on() for _ in range(at_once)))
    client.close()
    return answered / (time.perf_counter() - began)


async def send(asking: Asking, arrivals: Sequence[tuple[float, str]]) -> Load:
    """Send each request when it is due, and wait for all responses."""
    client, load = Client(asking), Load()
    cpu, began = _cpu_s(), time.perf_counter()

    async def ask(at: float, model: str) -> None:
        load.late_ms.append((time.perf_counter() - began - at) * 1e3)
        status = await client.ask(model)
        load.outcomes.append(Outcome(model, at, (time.perf_counter() - began - at) * 1e3, status))

    async with asyncio.TaskGroup() as tasks:
        for at, model in arrivals:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            tasks.create_task(ask(at, model))
    client.close()
    load.cpu_s = _cpu_s() - cpu
    return load


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
