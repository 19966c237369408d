"""An executor: a process with several engines of one device (ADR 0063).

    attach  start an `Engine` with the process's connection, computing thread and model cache
    detach  stop the engine as SIGTERM would, and verify that its memory is unmapped

The executor ends an instance that makes it use more memory than its instances have reserved
(`services.engine.domain.memory_shares`). In all other respects an instance behaves like one in a
process of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import mmap
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from services.engine.app import Engine, ProcessParts
from services.engine.domain.memory_shares import MemoryShares, charge, find_excess, join, leave
from services.engine.generation.device_loop import DeviceLoop
from services.engine.model.architectures import ModelCache
from services.engine.settings import EngineSettings
from shared.contracts import subjects
from shared.contracts.base import Message
from shared.contracts.engine import EngineStart
from shared.contracts.executor import (
    CURRENT_BYTES,
    EXECUTOR_CONTROL,
    STEP_BEGAN,
    AttachInstance,
    DetachInstance,
    ExecutorControl,
    ExecutorReport,
    ExecutorStart,
    InstanceAttached,
    InstanceDetached,
    PingExecutor,
)
from shared.contracts.loader import LoaderProgress
from shared.engines.status_reporter import INTERVAL_S
from shared.errors import EngineFailed, ShuttingDown
from shared.messaging import Mesh
from shared.sizing import need_of
from shared.tasks import end, wait_for_first
from shared.telemetry.timeline import Timeline
from weights.kv_lease import KvLease

log = logging.getLogger(__name__)
AddressRange = tuple[int, int]
_ENDS_WITHIN_S = 5.0
_FILE_THREADS = 2
UNMAPPED_WITHIN_S = 2.0
_LONGEST_CHECK_S = 0.25
"""A check that takes longer was interrupted by a pause of the process, which does not count."""
_LAST_CHECKS_S = 2.5
"""Time before the deadline for the end of one check, for two more, and for the answer."""
_POLL_S = 0.005
_MEASURED_EVERY_S = 0.05
_SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread keeps the interpreter from the others. With Python's 5 ms the event
loop waits that long for a thread that binds a model, each time that it wakes up.
"""


@dataclass
class _Attached:
    """An attached instance.

    Attributes:
        engine: None once the engine has ended, until its memory is unmapped.
        ranges: Addresses at which the ended engine's weights were mapped.
        lease: Pages that the ended engine's KV cache has borrowed.
        detaching: Held by the command that detaches it.
    """

    engine: Engine | None
    stop: asyncio.Event
    running: asyncio.Task[int]
    ranges: tuple[AddressRange, ...] = ()
    lease: KvLease | None = None
    detaching: asyncio.Lock = field(default_factory=asyncio.Lock)


