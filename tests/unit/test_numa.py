"""NUMA nodes: their topology, the devices that follow from it, and memory bound to a node."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.nodeagent.devices import inventory
from services.nodeagent.settings import NodeagentSettings
from shared.device_list import PAGE_BYTES, WantedDevice, cpu_devices, separate_devices
from shared.numa import NumaNode, numa_node_of, numa_nodes, parse_list
from weights.pool import numa
from weights.pool.memory import PoolMemory
from weights.store.memory import PageMemory
from weights.store.separate import SeparateDevice

GIB = 1 << 30
NODES = (NumaNode(0, (0, 1), 8 * GIB), NumaNode(2, (2, 3), 4 * GIB))


def system(root: Path, nodes: dict[int, tuple[str, int | None]]) -> Path:
    """Write a tree like /sys/devices/system/node: processors and kB of memory by node."""
    (root / "power").mkdir(parents=True)
    for number, (cpus, kilobytes) in nodes.items():
        directory = root / f"node{number}"
        directory.mkdir()
        (directory / "cpulist").write_text(f"{cpus}\n")
        if kilobytes is not None:
            (directory / "meminfo").write_text(
                f"\nNode {number} MemTotal:       {kilobytes} kB\nNode {number} MemFree:        {kilobytes // 2} kB\n"
            )
    return root


def status(root: Path, allowed: str) -> Path:
    path = root / "status"
    path.write_text(f"Name:\tpython\nMems_allowed:\t00000000,00000007\nMems_allowed_list:\t{allowed}\n")
    return path


@pytest.mark.parametrize(
    ("text", "expected"), [("", ()), ("\n", ()), ("0\n", (0,)), ("0-3,8\n", (0, 1, 2, 3, 8)), ("2,4-5", (2, 4, 5))]
)
def test_lists_of_the_kernel_are_parsed(text: str, expected: tuple[int, ...]) -> None:
    assert parse_list(text) == expected


def test_nodes_with_processors_and_memory_are_found_in_order(tmp_path: Path) -> None:
    tree = system(
        tmp_path / "node",
        {10: ("40-41", 1024), 2: ("2-3", 4 << 20), 0: ("0-1", 8 << 20), 3: ("", 1 << 20), 4: ("8", 0), 5: ("9", None)},
    )
    found = numa_nodes(tree, status(tmp_path, "0-63"))
    assert found == (*NODES, NumaNode(10, (40, 41), 1 << 20)), "memory alone, processors alone and unreadable nodes are left out"


def test_nodes_that_a_container_forbids_are_left_out(tmp_path: Path) -> None:
    tree = system(tmp_path / "node", {0: ("0-1", 8 << 20), 2: ("2-3", 4 << 20)})
    assert numa_nodes(tree, status(tmp_path, "2")) == NODES[1:]
    assert numa_nodes(tree, tmp_path / "no status") == NODES


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path / "none") == ()


@pytest.mark.parametrize(("device", "node"), [("cpu:0", 0), ("cpu:1", 2), ("cpu:2", 2), ("cpu:3", 2), ("cpu:4", 0)])
def test_a_device_has_the_node_of_its_number_or_one_in_turn(device: str, node: int) -> None:
    assert numa_node_of(device, NODES) == node
    assert numa_node_of(device, ()) is None
    assert numa_node_of(device, NODES[:1]) == 0


def test_several_nodes_have_a_separate_device_each_by_default() -> None:
    assert cpu_devices(()) == cpu_devices(NODES[:1]) == (WantedDevice("cpu:0"),)
    both = {
        "cpu:0": WantedDevice("cpu:0", bytes=2 * GIB, is_separate=True, numa_node=0),
        "cpu:2": WantedDevice("cpu:2", bytes=GIB, is_separate=True, numa_node=2),
    }
    assert {d.device_id: d for d in cpu_devices(NODES)} == both
    assert separate_devices("auto", NODES) == both
    assert separate_devices("auto", NODES[:1]) == {}
    named = separate_devices("cpu:0=1g,cpu:1=4g/separate", NODES)
    assert named == {"cpu:1": WantedDevice("cpu:1", bytes=4 * GIB, is_separate=True, numa_node=2)}


def test_agent_and_loader_agree_on_the_devices_of_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "load_nvml", lambda _: None)
    settings = NodeagentSettings(node="n", devices="auto")
    found = inventory.open_devices(settings, tmp_path / "budgets.json", adopting=False, nodes=NODES)
    wanted = separate_devices("auto", NODES)
    assert {d: (v.info.budget_bytes, v.info.memory) for d, v in found.items()} == {
        d: (w.bytes, "separate") for d, w in wanted.items()
    }


def test_agent_starts_on_a_full_disk_with_the_stored_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "load_nvml", lambda _: None)
    settings = NodeagentSettings(node="n", devices="auto")
    stored = tmp_path / "budgets.json"
    first = inventory.open_devices(settings, stored, adopting=False, nodes=NODES[:1])["cpu:0"].info.budget_bytes

    def fill(self: Path, *_: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(inventory, "available_bytes", lambda: 0)
    monkeypatch.setattr(Path, "write_text", fill)
    for _ in range(2):
        found = inventory.open_devices(settings, stored, adopting=True, nodes=NODES[:1])
        assert found["cpu:0"].info.budget_bytes == first


@pytest.fixture(scope="module")
def node() -> int:
    """A node of this machine."""
    nodes = numa_nodes()
    if not nodes:
        pytest.skip("this kernel has no NUMA")
    memory = PoolMemory(None, 4096, chunk_bytes=4096)
    try:
        memory.bind(nodes[0].number)
    except OSError as e:
        pytest.skip(f"the kernel refuses mbind: {e}")
    finally:
        memory.close()
    return nodes[0].number


@pytest.fixture
def pages() -> Iterator[PageMemory]:
    memory = PageMemory(None, 2)
    yield memory
    memory.close()


def numa_maps(address: int) -> str:
    """Return the kernel's line of the mapping at this address."""
    found = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if line.startswith(f"{address:08x} ")]
    return found[0] if found else ""


