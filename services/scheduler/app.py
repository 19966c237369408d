"""Wires the scheduler: standby, one term of leadership, standby again.

A term: migrate the schema, take the lock, read the state, listen, ask every node for its status,
and decide, until the lock, the database or the mesh is lost, a newer epoch appears, or the process
is asked to stop. Then stop listening and drop the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from nats.errors import Error as NatsError

from services.scheduler.adapters import clock
from services.scheduler.adapters.catalog import Catalog, ensure_streams
from services.scheduler.adapters.database import DATABASE_ERRORS, Database, migrate, open_database, plain_url, refused_login
from services.scheduler.adapters.gc_tuning import freeze_heap, unfreeze_heap
from services.scheduler.adapters.held_memory import FLUSH_PERIOD_S, HeldMemory
from services.scheduler.adapters.leadership import Term, leadership
from services.scheduler.adapters.ledger import Ledger
from services.scheduler.adapters.load_traces import LoadTraces
from services.scheduler.adapters.loader_records import LoaderRecords
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.adapters.outbox import Outbox
from services.scheduler.adapters.repository import Repository, StaleEpoch
from services.scheduler.domain.events import Recovered
from services.scheduler.domain.lifecycle.deliveries import is_current
from services.scheduler.domain.state.indexes import with_keep_alive
from services.scheduler.handlers import Handlers
from services.scheduler.loop import SchedulerLoop, SteppedDown
from services.scheduler.metrics import Metrics
from services.scheduler.settings import SchedulerSettings
from shared.contracts import subjects
from shared.contracts.node import StatusWanted
from shared.health import LEADER_PERIOD_S, check_leader, report_health
from shared.messaging import Mesh
from shared.messaging.connection import Connection
from shared.runtime import report_ready
from shared.tasks import end, wait_for_first
from shared.telemetry.logs import LogRateLimit

log = logging.getLogger(__name__)
Background = Callable[[], Coroutine[Any, Any, None]]
PRUNE_PERIOD_S = 600.0
HEAP_PERIOD_S = 60.0
LOADER_STATUS_PERIOD_S = 10.0
CATALOG_CHECK_S = 10.0
_RETRY_S = 0.2
_FAILED_S = 1.0
"""Pause before a failed task of the term begins again."""
_TERM_ERRORS = (*DATABASE_ERRORS, NatsError, TimeoutError, StaleEpoch)


async def run(settings: SchedulerSettings, stop: asyncio.Event) -> int:
    """Run until `stop`; return exit status 0 on request, 1 when the mesh is lost."""
    name = settings.scheduler_name or f"{socket.gethostname()}-{os.getpid()}"
    mesh = Mesh(settings, f"scheduler-{name}")
    database = open_database(settings.database_url.get_secret_value())
    metrics = Metrics()
    try:
        with contextlib.ExitStack() as beside:
            if settings.scheduler_metrics_port is not None:
                beside.enter_context(metrics.served(settings.scheduler_metrics_host, settings.scheduler_metrics_port))
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(_serve(settings, mesh, database, name, metrics), name="serve")
                reporting = tasks.create_task(report_health(partial(check_leader, mesh), LEADER_PERIOD_S), name="health")
                await wait_for_first(stop, mesh.lost)
                await end(serving, reporting, again_s=3.0)
    finally:
        if not mesh.lost.is_set():
            await mesh.stop()
        await database.close()
    return 1 if mesh.lost.is_set() and not stop.is_set() else 0


async def _serve(settings: SchedulerSettings, mesh: Mesh, database: Database, name: str, metrics: Metrics) -> None:
    """Lead, repeatedly. A server's failure ends the term; the next one begins when it is back."""
    await mesh.start()
    report_ready()
    above = 0
    migrated = False
    away = LogRateLimit()
    while True:
        try:
            if not migrated:
                await migrate(database.shared)
                migrated = True
            async with leadership(plain_url(settings.database_url.get_secret_value()), above) as term:
                away.reset()
                above = await _lead(settings, mesh, database, term, name, metrics)
        except _TERM_ERRORS as e:
            if away.allows(type(e).__name__):
                refused = refused_login(e)
                log.log(logging.ERROR if refused else logging.WARNING, "not leading", extra={"reason": refused or repr(e)})
            await asyncio.sleep(_RETRY_S)


