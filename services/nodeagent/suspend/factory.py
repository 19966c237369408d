"""Creates the node's suspend methods, from its settings and the hardware."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from services.nodeagent.devices.cpu import available_bytes
from services.nodeagent.devices.cuda import OPENS_WITHIN_S, load_nvml
from services.nodeagent.devices.driver_thread import DriverThread
from services.nodeagent.devices.port import Device
from services.nodeagent.settings import NodeagentSettings
from services.nodeagent.settings_syntax import parse_bytes
from services.nodeagent.suspend.cgroups import open_cgroups
from services.nodeagent.suspend.cpu import PageOut
from services.nodeagent.suspend.cuda import CheckpointDriver, CudaCheckpoint, open_driver
from services.nodeagent.suspend.gpu_pairs import Gpu, gpus_of
from services.nodeagent.suspend.memory import swap_space
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import SuspendMethod
from services.nodeagent.suspend.sleep import EngineSleep
from services.nodeagent.suspend.sleep_cuda import SleepThenCheckpoint
from services.nodeagent.suspend.suspender import Suspender
from shared.contracts import subjects
from shared.contracts.engine import EngineAsleep, SleepEngine
from shared.contracts.node import SuspendWay, SwapSpace
from shared.errors import DeviceFailed
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_SHARE_OF_MEMORY = 0.25


def snapshot_budget(settings: NodeagentSettings) -> int:
    """Bytes of host memory and swap that suspended instances may use."""
    if settings.snapshot_bytes != "auto":
        return parse_bytes(settings.snapshot_bytes)
    return swap_space().total + int(_SHARE_OF_MEMORY * available_bytes())


@dataclass(frozen=True)
class Checkpoints:
    """The driver's checkpoint calls, or the reason why there are none; and the machine's GPUs."""

    driver: CheckpointDriver | None
    reason: str
    gpus: tuple[Gpu, ...] = ()


def open_checkpoints(
    settings: NodeagentSettings, devices: Mapping[str, Device], within_s: float = OPENS_WITHIN_S
) -> Checkpoints | None:
    """Open the driver's checkpoint calls. Blocking. None: this node does not use them.

    Args:
        settings: The nodeagent's settings.
        devices: The node's devices.
        within_s: Seconds in which each call has to return.
    """
    if settings.suspend != "auto" or not any(d.info.kind == "cuda" for d in devices.values()):
        return None
    thread = DriverThread(within_s)
    try:
        nvml = load_nvml(thread, within_s)
        driver, reason = thread.call(open_driver, nvml)
        return Checkpoints(driver, reason, thread.call(gpus_of, nvml, devices))
    except DeviceFailed as fault:
        reason = fault.message
    except TimeoutError:
        reason = f"the NVIDIA driver does not answer within {within_s:g} s. See `nvidia-smi` and the kernel's log (`dmesg`)"
    log.error("the CUDA driver cannot be used", extra={"reason": reason})
    return Checkpoints(None, reason)


def open_suspender(
    settings: NodeagentSettings, devices: Mapping[str, Device], mesh: Mesh, checkpoints: Checkpoints | None
) -> Suspender:
    """Create the suspender with the available methods."""
    cgroups = open_cgroups(settings.scope)
    memory_usage = MemoryUsage(devices)
    ways: dict[SuspendWay, SuspendMethod] = {}
    if settings.suspend != "off":
        kinds = {d.info.kind for d in devices.values()}

        async def sleep(instance_id: str, level: int) -> EngineAsleep:
            return await mesh.request(subjects.engine_control(instance_id), SleepEngine(level=level), EngineAsleep)

        if settings.suspend == "auto" and "cpu" in kinds:
            ways["cpu"] = PageOut(cgroups)
        if checkpoints is not None:
            ways["cuda"] = cuda = CudaCheckpoint(checkpoints.driver, checkpoints.reason, cgroups, memory_usage, checkpoints.gpus)
            ways["sleep_cuda"] = SleepThenCheckpoint(cuda, sleep, memory_usage)
        ways["sleep"] = EngineSleep(memory_usage, sleep, snapshot_budget(settings))
    log.info(
        "suspend methods",
        extra={
            "cgroups": cgroups.version or cgroups.reason,
            "ways": {name: way.explain_unavailable() or "available" for name, way in ways.items()},
        },
    )
    separate = [d for d, device in devices.items() if device.info.memory == "separate"]
    return Suspender(ways, cgroups, memory_usage, mesh.request, settings.resume_timeout, separate)


def read_swap() -> SwapSpace:
    """Return this machine's swap space. Blocking."""
    found = swap_space()
    return SwapSpace(total_bytes=found.total, free_bytes=found.free)
