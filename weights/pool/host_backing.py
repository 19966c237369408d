"""Facts about the memory behind this machine's memory.

A host may back a virtual machine's memory at its first touch, and take free memory back.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_REPORTING_BIT = 5  # VIRTIO_BALLOON_F_REPORTING
_BALLOON = "0x0005"
_DESKTOPS = ("microsoft", "linuxkit", "orbstack")
"""Kernels of virtual machines on a desktop, which share its memory with other programs."""


@dataclass(frozen=True)
class Host:
    """The backing of this machine's memory.

    Attributes:
        is_virtual: This machine is a virtual one.
        takes_back: The host takes free memory back (free page reporting): it is fresh again seconds
            after it was freed.
        is_desktop: The host is a desktop.
        boot_id: Changes with every boot of this machine.
    """

    is_virtual: bool
    takes_back: bool
    is_desktop: bool
    boot_id: str


def host(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> Host:
    """Read the facts about this machine's host."""
    flags = next((line for line in _text(proc / "cpuinfo").splitlines() if line.startswith("flags")), "")
    release = _text(proc / "sys/kernel/osrelease").lower()
    return Host(
        is_virtual="hypervisor" in flags.split() or _text(sys / "hypervisor/type") != "",
        takes_back=_reports_free_pages(sys),
        is_desktop=any(name in release for name in _DESKTOPS),
        boot_id=_text(proc / "sys/kernel/random/boot_id").strip(),
    )


def memory_pressure(proc: Path = Path("/proc")) -> float | None:
    """Return the share of time, in percent of ten seconds, in which a task waited for memory.

    None on a kernel without PSI.
    """
    for line in _text(proc / "pressure/memory").splitlines():
        if line.startswith("some "):
            return float(dict(pair.split("=") for pair in line.split()[1:])["avg10"])
    return None


def free_memory(proc: Path = Path("/proc")) -> int:
    """Return the bytes of memory that nothing uses, the page cache neither (MemFree)."""
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemFree:"):
            return int(line.split()[1]) * 1024
    return 0


def _reports_free_pages(sys: Path) -> bool:
    """True if a device reports free pages to the host.

    The order that the kernel reports is -1 as long as no device has asked for reports.
    """
    for device in (sys / "bus/virtio/devices").glob("*"):
        if _text(device / "device").strip() == _BALLOON and _text(device / "features")[_REPORTING_BIT : _REPORTING_BIT + 1] == "1":
            return True
    order = _text(sys / "module/page_reporting/parameters/page_reporting_order").strip()
    is_hyperv = (sys / "bus/vmbus/drivers/hv_balloon").exists()
    return is_hyperv and order.isdigit() and int(order) < 1 << 31


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
