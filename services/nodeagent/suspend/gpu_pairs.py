"""Choose the GPU that a snapshot is restored onto (`gpuPairs` of `cuCheckpointProcessRestore`).

The driver needs a pair of GPUs, old and new, for each GPU that the process used at its checkpoint.
A process may use every GPU that it sees. The pairs therefore name all GPUs of the machine: those
that change places, and the others paired with themselves. The new GPU must have the same chip.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from shared.errors import EngineFailed

log = logging.getLogger(__name__)
Pairs = tuple[tuple[str, str], ...]
"""UUIDs of GPUs, old and new."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        name: Its product name.
        is_of_node: The node uses the GPU (THAW_DEVICES).
    """

    device_id: str
    name: str
    uuid: str
    is_of_node: bool = True


def gpus_of(nvml: Any | None, device_ids: Collection[str]) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; none without NVML.

    Args:
        nvml: The module `pynvml`, initialised.
        device_ids: The node's devices.
    """
    if nvml is None:
        return ()
    found = []
    try:
        for index in range(int(nvml.nvmlDeviceGetCount())):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
            found.append(Gpu(f"cuda:{index}", name, uuid, f"cuda:{index}" in device_ids))
    except nvml.NVMLError as e:
        log.warning("snapshots are restored onto their own GPUs only: NVML cannot read one", extra={"error": str(e)})
        return ()
    return tuple(found)


def others_of_kind(gpus: Iterable[Gpu], device_id: str) -> tuple[str, ...]:
    """Return the other GPUs of the node with the same product name."""
    known = {g.device_id: g for g in gpus}
    own = known.get(device_id)
    others = (g for g in known.values() if g.is_of_node and g.device_id != device_id)
    return tuple(g.device_id for g in others if own is not None and g.name == own.name)


def pairs(gpus: Iterable[Gpu], old: tuple[str, ...], new: tuple[str, ...]) -> Pairs:
    """Return old and new UUID of every GPU, to restore a snapshot of `old` onto `new`.

    Raises:
        EngineFailed: A device is no GPU of this machine.
    """
    uuids = {g.device_id: g.uuid for g in gpus}
    if unknown := [d for d in (*old, *new) if not uuids.get(d)]:
        raise EngineFailed(f"{', '.join(unknown)}: no GPU of this machine")
    to = dict(zip(old, new, strict=True))
    left = [d for d in old if d not in new]
    to |= dict(zip([d for d in new if d not in old], left, strict=True))
    return tuple((uuid, uuids[to.get(device, device)]) for device, uuid in uuids.items())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
