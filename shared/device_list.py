"""Parse sizes, and the devices of a node: THAW_DEVICES.

Nodeagent and loader read the same setting. Errors are ValueErrors that name the valid forms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.numa import NumaNode, numa_node_of

_UNITS = (
    {"": 1, "B": 1}
    | {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
    | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
)
_LOOKUP = {unit.lower(): factor for unit, factor in _UNITS.items()} | {p.lower(): 1024 ** (i + 1) for i, p in enumerate("KMGT")}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")
LARGEST_BYTES = 1 << 62
_DEVICE = re.compile(r"^(cpu|cuda):(\d+)$")
SEPARATE = "/separate"
"""Suffix of a size: the device has memory of its own, which weights are copied into."""
PAGE_BYTES = 2 * 1024 * 1024
"""Granularity of such memory."""


_SHARE_OF_NUMA_NODE = 4
"""A device has a quarter of its node's memory: weights are in host memory as well, and shared
memory is half of the machine's by default.
"""
RATE_EXAMPLE = "cpu:1=4GiB/separate@2GiB/s@cpu:2=8GiB/s"


@dataclass(frozen=True)
class WantedDevice:
    """An entry of THAW_DEVICES.

    It has bytes, a share in (0, 1], or neither (the default share).

    Attributes:
        is_separate: A cpu device with memory of its own, of `bytes`.
        host_bytes_per_second: Pace of copies to it from host memory, for experiments; None: as fast
            as the machine copies.
        peer_bytes_per_second: Pace of copies between it and other separate devices.
        numa_node: NUMA node whose memory it has; None: any.
    """

    device_id: str
    bytes: int | None = None
    share: float | None = None
    is_separate: bool = False
    host_bytes_per_second: int | None = None
    peer_bytes_per_second: tuple[tuple[str, int], ...] = ()
    numa_node: int | None = None

    @property
    def kind(self) -> str:
        return self.device_id.split(":")[0]


def parse_bytes(text: str) -> int:
    """Parse `text` ("1500MiB", "2 GB", "1g", "4096") to bytes.

    KiB, MiB, GiB, TiB and K, M, G, T count by 1024; KB, MB, GB, TB by 1000.
    """
    match = _SIZE.match(text)
    factor = _LOOKUP.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 1500MiB, 2GB or 1.5GiB")
    value = float(match.group(1)) * factor
    if value < 1:
        raise ValueError(f"{text!r} is not a size: it must be over 0")
    if value > LARGEST_BYTES:
        raise ValueError(f"{text[:40]!r} is not a size: it must be at most {LARGEST_BYTES >> 60} EiB")
    return int(value)


def parse_rate(text: str) -> int:
    """Parse `text` ("2GiB/s", "500MB/s", "2GiB") to bytes per second."""
    try:
        return parse_bytes(re.sub(r"\s*/\s*s\s*$", "", text))
    except ValueError:
        raise ValueError(f"{text!r} is not a bandwidth: write a size for each second, such as 2GiB/s") from None


def parse_devices(text: str) -> tuple[WantedDevice, ...] | None:
    """The devices of THAW_DEVICES; None for "auto"."""
    if text.strip().lower() == "auto":
        return None
    found: list[WantedDevice] = []
    for part in text.split(","):
        name, equals, amount = (p.strip() for p in part.partition("="))
        if not _DEVICE.match(name):
            raise ValueError(
                f"{part.strip()!r} is not a device: write cpu:0 or cuda:N, optionally =SIZE or =PERCENT, such as cpu:0=1500MiB"
            )
        if name.startswith("cpu:") and name != "cpu:0" and not amount.partition("@")[0].rstrip().endswith(SEPARATE):
            raise ValueError(
                f"{name!r}: a node has one cpu device, cpu:0, and others only with memory of their own: {name}=4GiB{SEPARATE}"
            )
        if name in (d.device_id for d in found):
            raise ValueError(f"{name!r} is named twice")
        found.append(_parse_device(name, amount if equals else None))
    separate = {d.device_id for d in found if d.is_separate}
    for device in found:
        for peer, _ in device.peer_bytes_per_second:
            if peer == device.device_id or peer not in separate:
                raise ValueError(
                    f"{device.device_id}: {peer} is no other separate device of this node, so copies between them have no pace"
                )
    return tuple(found)


def _parse_device(name: str, amount: str | None) -> WantedDevice:
    if amount is None:
        return WantedDevice(name)
    size, *rates = (p.strip() for p in amount.split("@"))
    if size.endswith(SEPARATE):
        nbytes = parse_bytes(size.removesuffix(SEPARATE))
        if not name.startswith("cpu:") or nbytes < PAGE_BYTES:
            raise ValueError(f"{name}={amount}: only a cpu device can be separate, with a size of at least 2MiB")
        return _add_rates(WantedDevice(name, bytes=nbytes, is_separate=True), rates)
    if rates:
        raise ValueError(f"{name}={amount}: only a separate cpu device can be paced, such as {RATE_EXAMPLE}")
    if amount.endswith("%"):
        try:
            share = float(amount[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ValueError(f"{name}={amount}: a share is over 0% and at most 100%")
        return WantedDevice(name, share=share)
    return WantedDevice(name, bytes=parse_bytes(amount))


def _add_rates(device: WantedDevice, rates: Sequence[str]) -> WantedDevice:
    """Add the parts after the size: RATE, or DEVICE=RATE."""
    peers: dict[str, int] = {}
    for rate in rates:
        peer, equals, value = (p.strip() for p in rate.partition("="))
        if not equals:
            if device.host_bytes_per_second is not None:
                raise ValueError(f"{device.device_id}: two bandwidths from host memory; write one, such as {RATE_EXAMPLE}")
            device = replace(device, host_bytes_per_second=parse_rate(rate))
        elif peer in peers:
            raise ValueError(f"{device.device_id}: two bandwidths from {peer}; write one, such as {RATE_EXAMPLE}")
        else:
            peers[peer] = parse_rate(value)
    return replace(device, peer_bytes_per_second=tuple(peers.items()))


def cpu_devices(nodes: Sequence[NumaNode]) -> tuple[WantedDevice, ...]:
    """Return the cpu devices of "auto": cpu:0, or a separate one for each of several NUMA nodes."""
    if len(nodes) < 2:
        return (WantedDevice("cpu:0"),)
    return tuple(
        WantedDevice(
            f"cpu:{n.number}",
            bytes=max(PAGE_BYTES, n.memory_bytes // _SHARE_OF_NUMA_NODE // PAGE_BYTES * PAGE_BYTES),
            is_separate=True,
            numa_node=n.number,
        )
        for n in nodes
    )


def separate_devices(text: str, nodes: Sequence[NumaNode] = ()) -> dict[str, WantedDevice]:
    """Return the cpu devices with memory of their own in THAW_DEVICES, by id.

    Args:
        text: The setting.
        nodes: The machine's NUMA nodes, to which the devices are bound.
    """
    wanted = parse_devices(text)
    found = wanted if wanted is not None else cpu_devices(nodes)
    return {d.device_id: replace(d, numa_node=numa_node_of(d.device_id, nodes)) for d in found if d.is_separate}
