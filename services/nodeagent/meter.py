"""What is measured: private memory of engine processes, weight segments as the loader tells, use of each device."""

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
_GONE_POLL_S = 0.01
_GONE_WITHIN_S = 10.0


@dataclass(frozen=True)
class _Segment:
    loaded_bytes: int
    holders: tuple[str, ...]
    on_devices: Mapping[str, int]


class Meter:
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
        self._segments: dict[str, _Segment] = {}
        self._loader_pid = 0
        self._oom_kills = [oom_kills()] * 2

    def private(self, instance_id: str) -> int:
        """Bytes that the instance's process last held for itself."""
        return self._private.get(instance_id, 0)

    def weights(self, instance_id: str) -> int:
        """Bytes of the segments that the instance holds, shared with others or not: on its GPU what the loader has there, which is none where
        the engine has a copy of its own."""
        held = [s for s in self._segments.values() if instance_id in s.holders]
        gpus = self._gpus(instance_id)
        if gpus:
            return sum(s.on_devices.get(device_id, 0) for s in held for device_id in gpus)
        return sum(s.loaded_bytes for s in held)

    def used(self, device_id: str) -> int:
        return self._used.get(device_id, 0)

    def loader_said(self, status: LoaderStatus) -> dict[str, int]:
        """Take over what the loader holds; returns the bytes it has loaded so far by holder."""
        self._segments = {
            s.weights_id: _Segment(s.loaded_bytes, tuple(map(instance_of, s.holders)), s.on_devices) for s in status.segments
        }
        self._loader_pid = status.pid
        return {holder: s.loaded_bytes for s in status.segments for holder in s.holders}

    async def run(self) -> None:
        """Measure every few seconds. Reading a big process's PSS takes milliseconds: it has a thread."""
        while True:
            await self.measure_all()
            self._oom_kills = [self._oom_kills[-1], oom_kills()]
            await asyncio.sleep(_INTERVAL_S)

    async def measure_all(self) -> None:
        instances = [i for i in self._state().instances.values() if i.process is Process.ALIVE]
        for instance in instances:
            await self.measure(instance)
        await self._measure_devices()

    async def measure_and_tell(self, instance: Instance) -> None:
        """Measure one instance, and what follows from it for its devices."""
        await self.measure(instance)
        await self._measure_devices()

    async def _measure_devices(self) -> None:
        for device_id, device in self._devices.items():
            here = [i for i in self._state().instances.values() if device_id in i.command.device_ids and i.ended_at is None]
            ids = {i.instance_id for i in here}
            shared = sum(s.loaded_bytes for s in self._segments.values() if ids & set(s.holders))
            private = sum(self.private(i) for i in ids)
            used = await self._read(device_id, device.used_bytes, private, shared)
            if used is not None:
                self._used[device_id] = used
        self._changed()

    async def _read(
        self, device_id: str, reading: Callable[_Given, _Found], *given: _Given.args, **named: _Given.kwargs
    ) -> _Found | None:
        """None where the driver gives no answer: what was last measured stands. Said once, until it can be read again."""
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
        if instance.pid is None:
            return
        total = 0
        for device_id in instance.command.device_ids:
            device = self._devices.get(device_id)
            if device is None:
                continue
            by_process = await self._read(device_id, device.private_bytes, (instance.pid, *instance.engine_pids))
            if by_process is None:
                return
            total += sum(by_process.values())
        if instance.stop_asked:  # what its end frees is what it had, not what is left of it half way
            total = max(total, self.private(instance.instance_id))
        # One that is parked may have given up all; of others nothing means that it cannot be seen.
        if total or instance.state.parked:
            self._private[instance.instance_id] = total
        if total:
            self._measured(instance.instance_id, total + self.weights(instance.instance_id))

    async def prove_gone(self, instance: Instance) -> int:
        """Wait until no device knows memory of the instance's process any more; returns the bytes it had held.

        Raises `TimeoutError` if that does not come about (the kernel is still tearing it down, or a driver holds on to it), and
        `DeviceFailed` where it cannot be read.
        """
        before = self.private(instance.instance_id)
        deadline = time.monotonic() + _GONE_WITHIN_S
        while instance.pid is not None:
            # The pidfd has told its end: a zombie has no memory, and a process that has its pid by now is not it.
            left = await asyncio.to_thread(self._left, instance)
            if not left:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"pid {instance.pid} is gone, but {left} bytes are still booked to it")
            await asyncio.sleep(_GONE_POLL_S)
        self._private.pop(instance.instance_id, None)
        return before

    async def loader_holds(self, instance_id: str) -> int:
        """Bytes of the instance's GPUs that the loader's process has; all that are in use where NVML knows it by another pid. Raises
        `DeviceFailed`."""
        pid, total = self._loader_pid, 0
        for device in self._gpus(instance_id).values():
            own = await asyncio.to_thread(device.private_bytes, (pid,))
            total += own.get(pid, 0) or await asyncio.to_thread(device.used_bytes, 0, 0)
        return total

    async def prove_returned(self, instance_id: str, before: int, nbytes: int) -> bool:
        """Wait, a bounded time, until `nbytes` fewer than `before` are held. The loader may have taken as much for others meanwhile: then it
        cannot be told, nor where the device cannot be read."""
        deadline = time.monotonic() + _GONE_WITHIN_S
        try:
            while await self.loader_holds(instance_id) > before - nbytes:
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(_GONE_POLL_S)
        except DeviceFailed:
            return False
        return True

    def _gpus(self, instance_id: str) -> dict[str, Device]:
        instance = self._state().instances.get(instance_id)
        ids = instance.command.device_ids if instance is not None else ()
        return {d: self._devices[d] for d in ids if d in self._devices and self._devices[d].info.kind == "cuda"}

    def forget(self, instance_id: str) -> None:
        self._private.pop(instance_id, None)

    def oom_window(self) -> tuple[int | None, int | None]:
        """The kernel's OOM counter some seconds ago and now."""
        return self._oom_kills[0], oom_kills()

    def _left(self, instance: Instance) -> int:
        """Bytes that devices know of its processes still. Who has one of their numbers by now is someone else."""
        assert instance.pid is not None
        ended = [p for p in instance.engine_pids if process_start(p) is None]
        if process_start(instance.pid) in (None, instance.process_start):
            ended.append(instance.pid)
        devices = (self._devices[d] for d in instance.command.device_ids if d in self._devices)
        return sum(sum(d.private_bytes(ended).values()) for d in devices)
