"""Parse sizes, and the devices of a node: THAW_DEVICES.

Nodeagent and loader read the same setting. Errors are ValueErrors that name the valid forms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = (
    {"": 1, "B": 1}
    | {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
    | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
)
_LOOKUP = {unit.lower(): factor for unit, factor in _UNITS.items()} | {p.lower(): 1024 ** (i + 1) for i, p in enumerate("KMGT")}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")
_DEVICE = re.compile(r"^(cpu|cuda):(\d+)$")
SEPARATE = "/separate"
"""Suffix of a size: the device has memory of its own, which weights are copied into."""
PAGE_BYTES = 2 * 1024 * 1024
"""Granularity of such memory."""


@dataclass(frozen=True)
class WantedDevice:
    """An entry of THAW_DEVICES.

    It has bytes, a share in (0, 1], or neither (the default share).

    Attributes:
        is_separate: A cpu device with memory of its own, of `bytes`.
    """

    device_id: str
    bytes: int | None = None
    share: float | None = None
    is_separate: bool = False

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
    value = int(float(match.group(1)) * factor)
    if value <= 0:
        raise ValueError(f"{text!r} is not a size: it must be over 0")
    return value


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
        if name.startswith("cpu:") and name != "cpu:0" and not amount.endswith(SEPARATE):
            raise ValueError(
                f"{name!r}: a node has one cpu device, cpu:0, and others only with memory of their own: {name}=4GiB{SEPARATE}"
            )
        if name in (d.device_id for d in found):
            raise ValueError(f"{name!r} is named twice")
        found.append(_wanted(name, amount if equals else None))
    return tuple(found)


def _wanted(name: str, amount: str | None) -> WantedDevice:
    if amount is None:
        return WantedDevice(name)
    if amount.endswith(SEPARATE):
        size = parse_bytes(amount.removesuffix(SEPARATE))
        if not name.startswith("cpu:") or size < PAGE_BYTES:
            raise ValueError(f"{name}={amount}: only a cpu device can be separate, with a size of at least 2MiB")
        return WantedDevice(name, bytes=size, is_separate=True)
    if amount.endswith("%"):
        try:
            share = float(amount[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ValueError(f"{name}={amount}: a share is over 0% and at most 100%")
        return WantedDevice(name, share=share)
    return WantedDevice(name, bytes=parse_bytes(amount))


def separate_devices(text: str) -> dict[str, int]:
    """Return the bytes of the cpu devices with memory of their own in THAW_DEVICES."""
    return {d.device_id: d.bytes for d in parse_devices(text) or () if d.is_separate and d.bytes is not None}
