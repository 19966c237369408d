"""Check this machine's support for suspending engines on cpu, and set up swap.

Suspending needs swap, a freezer and capabilities. `thaw doctor --fix` sets up swap.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from thaw.errors import CommandError
from thaw.launcher.preflight import free_disk

GIB = 1024**3
LEAST = GIB
"""Less swap than this suspends hardly any engine."""
_LARGEST = 16 * GIB
_DISK_LEFT = 5 * GIB
_CAPABILITIES = {19: "CAP_SYS_PTRACE", 23: "CAP_SYS_NICE"}
_WITHIN_S = 120.0


@dataclass(frozen=True)
class Swap:
    total: int
    free: int


def swap() -> Swap:
    found = psutil.swap_memory()
    return Swap(found.total, found.free)


def missing_capabilities() -> list[str]:
    """Return the capabilities that paging out another process needs and this process lacks."""
    held = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                held = int(line.split()[1], 16)
    return [name for bit, name in _CAPABILITIES.items() if not held >> bit & 1]


def freezer() -> str | None:
    """Return the kind of control groups that can freeze and that this user may create.

    None without such a kind.
    """
    for kind, root in (("cgroup v2", _own_group("")), ("cgroup v1", _own_group("freezer"))):
        if root is not None and os.access(root, os.W_OK):
            return kind
    return None


def _own_group(controller: str) -> Path | None:
    """Return this process's control group.

    It is that of the unified hierarchy (""), or of a v1 controller.
    """
    with contextlib.suppress(OSError, StopIteration):
        own = next(
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if controller in line.split(":", 2)[1].split(",")
        )
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, options = after.split()[0], after.split()[-1]
            if kind == ("cgroup" if controller else "cgroup2") and (not controller or controller in options.split(",")):
                mount = Path(before.split()[4])
                return mount / own.lstrip("/") if (mount / own.lstrip("/")).is_dir() else mount
    return None


def swap_file(home: Path) -> Path:
    return home / "swap" / "swapfile"


def wanted_bytes(directory: Path) -> int:
    """Return the size of the swap file in bytes.

    It is half of the memory, as far as the disk has room.
    """
    room = free_disk(directory) - _DISK_LEFT
    return max(0, min(_LARGEST, psutil.virtual_memory().total // 2, room)) // GIB * GIB


def commands(path: Path, size: int) -> list[list[str]]:
    """Return the commands that set up a swap file, in order."""
    return [
        ["fallocate", "-l", str(size), str(path)],
        ["chmod", "600", str(path)],
        ["mkswap", str(path)],
        ["swapon", str(path)],
    ]


def set_up(path: Path, size: int) -> None:
    """Make a swap file and use it until the next boot.

    Raises `CommandError`, with what was begun undone.
    """
    if size < LEAST:
        raise CommandError(
            "There is no room for a swap file.", f"Free {(LEAST + _DISK_LEFT) // GIB} GiB on the disk of {path.parent}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    for command in commands(path, size):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            path.unlink(missing_ok=True)
            raise CommandError(f"`{shlex.join(command)}` could not be run: {e}", _by_hand(path, size)) from e
        if done.returncode != 0:
            path.unlink(missing_ok=True)
            raise CommandError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}", _by_hand(path, size))


def _by_hand(path: Path, size: int) -> str:
    return "By hand, as root: " + " && ".join(shlex.join(c) for c in commands(path, size))


def remedy(home: Path, existing: Path) -> str:
    """Return the advice for setting up swap on this machine.

    Args:
        existing: The nearest directory above `home` that exists.
    """
    path, size = swap_file(home), wanted_bytes(existing)
    if size < LEAST:
        return f"Free some disk: a swap file of {LEAST // GIB} GiB or more would go to {path}. Compressed memory (zram) serves as well."
    if os.geteuid() == 0:
        return f"`thaw doctor --fix` makes a swap file of {size // GIB} GiB at {path}; zram serves as well."
    return f"{_by_hand(path, size)}. zram serves as well."