class Executor:
    """The engines of one process. Runs on the event loop."""

    def __init__(self, settings: EngineSettings, start: ExecutorStart, stop: asyncio.Event) -> None:
        self._start = start
        self._stop = stop
        self._current = CurrentInstance(Path(start.current_path))
        self._memory = ExecutorMemory(self._on_excess)
        self._loop = asyncio.get_running_loop()
        self._parts = ProcessParts(
            settings,
            Mesh(settings, f"executor-{start.executor_id}"),
            DeviceLoop(settings.engine_threads, self._on_step),
            ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="files"),
            ModelCache(),
            is_shared=True,
        )
        self._attached: dict[str, _Attached] = {}

    async def run(self) -> int:
        """Run until a stop signal, and return the exit status."""
        mesh, start = self._parts.mesh, self._start
        mesh.respond(subjects.executor_control(start.executor_id), EXECUTOR_CONTROL, self._control, concurrent=True)
        mesh.listen(subjects.loader_status(start.node), LoaderProgress, self._on_loader)
        reporting = asyncio.create_task(self._report_ends(), name="reports of ended instances")
        try:
            if not await mesh.start_unless(self._stop):
                return 0
            log.info("executor is ready", extra={"executor": start.executor_id, "device": start.device})
            await wait_for_first(self._stop, mesh.lost)
            for attached in self._attached.values():
                attached.stop.set()
            if self._attached:
                await asyncio.wait([a.running for a in self._attached.values()], timeout=_ENDS_WITHIN_S)
            if mesh.lost.is_set():
                log.error("lost NATS")
                return 1
            await mesh.stop()
            return 0
        finally:
            await end(reporting)
            self._parts.close()

    async def _report_ends(self) -> None:
        """Report instances that have ended, until they are detached.

        The exit of a process would show their end, and this process runs on. A report is lost if
        the nodeagent reconnects to NATS later than this process.
        """
        while True:
            await asyncio.sleep(INTERVAL_S)
            for attached in list(self._attached.values()):
                if attached.engine is not None and attached.running.done():
                    await attached.engine.report_end()

    def _on_step(self, name: str | None) -> None:
        """Record what the computing thread is about to do."""
        self._current.write(name)
        self._memory.measure(name)

    def _on_excess(self, instance_id: str) -> None:
        """End an instance for its use of memory. Called on the computing thread."""
        self._loop.call_soon_threadsafe(self._end_for_memory, instance_id)

    def _end_for_memory(self, instance_id: str) -> None:
        attached = self._attached.get(instance_id)
        if attached is not None and attached.engine is not None:
            log.error("an instance used more memory than the executor's instances reserve", extra={"instance": instance_id})
            attached.engine.exceed_memory()

    async def _control(self, command: ExecutorControl) -> Message:
        match command:
            case AttachInstance(start=start):
                self._attach(start)
                return InstanceAttached(pid=os.getpid())
            case DetachInstance(instance_id=instance_id):
                return await self._detach(instance_id, command.deadline_ms / 1e3)
            case PingExecutor():
                return ExecutorReport(executor_id=self._start.executor_id, pid=os.getpid(), instances=tuple(self._attached))

    def _attach(self, start: EngineStart) -> None:
        """Start an engine, which reports its progress.

        Raises:
            ShuttingDown: The process is ending.
            EngineFailed: The model may not share a process.
        """
        if self._stop.is_set():
            raise ShuttingDown("The executor is ending")
        if start.card.spec.trust_remote_code:
            raise EngineFailed(f"{start.card.name} has code of its own (trust_remote_code), and is never shared")
        if start.instance_id in self._attached:
            return
        need = need_of(start.card)
        self._memory.join(start.instance_id, max(need.kv, start.kv_bytes) + need.converted + need.runtime, need.executor)
        stop = asyncio.Event()
        engine = Engine(self._parts, start, stop, Timeline("engine"))
        engine.begin_attaching()
        running = asyncio.create_task(_run(engine), name=f"engine {start.instance_id}")
        self._attached[start.instance_id] = _Attached(engine, stop, running)
        log.info("attached", extra={"instance": start.instance_id, "model": start.card.name})

    async def _detach(self, instance_id: str, within_s: float) -> InstanceDetached:
        """End an engine, verify that its weights are no longer mapped, and return borrowed pages.

        A nodeagent that lost NATS may repeat a command that is still carried out.

        Args:
            within_s: The nodeagent waits this long for the answer, and then kills the process.

        Raises:
            EngineFailed: They are still mapped. A repeated command checks again.
        """
        begun = time.monotonic()
        attached = self._attached.get(instance_id)
        if attached is None:
            return InstanceDetached()
        attached.stop.set()
        async with attached.detaching:
            if self._attached.get(instance_id) is not attached:
                return InstanceDetached()
            return await self._remove(instance_id, attached, begun, begun + within_s)

    async def _remove(self, instance_id: str, attached: _Attached, begun: float, deadline: float) -> InstanceDetached:
        """Wait for the end of a stopped engine, and release what it had. Raises as `_detach`."""
        before = private_bytes()
        await asyncio.wait((attached.running,))
        if attached.engine is not None:
            await attached.engine.until_detached()
            attached.ranges = attached.engine.mapped_ranges()
            attached.lease = attached.engine.take_lease()
            attached.engine = None
        await asyncio.sleep(0)
        ranges = attached.ranges
        left = await wait_until_unmapped(lambda: mapped_bytes(ranges, self._list_ranges()), deadline)
        _trim()
        if left:
            raise EngineFailed(f"{left} bytes of the weights of {instance_id} are still mapped")
        if attached.lease is not None:
            await asyncio.to_thread(attached.lease.close)
        self._attached.pop(instance_id, None)
        self._memory.leave(instance_id)
        log.info("detached", extra={"instance": instance_id})
        return InstanceDetached(freed_bytes=max(0, before - private_bytes()), took_ms=(time.monotonic() - begun) * 1e3)

    def _list_ranges(self) -> list[AddressRange]:
        """Return the addresses at which weights of instances that have not ended are mapped."""
        return [r for a in self._attached.values() if a.engine is not None for r in a.engine.mapped_ranges()]

    async def _on_loader(self, status: LoaderProgress) -> None:
        for attached in list(self._attached.values()):
            if attached.engine is not None:
                await attached.engine.on_loader(status)


async def _run(engine: Engine) -> int:
    """Run an engine. Log an error that the engine does not report, and keep the others running."""
    try:
        return await engine.run()
    except Exception:  # a process boundary: the other engines keep serving
        log.exception("an engine ended with an error")
        return 1


