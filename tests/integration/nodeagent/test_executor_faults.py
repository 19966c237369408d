"""Models that fail in a real executor: others answer, and the model gets a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.contracts.inference import InferFailed, InferFinished
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from tests.integration.engine.processes import until_streaming
from tests.integration.nodeagent.harness import Node, gone
from tests.integration.nodeagent.shared_engines import shared_node, started
from tests.support import faulty_zygote
from tests.support.engines import Engines
from tests.support.servers import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_kills")]
ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
FAULTY = {"THAW_ZYGOTE_MODULE": "tests.support.faulty_zygote"}
SHORT_STEPS = "5"
"""Seconds of a step, for the test of one that does not end. Others may wait for a processor."""


@pytest.fixture
async def node(
    nats_server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Node, list[ModelCard], Engines]]:
    """Yield a node whose engines fail on certain prompts, its models, and a client."""
    limit = {"THAW_STEP_TIMEOUT": request.param} if hasattr(request, "param") else {}
    async with shared_node(nats_server.url, tmp_path, **FAULTY, **limit) as (node, cards):
        yield node, cards, Engines(node.mesh, node.name, nats_server.url, tmp_path)


async def test_model_that_raises_fails_its_own_requests_only(node: tuple[Node, list[ModelCard], Engines]) -> None:
    agent, cards, engines = node
    first = await started(agent, cards[0], "raises")
    await started(agent, cards[1], "other")
    expected = (await engines.answer("raises", "completion", prompt="abc", **ASKED)).tokens()
    other = await engines.ask("other", "completion", prompt="abc", **{**ASKED, "max_tokens": 400})
    await until_streaming(other)
    failed = (await engines.answer("raises", "completion", prompt=faulty_zygote.prompt(faulty_zygote.RAISES), **ASKED)).replies[-1]
    assert isinstance(failed, InferFailed)
    assert "a fault of this test" in failed.error.message
    assert isinstance(await other.last(), InferFinished)
    assert (await engines.answer("raises", "completion", prompt="abc", **ASKED)).tokens() == expected
    assert agent.instance("raises").state is InstanceState.READY
    assert agent.instance("raises").pids == first.pids


async def test_model_that_leaks_is_moved_to_a_process_of_its_own(node: tuple[Node, list[ModelCard], Engines]) -> None:
    agent, cards, engines = node
    shared = await started(agent, cards[0], "leaks")
    await started(agent, cards[1], "other")
    other = await engines.ask("other", "completion", prompt="abc", **{**ASKED, "max_tokens": 400})
    leaking = await engines.ask("leaks", "completion", prompt=faulty_zygote.prompt(faulty_zygote.LEAKS), **ASKED)
    failed = await agent.reaches("leaks", InstanceState.FAILED)
    assert failed.error is not None
    assert failed.error.code == "memory_exceeded"
    assert cards[0].name in failed.error.message
    assert isinstance(await leaking.last(), InferFailed), "a gateway continues it elsewhere"
    assert isinstance(await other.last(), InferFinished), "the other model was not disturbed"
    await agent.until(lambda s: sum(i.memory.reserved > 0 for i in s.instances) == 1)
    again = await started(agent, cards[0], "again")
    assert again.pids != shared.pids
    assert agent.instance("other").pids == shared.pids
    answer = await engines.answer("again", "completion", prompt=faulty_zygote.prompt(faulty_zygote.LEAKS), **ASKED)
    assert isinstance(answer.replies[-1], InferFinished)
    assert isinstance((await engines.answer("other", "completion", prompt="abc", **ASKED)).replies[-1], InferFinished)


@pytest.mark.parametrize("node", [SHORT_STEPS], indirect=True, ids=["short steps"])
async def test_step_that_does_not_end_ends_the_executor_and_its_model_is_never_shared_again(
    node: tuple[Node, list[ModelCard], Engines],
) -> None:
    agent, cards, engines = node
    shared = await started(agent, cards[0], "loops")
    await started(agent, cards[1], "other")
    await engines.ask("loops", "completion", prompt=faulty_zygote.prompt(faulty_zygote.LOOPS), **ASKED)
    for name in ("loops", "other"):
        failed = await agent.reaches(name, InstanceState.FAILED)
        assert failed.error is not None
        assert "a step of loops did not end" in failed.error.message
    assert await gone(shared.pids[0], within=0)  # the zygote may have yet to reap it

    agent.kill_agent()
    await agent.start_agent()
    other, looping = await started(agent, cards[1], "other2"), await started(agent, cards[0], "loops2")
    assert other.pids != looping.pids
    third = await started(agent, cards[1], "other3")
    assert third.pids == other.pids, "only the other model is shared"
    answers = await asyncio.gather(
        engines.answer("loops2", "completion", prompt=faulty_zygote.prompt(faulty_zygote.LOOPS), **ASKED),
        engines.answer("other2", "completion", prompt="abc", **ASKED),
    )
    assert all(isinstance(answer.replies[-1], InferFinished) for answer in answers)


async def test_executor_that_is_killed_from_outside_counts_for_no_model(node: tuple[Node, list[ModelCard], Engines]) -> None:
    agent, cards, engines = node
    for turn in range(2):
        shared = await started(agent, cards[0], f"busy{turn}")
        running = await engines.ask(f"busy{turn}", "completion", prompt="abc", **{**ASKED, "max_tokens": 400})
        await until_streaming(running)
        if turn:
            agent.kill_agent()
        psutil.Process(shared.pids[0]).kill()
        assert await gone(shared.pids[0])
        if turn:
            await agent.start_agent()
        await agent.reaches(f"busy{turn}", InstanceState.FAILED)
    last, other = await started(agent, cards[0], "last"), await started(agent, cards[1], "other")
    assert last.pids == other.pids, "the model is still shared"


async def test_model_that_crashed_twice_gets_a_process_of_its_own(node: tuple[Node, list[ModelCard], Engines]) -> None:
    """The second crash happens while there is no nodeagent: the executor's log shows the fault."""
    agent, cards, engines = node
    crash = faulty_zygote.prompt(faulty_zygote.CRASHES)
    for turn in range(2):
        shared, other = await started(agent, cards[0], f"crashes{turn}"), await started(agent, cards[1], f"other{turn}")
        assert shared.pids == other.pids
        if turn:
            agent.kill_agent()
        await engines.ask(f"crashes{turn}", "completion", prompt=crash, **ASKED)
        assert await gone(shared.pids[0])
        if turn:
            await agent.start_agent()
        for name in (f"crashes{turn}", f"other{turn}"):
            await agent.reaches(name, InstanceState.FAILED)
    alone, other = await started(agent, cards[0], "alone"), await started(agent, cards[1], "other")
    assert alone.pids != other.pids
    answer = await engines.answer("alone", "completion", prompt=crash, **ASKED)
    assert isinstance(answer.replies[-1], InferFinished)
