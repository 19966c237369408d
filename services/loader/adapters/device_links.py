"""The links of a node's devices in the loader's status: buses, and other devices of the node."""

from __future__ import annotations

from collections.abc import Collection

from shared.contracts.loader import LinkStatus
from weights.devices.port import Device
from weights.store.node_devices import NodeDevices
from weights.store.peers import PeerLink
from weights.store.separate import SeparateDevice


def list_links(devices: NodeDevices, under_way: Collection[tuple[str, str]]) -> tuple[LinkStatus, ...]:
    """Return the links of the devices that are open.

    Args:
        under_way: The device and the model of each copy that is not complete.
    """
    found: list[LinkStatus] = []
    for device in devices.opened:
        paged = devices.paged.get(device.device_id)
        found.append(_bus(device, paged, [model for target, model in under_way if target == device.device_id]))
        found += [_peer_link(device.device_id, p) for p in paged.peer_links] if paged is not None else []
    return tuple(found)


def _bus(device: Device, paged: SeparateDevice | None, models: list[str]) -> LinkStatus:
    queued_bytes, bytes_per_second = device.queued_bytes, device.bytes_per_second
    return LinkStatus(
        link=f"bus:{device.device_id}",
        bytes_per_second=bytes_per_second,
        queued_bytes=queued_bytes,
        loads=len(models),
        finish_ms=_finish_ms(queued_bytes, bytes_per_second),
        moved_bytes=device.copied_bytes,
        models=tuple(sorted({m for m in models if m})),
        is_paced=paged is not None and paged.paced_bytes_per_second is not None,
        group_bytes=device.group_bytes,
    )


def _peer_link(device_id: str, p: PeerLink) -> LinkStatus:
    return LinkStatus(
        link=f"p2p:{p.peer}>{device_id}",
        bytes_per_second=p.bytes_per_second,
        queued_bytes=p.queued_bytes,
        loads=p.loads,
        finish_ms=_finish_ms(p.queued_bytes, p.bytes_per_second),
        moved_bytes=p.copied_bytes,
        is_paced=p.is_paced,
    )


def _finish_ms(queued_bytes: int, bytes_per_second: float | None) -> float | None:
    return queued_bytes / bytes_per_second * 1e3 if queued_bytes and bytes_per_second else None