def test_a_binding_is_read_back_and_the_memory_is_of_the_node(node: int) -> None:
    memory = PoolMemory(None, PAGE_BYTES, chunk_bytes=PAGE_BYTES)
    try:
        assert memory.bound_to() is None
        memory.bind(node)
        assert memory.bound_to() == (node,)
        with memory.view(0, PAGE_BYTES) as view:
            view[:] = bytes(PAGE_BYTES)
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        line = numa_maps(address)
        assert line.split()[1] == f"bind:{node}"
        assert [word for word in line.split() if word.startswith("N")] == [f"N{node}={PAGE_BYTES // os.sysconf('SC_PAGE_SIZE')}"]
    finally:
        memory.close()


def test_the_pages_of_a_device_are_bound_and_its_status_says_so(node: int, pages: PageMemory) -> None:
    assert pages.bind(node)
    device = SeparateDevice("cpu:1", 2 * PAGE_BYTES, None, numa_node=node)
    try:
        assert device.pages().numa_node == node
        assert isinstance(device.memory, PageMemory)
        assert device.memory._pool.bound_to() == (node,)
    finally:
        device.close()
    unbound = SeparateDevice("cpu:1", 2 * PAGE_BYTES, None)
    assert unbound.pages().numa_node is None
    unbound.close()


def test_a_node_that_is_not_there_leaves_the_memory_unbound(node: int, pages: PageMemory, caplog: pytest.LogCaptureFixture) -> None:
    assert not pages.bind(node + 1000)
    assert "failed to bind memory to its NUMA node" in caplog.text


def test_a_machine_without_the_calls_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(OSError, match="vax") as failed:
        numa.bound_to(0)
    assert failed.value.errno == errno.ENOSYS
