"""A host whose running engine changes its model, against a server with the plug-in's endpoint."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from services.enginehost.drivers.port import PROBE_TOKENS
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import ChangeModel, EngineAsleep, EngineProbed, EngineStart, SleepEngine, WakeEngine
from shared.contracts.models import ModelCard
from shared.errors import Conflict, EngineFailed, InstanceBusy, UnsupportedParameter
from tests.support.hosted import Hosts, fake_program, hosted_card

FROM_LOADER = {"load_format": "thaw"}


def card_of(directory: Path, name: str, **options: Any) -> ModelCard:
    return hosted_card(directory, "vllm", **{"name": name, "engine_args": FROM_LOADER, **options})


async def ready(hosts: Hosts, directory: Path, *options: str, **more: Any) -> EngineStart:
    """Start a template's engine with the first model."""
    program = fake_program(directory, "vllm", *options)
    start = hosts.host(card_of(directory, "first", **more), THAW_VLLM_PYTHON=program, THAW_PROBE_INTERVAL="0")
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    return start


async def change(hosts: Hosts, start: EngineStart, card: ModelCard) -> EngineStart:
    successor = hosts.spec(card).model_copy(update={"environment": start.environment})
    await hosts.mesh.request(subjects.engine_control(start.instance_id), ChangeModel(start=successor), Done)
    return successor


async def stats(hosts: Hosts, start: EngineStart) -> Any:
    return (await hosts.request_route(start.instance_id, "/stats", "GET")).json


async def text(hosts: Hosts, start: EngineStart) -> str:
    found = (await hosts.request(start.instance_id, "completion", prompt="x", max_tokens=1, fake={"named": True})).json
    answer: str = found["choices"][0]["text"]
    return answer


async def test_engine_serves_one_model_after_another_in_the_same_processes(hosts: Hosts, tmp_path: Path) -> None:
    start = await ready(hosts, tmp_path)
    pids = (await hosts.settled(start.instance_id)).hosted
    assert await text(hosts, start) == "first: t0 "
    for name in ("second", "third", "first"):
        start = await change(hosts, start, card_of(tmp_path, name))
        report = await hosts.settled(start.instance_id)
        assert (report.state, report.fell_back) == ("ready", None), report.error
        assert report.hosted is not None
        assert pids is not None
        assert report.hosted.pids == pids.pids
        assert await text(hosts, start) == f"{name}: t0 "
        assert "the engine becomes" not in Path(start.log_path).read_text(), "its log begins with it"
    asked = [body for _, path, body in (await stats(hosts, start))["calls"] if path == "/thaw/model"]
    assert [a["name"] for a in asked] == ["second", "third", "first"]
    assert asked[-1]["log"] == start.log_path
    assert asked[-1]["source"] == str(tmp_path)
    assert asked[-1]["socket"].endswith(".sock")


async def test_paused_engine_changes_its_model(hosts: Hosts, tmp_path: Path) -> None:
    start = await ready(hosts, tmp_path)
    await hosts.mesh.request(subjects.engine_control(start.instance_id), SleepEngine(level=0), EngineAsleep)
    start = await change(hosts, start, card_of(tmp_path, "second"))
    assert (await hosts.settled(start.instance_id)).state == "ready"
    assert await text(hosts, start) == "second: t0 "


async def test_one_token_proves_a_change_and_the_output_is_kept_before_the_engine_sleeps(hosts: Hosts, tmp_path: Path) -> None:
    """A request waits for the change: what later probes compare with is generated afterwards."""
    start = await change(hosts, await ready(hosts, tmp_path), card_of(tmp_path, "second"))
    assert (await hosts.settled(start.instance_id)).state == "ready"
    assert await probes_after_the_change(hosts, start) == [1]
    control = subjects.engine_control(start.instance_id)
    await hosts.mesh.request(control, SleepEngine(level=0), EngineAsleep)
    assert (await hosts.mesh.request(control, WakeEngine(), EngineProbed)).same
    assert await probes_after_the_change(hosts, start) == [1, PROBE_TOKENS, PROBE_TOKENS]


async def test_busy_changed_engine_is_not_probed_when_it_is_to_sleep(hosts: Hosts, tmp_path: Path) -> None:
    """The output to keep must not depend on the requests that are computed beside it."""
    start = await change(hosts, await ready(hosts, tmp_path), card_of(tmp_path, "second"))
    assert (await hosts.settled(start.instance_id)).state == "ready"
    slow = await hosts.ask(start.instance_id, "completion", prompt="x", stream=True, fake={"tokens": 10_000, "pace": 0.05})
    await slow.until(bool)
    with pytest.raises(InstanceBusy):
        await hosts.mesh.request(subjects.engine_control(start.instance_id), SleepEngine(level=0), EngineAsleep)
    assert (await probes_after_the_change(hosts, start))[0] == 1
    assert PROBE_TOKENS not in await probes_after_the_change(hosts, start)
    assert await text(hosts, start) == "second: t0 ", "it serves as before"


