"""vLLM's own sleep through its host, against a server with the same endpoints.

The server really releases memory: a 200 alone proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from services.nodeagent.devices.port import DeviceInfo
from services.nodeagent.suspend.memory import footprint
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from services.nodeagent.suspend.sleep import EngineSleep
from shared.contracts import subjects
from shared.contracts.engine import EngineAsleep, EngineProbed, SleepEngine, WakeEngine
from shared.errors import CannotSuspend, DeadlineExceeded, EngineFailed
from tests.integration.enginehost.driver_cards import card_of
from tests.support.hosted import MIB, Hosts, fake_program
from tests.support.stopping import stop

BALLAST_MIB = 200


class HostMemoryAsGpu:
    """`cuda:0` whose memory is the host memory of the engine's processes."""

    info = DeviceInfo("cuda:0", "cuda", "host memory", 1 << 40, 1 << 40)

    def private_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        return {pid: footprint([pid]).pss for pid in pids}

    def used_bytes(self, private_bytes: int, shared_bytes: int) -> int:
        return private_bytes + shared_bytes


GAUGE = MemoryUsage({"cuda:0": HostMemoryAsGpu()})


class Asleep:
    """A ready engine, and the method that puts it to sleep."""

    def __init__(self, hosts: Hosts, instance_id: str, pids: tuple[int, ...], levels: tuple[int, ...]) -> None:
        self.hosts = hosts
        self.control = subjects.engine_control(instance_id)
        self.instance_id = instance_id
        self.target = Target(instance_id, "vllm", ("cuda:0",), pids, hosted=True, sleep_levels=levels)
        self.way = EngineSleep(GAUGE, self._sleep, 1 << 40)

    async def _sleep(self, instance_id: str, level: int) -> EngineAsleep:
        return await self.hosts.mesh.request(subjects.engine_control(instance_id), SleepEngine(level=level), EngineAsleep)

    async def wake(self) -> EngineProbed:
        await self.way.resume(self.target)
        return await self.hosts.mesh.request(self.control, WakeEngine(), EngineProbed)

    async def calls(self) -> list[str]:
        stats = (await self.hosts.request_route(self.instance_id, "/stats", "GET")).json
        return [path for _, path, _ in stats["calls"] if path.startswith(("/sleep", "/wake", "/coll"))]


async def engine(hosts: Hosts, tmp_path: Path, level: int, *options: str) -> Asleep:
    program = fake_program(tmp_path, "vllm", "--ballast", str(BALLAST_MIB), *options)
    start = hosts.host(card_of(tmp_path, "vllm"), device="cuda:0", THAW_VLLM_PYTHON=program)
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert report.hosted is not None
    return Asleep(hosts, start.instance_id, report.hosted.pids, tuple(n for n in report.hosted.sleep_levels if n >= level))


@pytest.mark.parametrize("level", [1, 2])
async def test_memory_is_freed_and_restored_and_the_output_is_the_same(hosts: Hosts, tmp_path: Path, level: int) -> None:
    found = await engine(hosts, tmp_path, level)
    before = GAUGE.used_bytes(found.target)
    outlook = found.way.outlook(found.target)
    assert outlook.way == "sleep"
    assert (outlook.snapshot_bytes > 0) is (level == 1), "level 1 keeps the weights in host memory"
    taken = await found.way.suspend(found.target)
    assert taken.freed_bytes > 0.9 * BALLAST_MIB * MIB
    assert GAUGE.used_bytes(found.target) < before - 0.9 * BALLAST_MIB * MIB, "read back"
    assert (await hosts.request(found.instance_id, "chat", messages=[])).error is not None, "it takes nothing meanwhile"
    assert (await found.wake()).same
    assert GAUGE.used_bytes(found.target) > 0.9 * before
    asked = {
        1: ["/sleep?level=1", "/wake_up"],
        2: ["/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"],
    }
    assert await found.calls() == asked[level]


async def test_engine_that_falls_asleep_after_the_deadline_is_woken(hosts: Hosts, tmp_path: Path) -> None:
    found = await engine(hosts, tmp_path, 1)
    stop(found.target.pids[0])
    with pytest.raises(DeadlineExceeded):
        await hosts.mesh.request(found.control, SleepEngine(level=1, deadline_ms=300), EngineAsleep)
    psutil.Process(found.target.pids[0]).resume()
    assert (await found.wake()).same
    assert await found.calls() == ["/sleep?level=1", "/wake_up"]
    assert (await hosts.request(found.instance_id, "chat", messages=[])).status == 200


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_that_freed_nothing_is_reported(hosts: Hosts, tmp_path: Path, level: int) -> None:
    found = await engine(hosts, tmp_path, level, "--hoard")
    with pytest.raises(CannotSuspend, match=r"reports that it sleeps, but .* MiB are still in use"):
        await found.way.suspend(found.target)
    assert (await found.wake()).same, "it can be brought back"
    assert (await hosts.request(found.instance_id, "chat", messages=[])).status == 200


async def test_weights_missing_after_the_wake_fail_the_probe(hosts: Hosts, tmp_path: Path) -> None:
    found = await engine(hosts, tmp_path, 2, "--no-reload")
    await found.way.suspend(found.target)
    with pytest.raises(EngineFailed, match="differs from its output before sleeping"):
        await found.wake()
