"""Creates the node's suspend methods, from its settings and the hardware."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from services.nodeagent.devices.cpu import available_bytes
from services.nodeagent.devices.cuda import load_nvml
from services.nodeagent.devices.port import Device
from services.nodeagent.settings import NodeagentSettings
from services.nodeagent.settings_syntax import parse_bytes
from services.nodeagent.suspend.cgroups import open_cgroups
from services.nodeagent.suspend.cpu import PageOut
from services.nodeagent.suspend.cuda import CudaCheckpoint, open_driver
from services.nodeagent.suspend.gpu_pairs import gpus_of
from services.nodeagent.suspend.memory import swap_space
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import SuspendMethod
from services.nodeagent.suspend.sleep import EngineSleep
from services.nodeagent.suspend.sleep_cuda import SleepThenCheckpoint
from services.nodeagent.suspend.suspender import Suspender
from shared.contracts import subjects
from shared.contracts.engine import EngineAsleep, SleepEngine
from shared.contracts.node import SuspendWay, SwapSpace
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_SHARE_OF_MEMORY = 0.25


def snapshot_budget(settings: NodeagentSettings) -> int:
    """Bytes of host memory and swap that suspended instances may use."""
    if settings.snapshot_bytes != "auto":
        return parse_bytes(settings.snapshot_bytes)
    return swap_space().total + int(_SHARE_OF_MEMORY * available_bytes())


def open_suspender(settings: NodeagentSettings, devices: Mapping[str, Device], mesh: Mesh) -> Suspender:
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
        if settings.suspend == "auto" and "cuda" in kinds:
            ways["cuda"] = cuda = CudaCheckpoint(*open_driver(nvml := load_nvml()), cgroups, memory_usage, gpus_of(nvml, devices))
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
