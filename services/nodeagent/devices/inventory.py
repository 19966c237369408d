"""The devices of this node, from THAW_DEVICES and from the hardware."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from services.nodeagent.devices.cpu import CpuDevice, available_bytes
from services.nodeagent.devices.cuda import CudaDevice, load_nvml
from services.nodeagent.devices.port import Device
from services.nodeagent.settings import NodeagentSettings
from services.nodeagent.settings_syntax import WantedDevice, parse_bytes, parse_devices
from shared.contracts.node import DeviceStatus
from shared.device_list import cpu_devices
from shared.errors import DeviceFailed, DeviceMissing
from shared.numa import NumaNode, numa_nodes

log = logging.getLogger(__name__)


def open_devices(
    settings: NodeagentSettings, budgets: Path, *, adopting: bool, nodes: Sequence[NumaNode] | None = None
) -> dict[str, Device]:
    """Open the node's devices, by id.

    A budget derived from available memory is stored in `budgets`, and reused while engines of an
    earlier agent run (`adopting`), because their memory is not available now.
    `nodes`: the machine's NUMA nodes; None: as the kernel shows them.

    Raises:
        DeviceMissing: A device in THAW_DEVICES does not exist.
    """
    wanted = parse_devices(settings.devices)
    nvml = load_nvml() if wanted is None or any(w.kind == "cuda" for w in wanted) else None
    count = int(nvml.nvmlDeviceGetCount()) if nvml is not None else 0
    named = wanted is not None
    if wanted is None:
        wanted = (*cpu_devices(nodes if nodes is not None else numa_nodes()), *(WantedDevice(f"cuda:{i}") for i in range(count)))
    found: dict[str, Device] = {}
    for device in wanted:
        if device.kind == "cpu":
            budget = _cpu_budget(device, settings, budgets, adopting)
            found[device.device_id] = CpuDevice(budget, device.device_id, is_separate=device.is_separate)
            continue
        index = int(device.device_id.split(":")[1])
        if nvml is None or index >= count:
            raise DeviceMissing(
                f"THAW_DEVICES names {device.device_id}, but this machine has {count} CUDA devices that NVML can see"
            )
        share = device.share if device.share is not None else settings.cuda_share
        try:
            found[device.device_id] = CudaDevice(nvml, index, share, device.bytes)
        except DeviceFailed as fault:
            if named:
                raise DeviceMissing(f"THAW_DEVICES names {device.device_id}: {fault.message}") from fault
            log.error("a device is left out", extra={"device": device.device_id, "reason": fault.message})
    budgets.write_text(json.dumps({d: v.info.budget_bytes for d, v in found.items()}))
    for device_id, opened in found.items():
        log.info("device", extra={"device": device_id, "device_name": opened.info.name, "budget_bytes": opened.info.budget_bytes})
    return found


def _cpu_budget(wanted: WantedDevice, settings: NodeagentSettings, budgets: Path, adopting: bool) -> int:
    if wanted.bytes is not None:
        return wanted.bytes
    if adopting:
        try:
            return int(json.loads(budgets.read_text())["cpu:0"])
        except (OSError, ValueError, KeyError):
            log.warning("failed to read the stored budget of cpu:0; computing a new one", extra={"path": str(budgets)})
    share = wanted.share if wanted.share is not None else settings.cpu_share
    return max(1, int((available_bytes() - parse_bytes(settings.cpu_reserve)) * share))


def device_status(device: Device, reserved: int, used: int, executor: int = 0) -> DeviceStatus:
    info = device.info
    return DeviceStatus(
        device_id=info.device_id,
        kind=info.kind,
        name=info.name,
        budget_bytes=info.budget_bytes,
        reserved_bytes=reserved,
        executor_bytes=executor,
        used_bytes=used,
        memory=info.memory,
    )
