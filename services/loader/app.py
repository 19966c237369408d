"""The loader process: one NATS connection, one loop, its threads.

Start: take the node's lock, recover the pool, then subscribe: no command arrives before the state
is known. Shutdown: unsubscribe, refuse waiting requests, cancel loads, publish the last status,
disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial

from nats.errors import Error as NatsError
from pydantic import TypeAdapter

from services.loader.adapters.device_copies import Copies
from services.loader.adapters.peer_sharing import Sharing
from services.loader.adapters.pretouching import Pretouching
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.records import Records
from services.loader.adapters.run import Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.events import Event
from services.loader.handlers import Loader
from services.loader.kv_lending import KvLending
from services.loader.local_socket import LocalReaders, listening
from services.loader.settings import LoaderSettings
from shared.contracts import subjects
from shared.contracts.loader import LOADER_COMMAND, LoaderStatus, ReadModelFile
from shared.contracts.loader_socket import loader_socket
from shared.contracts.node import STATUS_INTERVAL_S, NodeOutline
from shared.contracts.segment import segment_prefix
from shared.errors import Conflict
from shared.health import check_status, report_health
from shared.messaging import Mesh
from shared.private import make_private
from shared.runtime import report_ready
from shared.tasks import end, wait_for_first
from shared.telemetry.logs import LogRateLimit
from weights.devices.opening import Devices, has_driver, load_driver, with_arenas
from weights.devices.pacing import Pacer
from weights.devices.probe import group_bytes
from weights.pool.chunks import CHUNK_BYTES, Chunks
from weights.pool.host_backing import host
from weights.pool.memory import PoolMemory
from weights.pool.shm import SHM, default_dram_bytes, default_ready_bytes, physical_memory
from weights.pool.sweeping import sweep
from weights.store.generations import file_name, remove_unmapped, retire
from weights.store.gpu_device import gpu_devices
from weights.store.node_devices import NodeDevices
from weights.store.probe import group_bytes as separate_group_bytes
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice

log = logging.getLogger(__name__)
_WARN_WITHIN_S = 2
_BETWEEN_STATUSES_S = 0.05
"""Changes within this interval share one status."""
_SLOWEST_STATUSES_S = 0.5
_STATUS_SHARE = 0.02
"""Maximum share of its time that a loader spends on statuses less than `_SLOWEST_STATUSES_S` apart.
"""


async def run(settings: LoaderSettings, stop: asyncio.Event) -> int:
    """Serve until `stop` (status 0), or until NATS is lost for good (1)."""
    prefix = segment_prefix(settings.home, settings.node)
    try:
        make_private(settings.node_state, 0o755)
        records = Records(settings.node_state / "loader", prefix)
    except OSError as e:
        log.error(f"cannot start: {e}")
        return 2
    try:
        with records.hold_lock():
            return await _serve(settings, stop, records)
    except Conflict as e:
        log.error(e.message)
        return 1


async def _serve(settings: LoaderSettings, stop: asyncio.Event, records: Records) -> int:
    """Serve with a pool.

    The pool survives a kill, and a shutdown while instances hold weights in it; else the shutdown
    removes it.
    """
    known = KnownUnits()
    gpus = _gpus(settings, known)
    on_populated, on_punch = (gpus.pin, gpus.unpin) if gpus is not None else (None, None)
    pool = PoolMemory(records.pool_name, pool_bytes(), keep=True, on_populated=on_populated, on_punch=on_punch)
    await asyncio.to_thread(sweep)
    boot_id = uuid.uuid4().hex
    separate = await asyncio.to_thread(_separate, settings, records.prefix, boot_id, known)
    devices = NodeDevices(separate, gpus, known, _pacers(settings)) if gpus is not None or separate else None
    sharing = Sharing(settings)
    held = True
    memory = Pretouching(settings.pretouch, machine := host(), settings.home / "pretouch")
    takes_back = machine.takes_back
    try:
        loader = await _adopting(
            settings, boot_id, records, pool, sharing, devices, memory, with_gpu=gpus is not None, takes_back=takes_back
        )
        readers = LocalReaders(
            loader, SHM, f"socket-{uuid.uuid4().hex[:8]}", KvLending(lambda: devices.paged if devices is not None else {})
        )
        async with listening(loader_socket(settings.node_state), readers), asyncio.TaskGroup() as tasks:
            ready = tasks.create_task(loader.keep_ready(), name="ready")
            touching = tasks.create_task(memory.run(loader.last_busy_at, loader.changed.set), name="pretouch")
            audits = tasks.create_task(loader.keep_audited(), name="audits")
            status = await _serve_mesh(settings, stop, loader, sharing)
            await end(ready, audits, touching)
        held = loader.has_holders
        return status
    finally:
        await asyncio.to_thread(sharing.close)
        pool.close(unlink=not held)


def _gpus(settings: LoaderSettings, known: KnownUnits) -> Devices | None:
    """Return the GPUs, not opened yet; None without a driver."""
    if not has_driver():
        return None
    reuse_bytes = settings.cuda_reuse_bytes
    open_device = (
        gpu_devices(reuse_bytes, known, lends_kv=settings.cuda_lend_kv, verify=settings.verify)
        if reuse_bytes is not None
        else with_arenas
    )
    return Devices(load_driver, partial(group_bytes, cache=settings.node_state / "loader" / "buses.json"), open_device)


def _separate(settings: LoaderSettings, prefix: str, boot_id: str, known: KnownUnits) -> dict[str, SeparateDevice]:
    """Open the cpu devices with memory of their own. Blocks."""
    wanted = settings.separate_devices
    remove_unmapped(prefix, frozenset(wanted))
    return {
        device: SeparateDevice(
            device,
            found.bytes or 0,
            file_name(prefix, device, boot_id),
            earlier=retire(prefix, device),
            verify=settings.verify,
            known=known,
            host_bytes_per_second=found.host_bytes_per_second,
            group_bytes=separate_group_bytes(device, found.host_bytes_per_second),
            numa_node=found.numa_node,
        )
        for device, found in wanted.items()
    }


def _pacers(settings: LoaderSettings) -> dict[frozenset[str], Pacer]:
    """Return the paced links between separate devices."""
    devices = settings.separate_devices.items()
    return {frozenset((d, peer)): Pacer(rate) for d, wanted in devices for peer, rate in wanted.peer_bytes_per_second}


async def _adopting(
    settings: LoaderSettings,
    boot_id: str,
    records: Records,
    pool: PoolMemory,
    sharing: Sharing,
    devices: NodeDevices | None,
    memory: Pretouching,
    *,
    with_gpu: bool,
    takes_back: bool,
) -> Loader:
    """Make a loader with the state of an earlier one."""

    def workers(emit: Callable[[Event], None]) -> tuple[Runs, Reclaimer]:
        threads = Threads(settings.loader_threads, settings.loader_remote_threads)
        copies = Copies(devices, pool, emit, sharing.sources.is_on_disk) if devices is not None else None
        runs = Runs(
            pool,
            sharing.sources,
            emit,
            threads,
            settings.loader_order,
            copies,
            verify=settings.verify,
            free_memory=memory.give_back,
        )
        sharing.measure_by(runs.speed_of)
        sharing.share_memory(runs.find_resident)
        return runs, Reclaimer(pool, emit)

    budget = default_dram_bytes() if settings.dram_bytes is None else settings.dram_bytes
    loader = Loader(
        settings.node, boot_id, records, sharing.sources, workers, Chunks(pool.count, budget), pretouch=lambda: memory.progress
    )
    found, mapped = await asyncio.to_thread(records.recover, pool)
    if settings.dram_ready_bytes is None:
        ready = default_ready_bytes(budget, with_gpu=with_gpu, takes_back=takes_back)
        loader.adopt(found, mapped, ready // CHUNK_BYTES, at_once=False)
    else:
        loader.adopt(found, mapped, settings.dram_ready_bytes // CHUNK_BYTES)
    return loader


async def _serve_mesh(settings: LoaderSettings, stop: asyncio.Event, loader: Loader, sharing: Sharing) -> int:
    mesh = Mesh(settings, f"loader-{settings.node}")
    commands = mesh.respond(subjects.loader_command(settings.node), LOADER_COMMAND, loader.handle, concurrent=True)
    files = mesh.respond(subjects.loader_files(settings.node), TypeAdapter(ReadModelFile), loader.read_file, concurrent=True)
    mesh.listen(subjects.node_status(settings.node), NodeOutline, loader.on_node_status)
    if settings.peers:
        mesh.listen(subjects.ALL_LOADER_STATUS, LoaderStatus, sharing.peers.on_status)
    if not await mesh.start_unless(stop):
        await loader.stop()
        return 0
    subject = subjects.loader_status(settings.node)
    async with asyncio.TaskGroup() as tasks:
        broadcast = tasks.create_task(_broadcast(mesh, loader, sharing, subject), name="broadcast")
        reporting = tasks.create_task(report_health(partial(check_status, mesh, subject)), name="health")
        report_ready()
        await wait_for_first(stop, mesh.lost)
        await end(broadcast, reporting)
    await _warn_engines(mesh, subject, loader.status(await asyncio.to_thread(sharing.status)))
    await loader.stop()
    await commands.stop()
    await files.stop()
    if mesh.lost.is_set():
        return 1
    with contextlib.suppress(NatsError):
        await mesh.publish(subject, loader.status(await asyncio.to_thread(sharing.status)))
    await mesh.stop()
    return 0


async def _warn_engines(mesh: Mesh, subject: str, status: LoaderStatus) -> None:
    """Make engines on GPU memory of this loader exit before the memory goes.

    An engine that misses this exits with the next loader.
    """
    if mesh.lost.is_set() or not any(s.on_devices for s in status.segments):
        return
    with contextlib.suppress(NatsError, TimeoutError):
        await mesh.publish(subject, status.model_copy(update={"stopping": True}))
        await mesh.flush(_WARN_WITHIN_S)


def pool_bytes() -> int:
    """Return the size of the pool's address space: that of host memory.

    No page is allocated at first.
    """
    return -(-physical_memory() // CHUNK_BYTES) * CHUNK_BYTES


async def _broadcast(mesh: Mesh, loader: Loader, sharing: Sharing, subject: str) -> None:
    failures = LogRateLimit()
    while True:
        shared = await asyncio.to_thread(sharing.status)
        began = time.monotonic()
        try:
            await mesh.publish(subject, loader.status(shared))
        except NatsError as e:  # the next status has the same content
            if failures.allows(type(e).__name__):
                log.warning("failed to publish the loader's status", extra={"error": repr(e)})
        else:
            failures.reset()
        pause_s = between_statuses_s(time.monotonic() - began)
        await asyncio.sleep(pause_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(loader.changed.wait(), STATUS_INTERVAL_S - pause_s)


def between_statuses_s(took_s: float) -> float:
    """Return the seconds before the next status.

    A status of hundreds of models takes milliseconds to make, and several processes read it.

    Args:
        took_s: Seconds that the last one took to make and to send.
    """
    return min(_SLOWEST_STATUSES_S, max(_BETWEEN_STATUSES_S, took_s / _STATUS_SHARE))
