"""Measurements of engines, weight segments and devices."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from services.nodeagent.devices.cpu import oom_kills
from services.nodeagent.devices.port import Device
from services.nodeagent.domain.state import Instance, NodeState, Process
from services.nodeagent.engines.process import process_start
from shared.contracts.loader import LoaderStatus, instance_of
from shared.errors import DeviceFailed

log = logging.getLogger(__name__)

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")
_INTERVAL_S = 5.0
_EXECUTOR_EVERY_S = 1.0
"""Reading the memory of a process with hundreds of mappings takes milliseconds."""
_GONE_POLL_S = 0.01
_GONE_WITHIN_S = 10.0


@dataclass(frozen=True)
class _Segment:
    loaded_bytes: int
    holders: tuple[str, ...]
    on_devices: Mapping[str, int]


class Meter:
    """Measures the node's memory.

    Args:
        devices: The node's devices.
        state: Returns the loop's state.
        changed: Called after each measurement.
        measured: Called with an instance and its bytes.
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        state: Callable[[], NodeState],
        changed: Callable[[], None],
        measured: Callable[[str, int], None],
    ) -> None:
        self._devices = devices
        self._state = state
        self._changed = changed
        self._measured = measured
        self._private: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._failed: set[tuple[str, str]] = set()
        self._segments: list[_Segment] = []
        self._held: dict[str, list[_Segment]] = {}
        self._executors: dict[int, tuple[float, int]] = {}
        self._loader_pid = 0
        self._oom_kills = [oom_kills()] * 2

    def get_private(self, instance_id: str) -> int:
        """Last measured private memory of the instance's processes in bytes."""
        return self._private.get(instance_id, 0)

    def weights(self, instance_id: str) -> int:
        """Bytes of the segments that the instance uses, shared or not.

        On a device with its own memory these are the loader's bytes there, if any.
        """
        held = self._held.get(instance_id, [])
        devices = self._copied_to(instance_id)
        if devices:
            return sum(s.on_devices.get(device_id, 0) for s in held for device_id in devices)
        return sum(s.loaded_bytes for s in held)

    def is_separate(self, device_id: str) -> bool:
        """True for a cpu device with memory of its own."""
        device = self._devices.get(device_id)
        return device is not None and device.info.memory == "separate"

    def get_used(self, device_id: str) -> int:
        return self._used.get(device_id, 0)

    def on_loader_status(self, status: LoaderStatus) -> dict[str, int]:
        """Store the loader's segments, and return the loaded bytes by holder."""
        self._segments = [_Segment(s.loaded_bytes, tuple(map(instance_of, s.holders)), s.on_devices) for s in status.segments]
        self._held = {}
        for segment in self._segments:
            for holder in dict.fromkeys(segment.holders):
                self._held.setdefault(holder, []).append(segment)
        self._loader_pid = status.pid
        return {holder: s.loaded_bytes for s in status.segments for holder in s.holders}

    async def run(self) -> None:
        """Measure every few seconds.

        This runs in a thread: reading a big process's PSS takes milliseconds.
        """
        while True:
            await self.measure_all()
            self._oom_kills = [self._oom_kills[-1], oom_kills()]
            await asyncio.sleep(_INTERVAL_S)

    async def measure_all(self) -> None:
        instances = [i for i in self._state().instances.values() if i.process is Process.ALIVE]
        for instance in instances:
            await self.measure(instance)
        await self._measure_devices()

    async def measure_and_publish(self, instance: Instance) -> None:
        """Measure one instance and its devices."""
        await self.measure(instance)
        await self._measure_devices()

    async def _measure_devices(self) -> None:
        for device_id, device in self._devices.items():
            here = [i for i in self._state().instances.values() if device_id in i.command.device_ids and i.ended_at is None]
            ids = {i.instance_id for i in here}
            shared = sum(s.loaded_bytes for s in self._segments if not ids.isdisjoint(s.holders))
            private = sum(self.get_private(i) for i in ids)
            used = await self._read(device_id, device.used_bytes, private, shared)
            if used is not None:
                self._used[device_id] = used
        self._changed()

    async def _read(
        self, device_id: str, reading: Callable[_Given, _Found], *given: _Given.args, **named: _Given.kwargs
    ) -> _Found | None:
        """Read a device in a thread.

        If the driver does not answer, the result is None and the last measurement stands; the error
        is logged once until a read succeeds.
        """
        key = (device_id, reading.__name__)
        try:
            found = await asyncio.to_thread(reading, *given, **named)
        except DeviceFailed as fault:
            if key not in self._failed:
                log.error("a device cannot be read", extra={"device": device_id, "error": fault.message})
            self._failed.add(key)
            return None
        self._failed.discard(key)
        return found

    async def measure(self, instance: Instance) -> None:
        total = await self._read_private(instance)
        if total is None or instance.pid is None:
            return
        if instance.is_shared:  # the executor's memory is divided evenly between its instances
            total //= max(1, sum(i.pid == instance.pid and i.process is Process.ALIVE for i in self._state().instances.values()))
        if instance.stop_asked:  # its exit frees what it had before, not what is left halfway
            total = max(total, self.get_private(instance.instance_id))
        # A suspended engine may use none; for others 0 means that the driver shows nothing.
        if total or instance.state.parked:
            self._private[instance.instance_id] = total
        if total:
            self._measured(instance.instance_id, total + self.weights(instance.instance_id))

    async def _read_private(self, instance: Instance) -> int | None:
        """Return the private memory of an instance's processes; None: it cannot be read.

        That of an executor is read once for all its instances.
        """
        if instance.pid is None:
            return None
        at, known = self._executors.get(instance.pid, (float("-inf"), 0))
        if instance.is_shared and time.monotonic() - at < _EXECUTOR_EVERY_S:
            return known
        total, has_host = 0, False
        for device_id in instance.command.device_ids:
            device = self._devices.get(device_id)
            if device is None or (device.info.kind == "cpu" and has_host):
                continue  # all cpu devices measure the same host memory
            has_host = has_host or device.info.kind == "cpu"
            by_process = await self._read(device_id, device.private_bytes, (instance.pid, *instance.engine_pids))
            if by_process is None:
                return None
            total += sum(by_process.values())
        if instance.is_shared:
            ids = {i.pid for i in self._state().instances.values()}
            self._executors = {pid: read for pid, read in self._executors.items() if pid in ids}
            self._executors[instance.pid] = time.monotonic(), total
        return total

    async def wait_memory_freed(self, instance: Instance) -> int:
        """Wait until no device accounts memory to the instance's processes.

        Returns:
            Bytes that they had used.

        Raises:
            TimeoutError: Memory is still in use.
            DeviceFailed: A device cannot be read.
        """
        before = self.get_private(instance.instance_id)
        deadline = time.monotonic() + _GONE_WITHIN_S
        while instance.pid is not None:
            # The pidfd has signalled the exit: a zombie has no memory, and a process with the same
            # pid is another one.
            left = await asyncio.to_thread(self._sum_left, instance)
            if not left:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"pid {instance.pid} has exited, but {left} bytes are still accounted to it")
            await asyncio.sleep(_GONE_POLL_S)
        self._private.pop(instance.instance_id, None)
        return before

    async def loader_holds(self, instance_id: str) -> int:
        """Bytes that the loader uses on the instance's GPUs.

        If NVML knows the loader by another pid, these are all bytes in use. Raises `DeviceFailed`.
        """
        pid, total = self._loader_pid, 0
        for device in self._gpus(instance_id).values():
            own = await asyncio.to_thread(device.private_bytes, (pid,))
            total += own.get(pid, 0) or await asyncio.to_thread(device.used_bytes, 0, 0)
        return total

    async def wait_memory_returned(self, instance_id: str, before: int, nbytes: int) -> bool:
        """Wait a bounded time until the loader uses `nbytes` less than `before`.

        Returns:
            False if that is not visible: the loader may have taken as much for others, or the
            device cannot be read.
        """
        deadline = time.monotonic() + _GONE_WITHIN_S
        try:
            while await self.loader_holds(instance_id) > before - nbytes:
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(_GONE_POLL_S)
        except DeviceFailed:
            return False
        return True

    def _copied_to(self, instance_id: str) -> list[str]:
        """Return the instance's devices that weights are copied to."""
        instance = self._state().instances.get(instance_id)
        ids = instance.command.device_ids if instance is not None else ()
        return [d for d in ids if self.is_separate(d) or d in self._gpus(instance_id)]

    def _gpus(self, instance_id: str) -> dict[str, Device]:
        instance = self._state().instances.get(instance_id)
        ids = instance.command.device_ids if instance is not None else ()
        return {d: self._devices[d] for d in ids if d in self._devices and self._devices[d].info.kind == "cuda"}

    def forget(self, instance_id: str) -> None:
        self._private.pop(instance_id, None)

    def oom_window(self) -> tuple[int | None, int | None]:
        """The kernel's count of OOM kills some seconds ago, and now."""
        return self._oom_kills[0], oom_kills()

    def _sum_left(self, instance: Instance) -> int:
        """Bytes that devices still account to the instance's processes.

        Reused pids are ignored.
        """
        assert instance.pid is not None
        ended = [p for p in instance.engine_pids if process_start(p) is None]
        # A detached instance's process lives on: its executor has verified that it was unmapped.
        is_detached = instance.is_shared and process_start(instance.pid) == instance.process_start
        if process_start(instance.pid) in (None, instance.process_start) and not is_detached:
            ended.append(instance.pid)
        devices = (self._devices[d] for d in instance.command.device_ids if d in self._devices)
        return sum(sum(d.private_bytes(ended).values()) for d in devices)