class CurrentInstance:
    """The file that names the instance that computes, and since when. It outlives a crash."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = CURRENT_BYTES + STEP_BEGAN.size
            os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._map[:] = bytes(size)
        self._name: str | None = None

    def write(self, name: str | None) -> None:
        """Record that a step of `name` begins, or that none runs (None)."""
        if name != self._name:
            STEP_BEGAN.pack_into(self._map, CURRENT_BYTES, 0)  # a reader must not see the time of another instance's step
            self._map[:CURRENT_BYTES] = (name or "").encode()[:CURRENT_BYTES].ljust(CURRENT_BYTES, b"\0")
            self._name = name
        if name is not None:
            STEP_BEGAN.pack_into(self._map, CURRENT_BYTES, time.monotonic_ns())


class ExecutorMemory:
    """The process's anonymous memory, and which instance's steps have made it grow.

    `measure` runs on the computing thread, the other methods on the event loop.
    """

    def __init__(self, on_excess: Callable[[str], None]) -> None:
        """Take the memory in use now as that of no instance.

        Args:
            on_excess: Called with an instance when the process uses more memory than its instances
                have reserved, and this one has grown most beyond its part.
        """
        self._on_excess = on_excess
        self._lock = threading.Lock()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._shares = MemoryShares(base_bytes=self._read(), total_bytes=self._read())
        self._name: str | None = None
        self._measure_at = 0.0

    def measure(self, name: str | None) -> None:
        """Charge the growth since the last measurement to the instance that computed until now.

        Args:
            name: The instance that computes from now on.
        """
        now = time.monotonic()
        if name == self._name and now < self._measure_at:
            return
        with self._lock:
            self._shares = charge(self._shares, self._name, self._read())
            excess = find_excess(self._shares)
        self._name, self._measure_at = name, now + _MEASURED_EVERY_S
        if excess is not None:
            self._on_excess(excess)

    def join(self, name: str, limit_bytes: int, workspace_bytes: int) -> None:
        with self._lock:
            self._shares = join(self._shares, name, limit_bytes, workspace_bytes)

    def leave(self, name: str) -> None:
        with self._lock:
            self._shares = leave(self._shares, name, self._read())

    def _read(self) -> int:
        _, resident, file_backed = os.pread(self._statm, 128, 0).split()[:3]
        return (int(resident) - int(file_backed)) * mmap.PAGESIZE


def private_bytes() -> int:
    """Return the process's anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def mapped_bytes(ranges: Iterable[AddressRange], others: Iterable[AddressRange] = ()) -> int:
    """Return how many bytes of files this process maps in `ranges`, and can access.

    Borrowed pages are mapped without access, at any free address (`weights.kv_lease`).

    Args:
        ranges: Addresses.
        others: Addresses that other instances use now. They may include some of `ranges`, mapped
            again since.
    """
    kept = set(others)
    wanted = [r for r in ranges if r not in kept and not any(low < r[1] and r[0] < high for low, high in kept)]
    lines = Path("/proc/self/maps").read_bytes().splitlines()  # a thousand and more, in the order of their addresses
    total = 0
    for start, limit in wanted:
        for line in islice(lines, bisect_right(lines, start, key=_end_of), None):
            addresses, access, _, _, inode = line.split()[:5]
            low, high = (int(part, 16) for part in addresses.split(b"-"))
            if low >= limit:
                break
            if inode != b"0" and not access.startswith(b"---"):
                total += max(0, min(high, limit) - max(low, start))
    return total


async def wait_until_unmapped(count_bytes: Callable[[], int], deadline: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Wait a bounded time until an ended engine maps nothing, and return the bytes that it maps.

    Cancelled tasks leave the event loop meanwhile, and release their objects. They cannot while the
    process is paused. On a busy machine each check may take as long as a pause: few follow in the
    last seconds before the deadline.

    Args:
        count_bytes: Returns the bytes that the engine maps now.
        deadline: Time of `clock` by which the result must be known.
    """
    left_s = UNMAPPED_WITHIN_S
    while True:
        began = clock()
        gc.collect()
        left = count_bytes()
        if not left or left_s <= 0:
            return left
        await asyncio.sleep(_POLL_S)
        now = clock()
        left_s -= min(now - began, _LONGEST_CHECK_S)
        if now > deadline - _LAST_CHECKS_S:
            left_s = min(left_s, _LONGEST_CHECK_S)


def _end_of(line: bytes) -> int:
    """Return the end of a mapping."""
    return int(line[line.index(b"-") + 1 : line.index(b" ")], 16)


def _trim() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def run_executor(settings: EngineSettings, stop: asyncio.Event, start: ExecutorStart) -> int:
    """Serve instances until a stop signal, and return the exit status."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    return await Executor(settings, start, stop).run()
