"""A suspended engine becomes an instance of another model, under a real nodeagent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from tests.integration.nodeagent.harness import MIB, gone, running_node
from tests.integration.suspend.hosted import engine_pids, generate, start_hosted
from tests.support.hosted import fake_program, hosted_card
from tests.support.paging import skip_unless_able
from tests.support.servers import NatsServer

SUSPENDED, READY, STOPPED = InstanceState.SUSPENDED, InstanceState.READY, InstanceState.STOPPED


def card(directory: Path, name: str, **options: Any) -> ModelCard:
    return hosted_card(directory, "vllm", **{"name": name, "engine_args": {"load_format": "thaw"}, **options})


async def test_model_that_never_ran_takes_a_suspended_engine(nats_server: NatsServer, tmp_path: Path) -> None:
    skip_unless_able()
    program = fake_program(tmp_path, "vllm", "--ballast", "60")
    async with running_node(nats_server.url, tmp_path, THAW_VLLM_PYTHON=program, THAW_DEVICES="cpu:0=300MiB") as node:
        first = (await start_hosted(node, card(tmp_path, "demo"), mib=200, park=True)).instance_id
        status = node.instance(first)
        assert status.template_key, "it is offered"
        processes = engine_pids(node, first)
        for _ in range(3):  # one model after the other, in one engine
            second = (await start_hosted(node, card(tmp_path, "demo"), mib=200, template=first)).instance_id
            status = node.instance(second)
            assert (status.template, status.suspension.fell_back) == (first, None)
            assert set(engine_pids(node, second)) == set(processes), "the same processes"
            assert (node.instance(first).state, node.instance(first).pids) == (STOPPED, ())
            assert node.latest.devices[0].reserved_bytes == 200 * MIB, "one booking"
            assert await generate(node, second)
            assert {p.value for p in (s.phase for s in status.phases)} >= {"container", "load", "profile"}
            assert not status.template_key, "it serves"
            await node.suspend(second)
            await node.reaches(second, SUSPENDED)
            first = second
        assert node.instance(first).template_key
        await node.stop(first)
        await node.reaches(first, STOPPED)
        assert all([await gone(p) for p in processes])


async def test_engine_that_cannot_change_is_started_cold_and_the_status_says_so(nats_server: NatsServer, tmp_path: Path) -> None:
    skip_unless_able()
    program = fake_program(tmp_path, "vllm", "--ballast", "60", "--change", "nan")
    async with running_node(nats_server.url, tmp_path, THAW_VLLM_PYTHON=program, THAW_DEVICES="cpu:0=300MiB") as node:
        first = (await start_hosted(node, card(tmp_path, "demo"), mib=200, park=True)).instance_id
        processes = engine_pids(node, first)
        second = (await start_hosted(node, card(tmp_path, "demo"), mib=200, template=first)).instance_id
        fell_back = node.instance(second).suspension.fell_back
        assert fell_back is not None
        assert "logits are not finite" in fell_back.message
        assert not set(engine_pids(node, second)) & set(processes)
        assert await generate(node, second)


async def test_agent_killed_after_the_change_adopts_the_new_instance(nats_server: NatsServer, tmp_path: Path) -> None:
    skip_unless_able()
    program = fake_program(tmp_path, "vllm", "--ballast", "60")
    async with running_node(nats_server.url, tmp_path, THAW_VLLM_PYTHON=program, THAW_DEVICES="cpu:0=300MiB") as node:
        first = (await start_hosted(node, card(tmp_path, "demo"), mib=200, park=True)).instance_id
        second = (await start_hosted(node, card(tmp_path, "demo"), mib=200, template=first)).instance_id
        processes = engine_pids(node, second)
        assert node.process is not None
        os.kill(node.process.pid, 9)
        node.process.wait()
        await node.start_agent()
        await node.reaches(second, READY)
        assert set(engine_pids(node, second)) == set(processes)
        assert node.latest.devices[0].reserved_bytes == 200 * MIB
        assert await generate(node, second)