async def _lead(settings: SchedulerSettings, mesh: Mesh, database: Database, term: Term, name: str, metrics: Metrics) -> int:
    """Run one term; return the epoch that the next one must exceed."""
    repository = Repository(database.shared)
    policy = settings.rules()
    loads = LoadTraces(metrics.plan)
    state = with_keep_alive(await repository.load(term.epoch, clock.now()), policy.profile.keep)
    loop = SchedulerLoop(state, Repository(database.commits), loads, policy)
    js = mesh.nc.jetstream()
    catalog = Catalog(js, mesh.replicas)
    await ensure_streams(js, mesh.replicas)
    migrations = Migrations(mesh, loop.post)
    ledger = Ledger(database.shared, settings.price_list)
    held = HeldMemory(ledger, loop.state, term.epoch, policy.node_lost_after_s)
    await held.load()
    handlers = Handlers(mesh, loop, repository, ledger, policy, name, migrations, held, metrics.suspension)
    is_wanted = partial(is_current, loop.state)
    outbox = Outbox(
        mesh,
        js,
        catalog,
        loads,
        loop.post,
        handlers.reply,
        settings.command_timeout,
        migrations,
        is_wanted,
        handlers.forget_node,
    )
    outbox.reconcile(m.card for m in loop.state.models.values())
    loop.post(Recovered(clock.now()))
    try:
        metrics.loaders = lambda: tuple(seen.status for seen in tuple(loop.state.loaders.values()))
        metrics.nodes = lambda: tuple(loop.state.presence.values())
        own = {
            "tick": partial(_tick, loop, Connection(mesh, clock.now)),
            "held memory": partial(_record_held, held, handlers),
            "reconnections": partial(_ask_again, mesh),
            "catalogue": partial(_check_catalogue, mesh, outbox),
        }
        async with _background_tasks(loop, repository, ledger, term.epoch, migrations, own):
            await handlers.start()
            await mesh.publish(subjects.STATUS_WANTED, StatusWanted())
            deciding = asyncio.create_task(loop.run(outbox), name="decide")
            lost = asyncio.create_task(term.lost.wait(), name="lock lost")
            try:
                await asyncio.wait((deciding, lost), return_when=asyncio.FIRST_COMPLETED)
                if deciding.done():
                    deciding.result()
                log.warning("lost the leader lock", extra={"epoch": term.epoch})
            finally:
                await end(deciding, lost)
    except SteppedDown as e:
        log.warning("stepping down: a newer epoch exists", extra={"mine": term.epoch, "newer": e.epoch})
        return e.epoch
    finally:
        metrics.loaders, metrics.nodes = tuple, tuple
        await handlers.stop()
        await outbox.close()
        loads.close()
    return 0


async def _tick(loop: SchedulerLoop, connection: Connection) -> None:
    while True:
        loop.post(await loop.next_tick(connection))


async def _ask_again(mesh: Mesh) -> None:
    """Ask all nodes for their status after each reconnection: their last messages were lost."""
    reconnected = asyncio.Event()
    with mesh.on_reconnect(reconnected.set):
        while True:
            await reconnected.wait()
            reconnected.clear()
            try:
                await mesh.publish(subjects.STATUS_WANTED, StatusWanted())
            except NatsError as e:  # the next reconnection asks
                log.warning("failed to ask for the nodes' status", extra={"error": repr(e)})


async def _check_catalogue(mesh: Mesh, outbox: Outbox) -> None:
    """Check the catalogue after each reconnection, and periodically: JetStream may have lost it.

    In a cluster the server that kept it need not be the one that this process is connected to.
    """
    reconnected = asyncio.Event()
    with mesh.on_reconnect(reconnected.set):
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CATALOG_CHECK_S):
                    await reconnected.wait()
            reconnected.clear()
            outbox.check_catalogue()


async def _record_held(held: HeldMemory, handlers: Handlers) -> None:
    while True:
        await asyncio.sleep(FLUSH_PERIOD_S)
        try:
            await held.flush(clock.now())
        except (*DATABASE_ERRORS, StaleEpoch) as e:
            log.warning("failed to record the memory held; it is recorded later", extra={"error": repr(e)})
        else:
            handlers.spending.note_held()


async def _repeat(name: str, timer: Background) -> None:
    """Run a task that never returns, and begin it again if it fails.

    Its failure does not end the term, which would otherwise continue without it.
    """
    while True:
        try:
            await timer()
        except Exception:
            log.exception("a task of the term failed; it begins again", extra={"task": name})
        await asyncio.sleep(_FAILED_S)


@contextlib.asynccontextmanager
async def _background_tasks(
    loop: SchedulerLoop,
    repository: Repository,
    ledger: Ledger,
    epoch: int,
    migrations: Migrations,
    more: Mapping[str, Background],
) -> AsyncIterator[None]:
    """Run the tasks beside a term: timers, and the watch on migrations.

    A task that fails is logged and begun again.
    """

    async def prune() -> None:
        while True:
            try:
                await repository.prune(epoch, clock.now())
                await ledger.prune(epoch, clock.hour())
            except (*DATABASE_ERRORS, StaleEpoch) as e:
                log.warning("failed to prune old plans", extra={"error": repr(e)})
            await asyncio.sleep(PRUNE_PERIOD_S)

    async def settle() -> None:
        while True:
            await loop.wait_until_idle()
            freeze_heap()
            await asyncio.sleep(HEAP_PERIOD_S)

    async def remember() -> None:
        records = LoaderRecords(repository, epoch)
        while True:
            await asyncio.sleep(LOADER_STATUS_PERIOD_S)
            try:
                await records.write_changes(loop.state.loaders)
            except (*DATABASE_ERRORS, StaleEpoch) as e:
                log.warning("failed to persist loader status", extra={"error": repr(e)})

    timers: dict[str, Background] = {
        "prune": prune,
        "settle": settle,
        "remember": remember,
        "migrations": migrations.watch,
        **more,
    }
    tasks = [asyncio.create_task(_repeat(name, timer), name=name) for name, timer in timers.items()]
    try:
        yield
    finally:
        await end(*tasks)
        unfreeze_heap()
