"""CPU time of a request in the mesh: handlers called by the NATS client, or by FastStream.

    python -m bench.messages [--requests 500] [--rounds 7] [--json PATH]

One process sends requests to itself over a NATS server of its own, one at a time, in rounds that
take the ways by turns:

    client      `Mesh.respond`: the NATS client calls the handler (ADR 0109)
    faststream  the same answer as a FastStream handler without middlewares, types and logger

The figures are microseconds of CPU time for each request and its reply, medians over the rounds.
They include the sender's part, which is the same for both.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from faststream.nats import NatsBroker, NatsMessage
from pydantic import SecretStr

from bench.report import median, write
from shared.messaging import Mesh
from shared.messaging.mesh import flush
from shared.messaging.replies import answer, encode_reply
from shared.messaging.responders import CONCURRENT_HANDLERS
from shared.settings import CommonSettings
from shared.telemetry.tracing import carried
from tests.support.asking import ASK, Answer, Ask
from tests.support.servers import NatsServer

WAYS = ("client", "faststream")
KINDS = ("serial", "concurrent")


async def handle(ask: Ask) -> Answer:
    return Answer(value=ask.value)


async def whole_message(message: NatsMessage) -> NatsMessage:
    return message


def subject(way: str, kind: str) -> str:
    return f"bench.{way}.{kind}"


def subscribe_faststream(broker: NatsBroker, kind: str, limit: int) -> None:
    """Register a FastStream handler that answers as `Mesh.respond` does."""
    workers: dict[str, Any] = {"max_workers": CONCURRENT_HANDLERS} if kind == "concurrent" else {}
    name = subject("faststream", kind)

    async def reply(message: NatsMessage) -> bytes:
        with carried(message.headers):
            return encode_reply(name, await answer(name, ASK, handle, message.body), limit)

    broker.subscriber(name, decoder=whole_message, **workers)(reply)


async def measure(mesh: Mesh, name: str, requests: int) -> float:
    """Return the CPU time of a request in microseconds."""
    began = time.process_time()
    for value in range(requests):
        reply = await mesh.request(name, Ask(value=value), Answer)
        assert reply.value == value
    return (time.process_time() - began) / requests * 1e6


async def run(options: argparse.Namespace) -> dict[str, float]:
    server = NatsServer()
    mesh = Mesh(CommonSettings(nats_url=SecretStr(server.url)), "bench-messages")
    broker = NatsBroker(server.url, apply_types=False, logger=None)
    try:
        await mesh.start()
        for kind in KINDS:
            await mesh.respond(subject("client", kind), ASK, handle, concurrent=kind == "concurrent").start()
            subscribe_faststream(broker, kind, mesh.max_body)
        await broker.start()
        await mesh.flush()
        await flush(broker.connection)
        found: dict[str, list[float]] = {f"{way}_{kind}": [] for kind in KINDS for way in WAYS}
        for number in range(options.rounds + 1):
            for kind in KINDS:
                for way in WAYS if number % 2 else WAYS[::-1]:
                    us = await measure(mesh, subject(way, kind), options.requests)
                    if number:  # the first round warms up
                        found[f"{way}_{kind}"].append(us)
    finally:
        await broker.stop()
        await mesh.stop()
        server.close()
    figures = {f"{name}_cpu_us": median(values) for name, values in found.items()}
    return figures | {f"faststream_to_client_{k}": figures[f"faststream_{k}_cpu_us"] / figures[f"client_{k}_cpu_us"] for k in KINDS}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(run(options))
    for name, value in figures.items():
        print(f"{name:32} {value:10.2f}")
    write(options.json, figures)


if __name__ == "__main__":
    main()
