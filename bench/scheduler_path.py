"""Decisions that are kept: from an event to its plan in PostgreSQL and its commands on NATS.

    python -m bench.scheduler_path [--devices N] [--decisions N] [--at-once 1,16,256] [--json PATH]

The scheduler's own loop, repository and outbox, with real servers from their wheels (PostgreSQL
waits for its disk at every commit); nodes are one process that says yes to every command. Demand
arrives for models that have no instance, `--at-once` of them at a time: the next one when one has
been answered, which is after its plan is committed. A decision counts when its node has the command
to start the instance. `CPU ms` is this process's time for each, which other work on the machine
does not change.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from bench.report import write
from bench.scheduler import Cluster
from services.scheduler.adapters import clock
from services.scheduler.adapters.catalog import Catalog, ensure_streams
from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.gc_tuning import freeze_heap, unfreeze_heap
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.events import DemandReceived
from services.scheduler.domain.lifecycle.deliveries import is_current
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.changes import Put
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Entity
from services.scheduler.loop import SchedulerLoop
from shared.contracts.base import Done
from shared.contracts.demand import Demand
from shared.contracts.subjects import PREFIX
from shared.messaging import Mesh
from shared.messaging.mesh import flush
from shared.percentiles import percentile
from shared.settings import CommonSettings
from tests.support.servers import NatsServer, PostgresServer

COUNT = "bench.started"


@dataclass
class Answers:
    """Replies of the loop, by waiter."""

    waiting: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    def __call__(self, reply: ReplyTo) -> None:
        if (found := self.waiting.pop(reply.waiter, None)) is not None:
            found.set_result(None)


async def obey(url: str) -> None:
    """The nodes' process: `Done` to every command; counts the starts."""
    client = Client()
    await client.connect(url)
    done, starts = Done().model_dump_json().encode(), 0

    async def answer(message: Msg) -> None:
        nonlocal starts
        starts += b'"kind":"start"' in message.data
        await message.respond(done)

    async def count(message: Msg) -> None:
        await message.respond(str(starts).encode())

    for part in ("node", "loader"):
        await client.subscribe(f"{PREFIX}.{part}.*.command", cb=answer)
    await client.subscribe(COUNT, cb=count)
    await flush(client)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def measure(nats: str, database: str, devices: int, decisions: int, at_once: int) -> tuple[float, list[float], float]:
    """Return decisions per second, and the seconds and CPU seconds of each.

    The rate counts persisted decisions. The seconds are from each demand to its reply; CPU seconds
    are this process's for each decision.
    """
    cluster = Cluster(devices, 2, cold=decisions)
    engine = connect(database)
    await migrate(engine)
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats)), "bench")
    await mesh.start()
    js = mesh.nc.jetstream()
    await ensure_streams(js)
    loads, answers, repository = LoadTraces(), Answers(), Repository(engine)
    try:
        async with leadership(plain_url(database)) as term:
            state = cluster.state
            state.epoch = term.epoch
            kept: list[Entity] = [*state.models.values(), *state.nodes.values(), *state.instances.values()]
            await repository.commit(term.epoch, [Put(entity) for entity in kept])
            loop = SchedulerLoop(state, repository, loads, Policy())
            migrations, is_wanted = Migrations(mesh, loop.post), partial(is_current, state)
            outbox = Outbox(mesh, js, Catalog(js), loads, loop.post, answers, 10.0, migrations, is_wanted, lambda node: None)
            deciding = asyncio.create_task(loop.run(outbox))
            freeze_heap()
            before = await _count_started(mesh)
            took: list[float] = []
            todo = iter(cluster.cold)
            began, cpu = time.monotonic(), time.process_time()
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(_ask(loop, answers, todo, took))
            async with asyncio.timeout(60):
                while await _count_started(mesh) - before < decisions:  # a round trip each time
                    pass
            seconds, used = time.monotonic() - began, time.process_time() - cpu
            _check(state, decisions)
            deciding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await deciding
            await outbox.close()
    finally:
        unfreeze_heap()
        loads.close()
        await mesh.stop()
        await engine.dispose()
    return decisions / seconds, took, used / decisions


async def _ask(loop: SchedulerLoop, answers: Answers, todo: Iterator[str], took: list[float]) -> None:
    for name in todo:
        answered = answers.waiting[name] = asyncio.get_running_loop().create_future()
        asked = time.monotonic()
        loop.post(DemandReceived(clock.now(), Demand(gateway="g", model=name, waiting=1), name))
        await answered
        took.append(time.monotonic() - asked)


async def _count_started(mesh: Mesh) -> int:
    return int((await mesh.nc.request(COUNT, b"", timeout=10)).data)


def _check(state: ClusterState, decisions: int) -> None:
    started = [i for i in state.instances.values() if i.ready_at is None and i.sent_at is not None]
    if len(started) != decisions:
        raise RuntimeError(f"{len(started)} of {decisions} models were started: too few devices?")


async def run(devices: int, decisions: int, at_once: list[int]) -> dict[str, float]:
    figures: dict[str, float] = {}
    nats, postgres = NatsServer(), PostgresServer(durable=True)
    nodes = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.scheduler_path", "--obey", nats.url, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert nodes.stdout is not None
        await nodes.stdout.readline()
        for number in at_once:
            database = postgres.create_database(f"bench_{number}")
            rate, took, used = await measure(nats.url, database, devices, decisions, number)
            figures |= {
                f"{number}.per_second": rate,
                f"{number}.p50_ms": percentile(took, 50) * 1e3,
                f"{number}.p99_ms": percentile(took, 99) * 1e3,
                f"{number}.cpu_ms": used * 1e3,
            }
    finally:
        with contextlib.suppress(ProcessLookupError):
            nodes.kill()
        await nodes.wait()
        postgres.close()
        nats.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--decisions", type=int, default=1000, help="at most one for each device")
    parser.add_argument("--at-once", default="1,16,256")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--obey", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.obey:
        asyncio.run(obey(options.obey))
        return
    figures = asyncio.run(run(options.devices, options.decisions, [int(n) for n in options.at_once.split(",")]))
    table = Table(
        "at once", "kept per second", "p50 ms", "p99 ms", "CPU ms", title=f"From demand to a kept plan, {options.devices:,} devices"
    )
    for number in options.at_once.split(","):
        table.add_row(number, *(f"{figures[f'{number}.{name}']:,.2f}" for name in ("per_second", "p50_ms", "p99_ms", "cpu_ms")))
    Console(width=100).print(table)
    write(options.json, figures)


if __name__ == "__main__":
    main()
