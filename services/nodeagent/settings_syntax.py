"""Parsers for sizes, device lists and labels in settings.

Errors are ValueErrors that name the valid forms.
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


@dataclass(frozen=True)
class WantedDevice:
    """An entry of THAW_DEVICES.

    It has bytes, a share in (0, 1], or neither (the default share).
    """

    device_id: str
    bytes: int | None = None
    share: float | None = None

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
        if name.startswith("cpu:") and name != "cpu:0":
            raise ValueError(f"{name!r}: a node has one cpu device, cpu:0")
        if name in (d.device_id for d in found):
            raise ValueError(f"{name!r} is named twice")
        found.append(_wanted(name, amount if equals else None))
    return tuple(found)


def _wanted(name: str, amount: str | None) -> WantedDevice:
    if amount is None:
        return WantedDevice(name)
    if amount.endswith("%"):
        try:
            share = float(amount[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ValueError(f"{name}={amount}: a share is over 0% and at most 100%")
        return WantedDevice(name, share=share)
    return WantedDevice(name, bytes=parse_bytes(amount))


def labels(text: str) -> dict[str, str]:
    """Parse 'zone=a,rack=12' to a mapping."""
    found: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{part!r} is not a label: write key=value, comma-separated")
        found[key.strip()] = value.strip()
    return found
