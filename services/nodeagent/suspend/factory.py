"""Which ways to suspend engines this node has, from its settings and from what is there."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from services.nodeagent.devices.cpu import available_bytes
from services.nodeagent.devices.cuda import load_nvml
from services.nodeagent.devices.port import Device
from services.nodeagent.settings import NodeagentSettings
from services.nodeagent.settings_syntax import parse_bytes
from services.nodeagent.suspend.cgroups import open_groups
from services.nodeagent.suspend.cpu import CpuWay
from services.nodeagent.suspend.cuda import CudaWay, open_driver
from services.nodeagent.suspend.memory import swap_space
from services.nodeagent.suspend.memory_usage import Gauge
from services.nodeagent.suspend.port import Way
from services.nodeagent.suspend.sleep import SleepWay
from services.nodeagent.suspend.sleep_cuda import SleepCudaWay
from services.nodeagent.suspend.suspender import Keeper
from shared.contracts import subjects
from shared.contracts.engine import EngineAsleep, SleepEngine
from shared.contracts.node import SuspendWay
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_SHARE_OF_MEMORY = 0.25


def snapshot_budget(settings: NodeagentSettings) -> int:
    """Bytes that suspended instances may take."""
    if settings.snapshot_bytes != "auto":
        return parse_bytes(settings.snapshot_bytes)
    return swap_space().total + int(_SHARE_OF_MEMORY * available_bytes())


def open_keeper(settings: NodeagentSettings, devices: Mapping[str, Device], mesh: Mesh) -> Keeper:
    groups = open_groups(settings.scope)
    gauge = Gauge(devices)
    ways: dict[SuspendWay, Way] = {}
    if settings.suspend != "off":
        kinds = {d.info.kind for d in devices.values()}

        async def sleep(instance_id: str, level: int) -> EngineAsleep:
            return await mesh.request(subjects.engine_control(instance_id), SleepEngine(level=level), EngineAsleep)

        if settings.suspend == "auto" and "cpu" in kinds:
            ways["cpu"] = CpuWay(groups)
        if settings.suspend == "auto" and "cuda" in kinds:
            ways["cuda"] = cuda = CudaWay(*open_driver(load_nvml()), groups, gauge)
            ways["sleep_cuda"] = SleepCudaWay(cuda, sleep, gauge)
        ways["sleep"] = SleepWay(gauge, sleep, snapshot_budget(settings))
    log.info(
        "suspending",
        extra={
            "groups": groups.version or groups.reason,
            "ways": {name: way.unavailable() or "available" for name, way in ways.items()},
        },
    )
    return Keeper(ways, groups, gauge, mesh.request, settings.resume_timeout)
