"""Measure nats-server's memory while the mesh's two large streams fill up.

The streams fill up to their limits and then turn over.

    python -m bench.soak_nats [--keyed-bytes 33MB] [--rounds N] [--keys N]

A soak of hours sees these streams grow, and NATS with them; this shows in minutes where that ends.
Each round publishes traces of 1,400 bytes and, for each of twice as many keys, 14 replies of 220
bytes, the sizes that `bench.soak` writes; reads some back; and prints the server's resident memory.
"""

from __future__ import annotations

import argparse
import asyncio

import nats
import psutil
from nats.js import JetStreamContext
from rich.console import Console
from rich.table import Table

from shared.contracts import subjects
from shared.messaging.streams import ensure_keyed_stream, ensure_trace_stream
from tests.support.servers import NatsServer
from thaw.units import format_size, parse_size

_REPLIES, _REPLY_BYTES, _TRACE_BYTES = 14, 220, 1400
_SETTLE_S = 12.0
"""NATS drops blocks without a reader for ten seconds from its cache."""
_AGE_S = 24 * 3600


def server_process(server: NatsServer) -> psutil.Process:
    """The process that listens on the server's port."""
    for process in psutil.Process().children():
        if any(c.laddr.port == server.port for c in process.net_connections(kind="tcp")):
            return process
    raise RuntimeError(f"no child of this process listens on port {server.port}")


async def publish(js: JetStreamContext, turn: int, keys: int) -> None:
    trace, keyed = (s.removesuffix(".>") for s in (subjects.TRACE_SUBJECTS, subjects.KEYED_SUBJECTS))
    for number in range(keys):
        name = f"{turn}-{number}"
        sent = [js.publish(f"{keyed}.{name}", b"y" * _REPLY_BYTES) for _ in range(_REPLIES)]
        if number % 2:
            sent.append(js.publish(f"{trace}.{name}", b"x" * _TRACE_BYTES))
        await asyncio.gather(*sent)


async def measure(keyed_bytes: int, rounds: int, keys: int, table: Table) -> None:
    server = NatsServer()
    try:
        process = server_process(server)
        connection = await nats.connect(server.url)
        js = connection.jetstream()
        await ensure_trace_stream(js)
        await ensure_keyed_stream(js, _AGE_S, keyed_bytes)
        for turn in range(rounds):
            await publish(js, turn, keys)
            traces, keyed = [(await js.stream_info(s)).state for s in (subjects.TRACE_STREAM, subjects.KEYED_STREAM)]
            await js.get_msg(subjects.TRACE_STREAM, traces.first_seq)
            await asyncio.sleep(_SETTLE_S)
            resident = format_size(process.memory_info().rss)
            table.add_row(f"{traces.messages:,}", f"{keyed.messages:,}", format_size(keyed.bytes), resident)
        await connection.close()
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak_nats")
    parser.add_argument("--keyed-bytes", type=parse_size, default=33_000_000, help="bound of the stream of keyed replies")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--keys", type=int, default=2000, help="keys of a round")
    arguments = parser.parse_args()
    table = Table("traces", "keyed replies", "their bytes", "resident memory of nats-server")
    asyncio.run(measure(arguments.keyed_bytes, arguments.rounds, arguments.keys, table))
    Console().print(table)


if __name__ == "__main__":
    main()
