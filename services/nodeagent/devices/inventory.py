"""The devices of this node, from THAW_DEVICES and from the hardware."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.nodeagent.devices.cpu import CpuDevice, available_bytes
from services.nodeagent.devices.cuda import CudaDevice, count_gpus, load_nvml
from services.nodeagent.devices.driver_thread import DriverThread
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

    With `THAW_DEVICES=auto`, a GPU that cannot be read is left out. Blocking: a driver may take a
    minute, and one that does not answer is given up then.

    Args:
        settings: The nodeagent's settings.
        budgets: The JSON file of the devices' budgets, which this call replaces.
        adopting: Engines of an earlier agent run. The budget of cpu:0 is then read from `budgets`
            instead of derived from the available memory, which lacks the memory of these engines.
        nodes: The machine's NUMA nodes; None: as the kernel shows them.

    Raises:
        DeviceMissing: A device in THAW_DEVICES does not exist or cannot be read.
    """
    wanted, thread = parse_devices(settings.devices), DriverThread()
    is_explicit = wanted is not None
    uses_gpus = wanted is None or any(w.kind == "cuda" for w in wanted)
    nvml, count = _open_nvml(thread, is_explicit=is_explicit) if uses_gpus else (None, 0)
    if wanted is None:
        wanted = (*cpu_devices(nodes if nodes is not None else numa_nodes()), *(WantedDevice(f"cuda:{i}") for i in range(count)))
    found: dict[str, Device] = {}
    for each in wanted:
        if each.kind == "cpu":
            budget = _cpu_budget(each, settings, budgets, adopting)
            found[each.device_id] = CpuDevice(budget, each.device_id, is_separate=each.is_separate)
            continue
        index = int(each.device_id.split(":")[1])
        if nvml is None or index >= count:
            raise DeviceMissing(f"THAW_DEVICES names {each.device_id}, but this machine has {count} CUDA devices that NVML can see")
        share = each.share if each.share is not None else settings.cuda_share
        try:
            found[each.device_id] = CudaDevice(nvml, index, share, each.bytes, thread)
        except DeviceFailed as fault:
            if is_explicit:
                raise DeviceMissing(f"THAW_DEVICES names {each.device_id}: {fault.message}") from fault
            log.error("a device is left out", extra={"device": each.device_id, "reason": fault.message})
    _store(budgets, {device_id: device.info.budget_bytes for device_id, device in found.items()})
    for device_id, device in found.items():
        log.info("device", extra={"device": device_id, "device_name": device.info.name, "budget_bytes": device.info.budget_bytes})
    return found


def _open_nvml(thread: DriverThread, *, is_explicit: bool) -> tuple[Any | None, int]:
    """Return NVML and the number of its GPUs, or None and 0.

    Raises `DeviceMissing` if it does not answer, and THAW_DEVICES names GPUs.
    """
    try:
        nvml = load_nvml(thread)
        return nvml, count_gpus(nvml, thread) if nvml is not None else 0
    except DeviceFailed as fault:
        if is_explicit:
            raise DeviceMissing(f"THAW_DEVICES names GPUs: {fault.message}") from fault
        log.error("all GPUs are left out", extra={"reason": fault.message})
        return None, 0


def _store(path: Path, budgets: dict[str, int]) -> None:
    """Replace the file of the budgets. A disk error is logged: only the next agent needs it."""
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.write_text(json.dumps(budgets))
        draft.replace(path)
    except OSError as e:
        log.error("failed to store the devices' budgets", extra={"path": str(path), "error": str(e)})


def _cpu_budget(wanted: WantedDevice, settings: NodeagentSettings, budgets: Path, adopting: bool) -> int:
    if wanted.bytes is not None:
        return wanted.bytes
    if adopting:
        try:
            return int(json.loads(budgets.read_text())[wanted.device_id])
        except (OSError, ValueError, KeyError):
            log.warning(
                "failed to read the stored budget; computing a new one", extra={"device": wanted.device_id, "path": str(budgets)}
            )
    share = wanted.share if wanted.share is not None else settings.cpu_share
    return max(1, int((available_bytes() - parse_bytes(settings.cpu_reserve)) * share))


def device_status(device: Device, reserved_bytes: int, used_bytes: int, executor_bytes: int = 0) -> DeviceStatus:
    """Return a device's status.

    Args:
        device: The device.
        reserved_bytes: Booked for instances.
        used_bytes: Measured.
        executor_bytes: The part of `reserved_bytes` for the device's executor.
    """
    info = device.info
    return DeviceStatus(
        device_id=info.device_id,
        kind=info.kind,
        name=info.name,
        budget_bytes=info.budget_bytes,
        reserved_bytes=reserved_bytes,
        executor_bytes=executor_bytes,
        used_bytes=used_bytes,
        memory=info.memory,
    )
