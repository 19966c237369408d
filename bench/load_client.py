"""Concurrent streams of chat completions over raw sockets, timed; one JSON object on standard
output.

    python -m bench.load_client --port PORT --model NAME --streams N --tokens N
        [--requests N | --seconds S] [--stagger S]

Each stream keeps one connection, opens it with a short request that does not count, and then asks
again and again. Time to first token is from the writing of the request to the arrival of the first
non-empty text; a gap is the time between the arrivals of two texts (those that arrive together have
none between them).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools
import uvloop

from shared.percentiles import percentile

_TEXT = re.compile(rb'"content": ?"(?!")')
"""A text that is not empty. Inside a JSON string the quotation marks would be escaped."""
_DONE = b"data: [DONE]"


class Events:
    """Counts the texts of a stream of server-sent events, however it is cut."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """How many texts have become complete."""
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return 0
        whole, self._rest = data[:end], data[end:]
        if _DONE in whole:
            self.done = True
        if b'data: {"error"' in whole:
            raise RuntimeError(whole.decode(errors="replace"))
        return len(_TEXT.findall(whole))


@dataclass
class Tally:
    """Measurements of the streams.

    Attributes:
        tokens: Texts that arrived before the deadline.
        received: All texts.
        cpu_s: CPU seconds of this process.
    """

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    received: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0

    def summary(self) -> dict[str, float]:
        return {
            "ttft_p50_ms": percentile(self.ttft_ms, 50),
            "ttft_p99_ms": percentile(self.ttft_ms, 99),
            "gap_p50_ms": percentile(self.gaps_ms, 50),
            "gap_p99_ms": percentile(self.gaps_ms, 99),
            "gap_mean_ms": sum(self.gaps_ms) / max(1, len(self.gaps_ms)),
            "received": self.received,
            "tokens_per_s": self.tokens / self.elapsed_s,
            "cpu_s": self.cpu_s,
        }


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection; `ask` streams one answer."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._arrived: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    async def ask(self, request: bytes, deadline: float = math.inf, *, counted: bool = True) -> int:
        """The number of texts received.

        Those after the deadline (`time.perf_counter`) are waited for and not tallied.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._events = Events()
        self._texts = 0
        self._counted, self._deadline = counted, deadline
        self._over = asyncio.get_running_loop().create_future()
        self._last = time.perf_counter()
        self._transport.write(request)
        await self._over
        return self._texts

    def on_body(self, body: bytes) -> None:
        self._arrived.append(body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._parser.feed_data(data)
        if not self._arrived:
            return
        body = b"".join(self._arrived)
        self._arrived.clear()
        try:
            if self._parser.get_status_code() != 200:
                raise RuntimeError(body.decode(errors="replace"))
            texts = self._events.feed(body)
        except RuntimeError as e:
            self._over.set_exception(e)
            return
        if texts:
            self._note(texts, now)

    def _note(self, texts: int, now: float) -> None:
        tally, took = self._tally, (now - self._last) * 1e3
        tally.received += texts
        if self._counted and now <= self._deadline:
            (tally.gaps_ms if self._texts else tally.ttft_ms).append(took)
            tally.gaps_ms.extend([0.0] * (texts - 1))
            tally.tokens += texts
        self._texts += texts
        self._last = now

    def on_message_complete(self) -> None:
        # Bytes that arrived with the end are read first.
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over.done():
            self._over.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def close(self) -> None:
        self._transport.close()


def request_of(model: str, tokens: int) -> bytes:
    message = {"role": "user", "content": "Say something about winter."}
    body = json.dumps({"model": model, "messages": [message], "max_tokens": tokens, "stream": True}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(options: argparse.Namespace) -> Tally:
    tally = Tally()
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(lambda: Connection(tally), "127.0.0.1", options.port))[1] for _ in range(options.streams)
    ]
    await asyncio.gather(*(c.ask(request_of(options.model, 2), counted=False) for c in connections))
    request = request_of(options.model, options.tokens)
    cpu, started = _cpu_s(), time.perf_counter()
    deadline = started + options.seconds if options.seconds else math.inf

    async def stream(connection: Connection, delay: float) -> None:
        await asyncio.sleep(delay)
        asked = 0
        while time.perf_counter() < deadline if options.seconds else asked < options.requests:
            asked += 1
            if (texts := await connection.ask(request, deadline)) != options.tokens:
                raise RuntimeError(f"{texts} tokens arrived of {options.tokens}")

    await asyncio.gather(*(stream(c, i * options.stagger) for i, c in enumerate(connections)))
    tally.elapsed_s = options.seconds or time.perf_counter() - started
    tally.cpu_s = _cpu_s() - cpu
    for connection in connections:
        connection.close()
    return tally


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=1, help="of each stream")
    parser.add_argument("--seconds", type=float, default=0.0, help="ask until then, instead of a number of requests")
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between the first requests of two streams")
    return parser.parse_args(arguments)


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tally = runner.run(load(parse(sys.argv[1:])))
    print(json.dumps(tally.summary()))


if __name__ == "__main__":
    main()
