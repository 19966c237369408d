"""Which devices share a part of the PCIe tree, from the kernel's device paths. Pure but for `device_path`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_FUNCTION = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


def device_path(bus_id: str) -> Path | None:
    """/sys/devices/… of a PCI function; None where the kernel does not show it (a container, another operating system)."""
    link = Path("/sys/bus/pci/devices") / bus_id.lower()
    return link.resolve() if link.exists() else None


def upstream(path: Path) -> tuple[str, ...]:
    """The PCI functions between the root and the device at `path`, root port first, the device itself left out.

    /sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0 lies behind a switch: its root port, the switch's
    upstream port and the downstream port.
    """
    return tuple(part for part in path.parts if _FUNCTION.match(part))[:-1]


def neighbours(paths: Mapping[str, Path]) -> dict[str, frozenset[str]]:
    """For each device those others that share its way to the host: the same root port. Copies to them at once share its bandwidth."""
    ports = {device: upstream(path)[:1] for device, path in paths.items()}
    return {
        device: frozenset(other for other, theirs in ports.items() if other != device and port and theirs == port)
        for device, port in ports.items()
    }
