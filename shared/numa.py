"""The NUMA nodes of this machine, as the kernel shows them under /sys/devices/system/node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM_NODES = Path("/sys/devices/system/node")
PROCESS_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class NumaNode:
    """A node with processors and memory.

    Nodes without processors (memory of a GPU or an expander) are left out.
    """

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int


def numa_nodes(system: Path = SYSTEM_NODES, status: Path = PROCESS_STATUS) -> tuple[NumaNode, ...]:
    """Return the nodes that this process may allocate from, by number.

    The result is empty on a kernel without NUMA.

    Args:
        system: The kernel's directory of nodes.
        status: The kernel's file that has the nodes allowed to this process.
    """
    allowed = _read_allowed(status)
    found = [_node(directory) for directory in system.glob("node[0-9]*")]
    return tuple(
        sorted(
            (n for n in found if n is not None and n.cpus and n.memory_bytes and (allowed is None or n.number in allowed)),
            key=lambda n: n.number,
        )
    )


def numa_node_of(device_id: str, nodes: Sequence[NumaNode]) -> int | None:
    """Return the number of the node that `cpu:N` is bound to; None: there are no nodes.

    This is node N. If node N does not exist, the devices take the nodes in turn.
    """
    if not nodes:
        return None
    index = int(device_id.split(":")[1])
    return index if any(n.number == index for n in nodes) else nodes[index % len(nodes)].number


def parse_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's form of a list ("0-3,8") to numbers."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def _node(directory: Path) -> NumaNode | None:
    try:
        cpus = parse_list((directory / "cpulist").read_text())
        memory = re.search(r"MemTotal:\s*(\d+) kB", (directory / "meminfo").read_text())
        number = int(directory.name.removeprefix("node"))
    except (OSError, ValueError):
        return None
    return NumaNode(number, cpus, int(memory.group(1)) * 1024 if memory else 0)


def _read_allowed(status: Path) -> frozenset[int] | None:
    try:
        found = re.search(r"^Mems_allowed_list:\s*(\S+)", status.read_text(), re.MULTILINE)
        return frozenset(parse_list(found.group(1))) if found else None
    except (OSError, ValueError):
        return None