async def test_changed_engine_that_generates_nothing_before_it_sleeps_serves_on(hosts: Hosts, tmp_path: Path) -> None:
    start = await change(hosts, await ready(hosts, tmp_path), card_of(tmp_path, "second"))
    assert (await hosts.settled(start.instance_id)).state == "ready"
    await hosts.request(start.instance_id, "completion", prompt="x", fake={"mute": True})
    with pytest.raises(EngineFailed, match="generated no token"):
        await hosts.mesh.request(subjects.engine_control(start.instance_id), SleepEngine(level=0), EngineAsleep)
    assert (await stats(hosts, start))["calls"], "it takes requests"


async def test_changed_engine_with_other_output_after_sleeping_does_not_wake(hosts: Hosts, tmp_path: Path) -> None:
    start = await change(hosts, await ready(hosts, tmp_path), card_of(tmp_path, "second"))
    assert (await hosts.settled(start.instance_id)).state == "ready"
    control = subjects.engine_control(start.instance_id)
    await hosts.mesh.request(control, SleepEngine(level=0), EngineAsleep)
    assert (await hosts.mesh.request(control, WakeEngine(), EngineProbed)).same
    await hosts.request(start.instance_id, "completion", prompt="x", fake={"dropped": True})
    await hosts.mesh.request(control, SleepEngine(level=0), EngineAsleep)
    with pytest.raises(EngineFailed, match="differs"):
        await hosts.mesh.request(control, WakeEngine(), EngineProbed)


async def probes_after_the_change(hosts: Hosts, start: EngineStart) -> list[int]:
    """Return the numbers of tokens that the host asked for since the change of the model."""
    calls = (await stats(hosts, start))["calls"]
    changed = max(i for i, (_, path, _) in enumerate(calls) if path == "/thaw/model")
    return [body["max_tokens"] for _, path, body in calls[changed:] if path == "/v1/completions" and "fake" not in body]


@pytest.mark.parametrize("how", ["refuse", "nan", "exit"])
async def test_failed_change_ends_in_one_cold_start_and_says_so(hosts: Hosts, tmp_path: Path, how: str) -> None:
    start = await ready(hosts, tmp_path, "--change", how)
    before = (await hosts.settled(start.instance_id)).hosted
    start = await change(hosts, start, card_of(tmp_path, "second"))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert report.fell_back is not None
    reasons = {"refuse": "no such change", "nan": "logits are not finite", "exit": "exit status 5|closed early"}
    assert re.search(reasons[how], report.fell_back.message)
    assert before is not None
    assert report.hosted is not None
    assert not set(before.pids) & set(report.hosted.pids), "other processes"
    assert await text(hosts, start) == "second: t0 "


async def test_engine_that_serves_or_is_of_another_shape_refuses(hosts: Hosts, tmp_path: Path) -> None:
    start = await ready(hosts, tmp_path)
    for other in (
        card_of(tmp_path, "second", max_concurrency=2),
        card_of(tmp_path, "second").model_copy(update={"info": card_of(tmp_path, "x").info.model_copy(update={"shape": "s2"})}),
    ):
        with pytest.raises(Conflict, match="second and first differ"):
            await change(hosts, start, other)
    slow = await hosts.ask(start.instance_id, "completion", prompt="x", stream=True, fake={"tokens": 10_000, "pace": 0.05})
    await slow.until(bool)
    with pytest.raises(InstanceBusy):
        await change(hosts, start, card_of(tmp_path, "second"))
    assert await text(hosts, start) == "first: t0 ", "it serves as before"


async def test_engine_with_its_own_loader_cannot_change_its_model(hosts: Hosts, tmp_path: Path) -> None:
    start = await ready(hosts, tmp_path, engine_args={})
    with pytest.raises(UnsupportedParameter):
        await change(hosts, start, card_of(tmp_path, "second", engine_args={}))


async def test_stop_signal_during_a_change_leaves_no_process(hosts: Hosts, tmp_path: Path) -> None:
    start = await ready(hosts, tmp_path)
    engine = (await hosts.settled(start.instance_id)).hosted
    successor = await change(hosts, start, card_of(tmp_path, "second"))
    hosts.processes[-1].terminate()
    await asyncio.to_thread(hosts.processes[-1].wait, 60)
    assert engine is not None
    assert not [pid for pid in engine.pids if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110  # async
    await hosts.left_nothing(successor.instance_id)
