"""The memory of an executor is read once for its instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from services.nodeagent.adapters import meter as module
from services.nodeagent.adapters.meter import Meter
from services.nodeagent.devices.port import DeviceInfo
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import Instance, NodeState, Process
from tests.unit.nodeagent.world import start


class Host:
    """A cpu device that counts how often each process is read."""

    info = DeviceInfo("cpu:0", "cpu", "", 100, 100)

    def __init__(self) -> None:
        self.read: Counter[int] = Counter()

    def private_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        self.read.update(found := list(pids))
        return dict.fromkeys(found, 90)

    def used_bytes(self, private_bytes: int, shared_bytes: int) -> int:
        return private_bytes + shared_bytes


def instance(number: int, pid: int, *, is_shared: bool) -> Instance:
    return Instance(command=start(f"i{number}"), token=1, progress_at=0.0, process=Process.ALIVE, pid=pid, is_shared=is_shared)


async def test_an_executor_is_read_once_and_divided_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [*(instance(n, 7, is_shared=True) for n in range(3)), instance(3, 8, is_shared=False)]
    state = NodeState(Ledger({"cpu:0": 100}), instances={i.instance_id: i for i in made})
    host = Host()
    meter = Meter({"cpu:0": host}, lambda: state, lambda: None, lambda *_: None)  # the part that it uses
    await meter.measure_all()
    assert [meter.get_private(i.instance_id) for i in made] == [30, 30, 30, 90]
    assert host.read == {7: 1, 8: 1}
    monkeypatch.setattr(module, "_EXECUTOR_EVERY_S", 0.0)
    await meter.measure(made[0])
    assert host.read[7] == 2
