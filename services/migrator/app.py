"""Wires the migrator: one connection, the bucket's watch, one loop.

Shutdown: hand over the current migration, then disconnect.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from functools import partial

from services.migrator.adapters.conversations import NatsConversations
from services.migrator.adapters.records import Records
from services.migrator.adapters.telemetry import Metrics
from services.migrator.domain.work import Options
from services.migrator.loop import Migrator
from services.migrator.settings import MigratorSettings
from shared.health import check_migrations, report_health
from shared.messaging import Mesh
from shared.messaging.buckets import BucketWatcher
from shared.messaging.streams import migrations_bucket
from shared.runtime import report_ready
from shared.tasks import end, wait_for_first

log = logging.getLogger(__name__)


async def run(settings: MigratorSettings, stop: asyncio.Event) -> int:
    """Run until `stop` (status 0), or until NATS is lost for good (1)."""
    name = settings.migrator_name or f"{socket.gethostname()}-{os.getpid()}"
    mesh = Mesh(settings, f"migrator-{name}")
    metrics = Metrics()
    if settings.migrator_metrics_port is not None:
        metrics.serve(settings.migrator_metrics_host, settings.migrator_metrics_port)
    # Unique per process: a restarted process must not take its predecessor's leases for its own.
    owner = f"{name}-{uuid.uuid4().hex[:8]}"
    options = Options(settings.migrate_at_once, settings.migrate_pause * 1e3, settings.migrate_kv)
    migrator = Migrator(Records(mesh, owner), NatsConversations(mesh), metrics, options)
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(_serve(mesh, migrator, tasks), name="serve")
            reporting = tasks.create_task(report_health(partial(check_migrations, mesh)), name="health")
            await wait_for_first(stop, mesh.lost)
            await end(serving, reporting, again_s=3.0)
    finally:
        if not mesh.lost.is_set():
            await mesh.stop()
        metrics.close()
    return 1 if mesh.lost.is_set() and not stop.is_set() else 0


async def _serve(mesh: Mesh, migrator: Migrator, tasks: asyncio.TaskGroup) -> None:
    await mesh.start()
    report_ready()
    watching = tasks.create_task(BucketWatcher(mesh, migrations_bucket, migrator.copy).run(), name="watch")
    try:
        await migrator.run()
    finally:
        await end(watching)
