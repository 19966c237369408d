"""A running request moves with its keys and values from the processes of a group to one engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine
from shared.contracts.inference import FairShare
from tests.integration.engine.engine_pair import LONG, Move, Pair, stalled
from tests.integration.engine.group_pair import Started, begin_pair, model
from tests.integration.engine.stage_processes import Group
from tests.support.kv_transfer import Fault, Proxy
from tests.support.paced_zygote import Pace
from tests.support.stopping import stop


@pytest.fixture
async def started(group: Group, tmp_path: Path, paces: tuple[Pace, Pace]) -> Started:
    async def begin(stages: int, dtype: str = "float32") -> Pair:
        return await begin_pair(group, model(tmp_path, dtype), stages, paces)

    return begin


@pytest.mark.parametrize(("dtype", "stages"), [("float32", 3), ("bfloat16", 2)])
async def test_request_moves_with_the_keys_and_values_of_all_stages(started: Started, dtype: str, stages: int) -> None:
    move = Move(await started(stages, dtype), LONG)
    await move.begin()
    read = await move.read()
    assert read.kv is not None
    assert len(read.kv.parts) == stages
    prepared = await move.prepare(read, read.kv)
    assert (prepared.tokens, prepared.left, prepared.kv_reason) == (0, 0, "")
    assert prepared.kv_tokens == len(read.prompt_token_ids[0]) + len(read.choices[0].token_ids) - 1
    assert prepared.kv_bytes == prepared.kv_tokens * read.kv.token_bytes
    await move.yield_()
    await move.finish()
    first = next(r for r in move.rest.replies if getattr(r, "phases", ()) and r.kind == "chunk")
    (prefill,) = (s for s in first.phases if s.phase == "prefill")
    moved = len(read.prompt_token_ids[0]) + len(move.stream.tokens()) - 1
    assert int(prefill.detail["kv_tokens"]) == moved
    assert int(prefill.detail["kv_bytes"]) == moved * read.kv.token_bytes


@pytest.mark.parametrize("victim", [0, 1])
async def test_stage_that_is_killed_while_it_sends_costs_no_answer(started: Started, group: Group, victim: int) -> None:
    move = Move(await started(2), LONG)
    async with stalled(move, victim) as preparing:
        os.kill(group.pids[victim], signal.SIGKILL)
        prepared = await preparing
    assert prepared.kv_reason
    assert (prepared.left, prepared.tokens > 0) == (0, True)
    await move.finish()


async def test_frozen_stage_is_given_up_and_the_group_continues(started: Started, group: Group) -> None:
    move = Move(await started(2), LONG)
    await move.begin()
    read = await move.read()
    stop(group.pids[1])
    try:
        prepared = await move.prepare(read, read.kv)
    finally:
        os.kill(group.pids[1], signal.SIGCONT)
    assert "timed out" in prepared.kv_reason
    assert (prepared.kv_tokens, prepared.left) == (0, 0)
    await move.yield_()
    await move.finish()


async def test_wrong_pieces_are_not_used(started: Started) -> None:
    """A damaged piece of the later stage; another API key; only the first stage's layers."""
    pair = await started(2)
    move = Move(pair, LONG)
    await move.begin(31, share=FairShare(flow="key a"))
    read = await move.read()
    assert read.kv is not None
    assert read.kv.cache_salt == "key a"
    proxy = Proxy(read.kv.later[0].port, Fault("flip", 8_000))
    try:
        damaged = await move.prepare(read, proxy.offered(read.kv, 1), name="damaged")
    finally:
        proxy.close()
    assert "damaged" in damaged.kv_reason
    other_key = await move.prepare(read, read.kv.model_copy(update={"cache_salt": "another key"}), name="other")
    assert "other tokens" in other_key.kv_reason
    half = await move.prepare(read, read.kv.model_copy(update={"later": ()}), name="half")
    assert "layers" in half.kv_reason
    for prepared in (damaged, other_key, half):
        assert (prepared.kv_tokens, prepared.left) == (0, 0)
    right = await move.prepare(read, read.kv)
    assert (right.tokens, right.left, right.kv_reason) == (0, 0, "")


async def test_draining_group_ends_when_its_last_request_was_read(started: Started, group: Group) -> None:
    pair = await started(2)
    move = Move(pair, LONG)
    await move.begin()
    read = await move.read()
    await move.prepare(read, read.kv)
    for start in group.starts:
        await group.engines.mesh.request(subjects.engine_control(start.instance_id), DrainEngine(reason="test"), Done)
    await move.yield_()
    await move.finish()
    for start in group.starts:
        await group.engines.reported(start.instance_id, lambda r: r.state == "stopped")
    assert "failed" not in group.states()
