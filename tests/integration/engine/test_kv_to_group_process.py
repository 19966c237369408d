"""A running request moves with its keys and values from one engine to the processes of a group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from shared.contracts.base import Done
from shared.contracts.migration import ForgetResume
from shared.errors import ThawError
from tests.integration.engine.engine_pair import LONG, Move, Pair, stalled
from tests.integration.engine.group_pair import Started, begin_pair, model
from tests.integration.engine.stage_processes import Group
from tests.support.engines import Engines, ZygoteClient
from tests.support.kv_transfer import Fault, Proxy
from tests.support.paced_zygote import Pace
from tests.support.segments import FakeLoader
from tests.support.stopping import stop


@pytest.fixture
async def started(group: Group, tmp_path: Path, paces: tuple[Pace, Pace]) -> Started:
    """Return what starts an engine, and a group of the same model, to which its requests move."""

    async def begin(stages: int, dtype: str = "float32") -> Pair:
        return (await begin_pair(group, model(tmp_path, dtype), stages, paces)).reversed()

    return begin


@pytest.mark.parametrize(("dtype", "stages"), [("float32", 3), ("bfloat16", 2)])
async def test_request_moves_with_the_keys_and_values_of_all_layers(started: Started, dtype: str, stages: int) -> None:
    move = Move(await started(stages, dtype), LONG)
    await move.begin()
    read = await move.read()
    assert read.kv is not None
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


async def test_engine_that_is_killed_while_it_sends_costs_no_answer(started: Started) -> None:
    pair = await started(2)
    move = Move(pair, LONG)
    async with stalled(move) as preparing:
        os.kill(pair.pids[0], signal.SIGKILL)
        prepared = await preparing
    assert prepared.kv_reason
    assert (prepared.left, prepared.tokens > 0) == (0, True)
    await move.finish()


async def test_frozen_engine_is_given_up(started: Started) -> None:
    pair = await started(2)
    move = Move(pair, LONG)
    await move.begin()
    read = await move.read()
    stop(pair.pids[0])
    try:
        prepared = await move.prepare(read, read.kv)
    finally:
        os.kill(pair.pids[0], signal.SIGCONT)
    assert "timed out" in prepared.kv_reason
    assert (prepared.kv_tokens, prepared.left) == (0, 0)
    await move.yield_()
    await move.finish()


@pytest.mark.parametrize("victim", [0, 1])
async def test_stage_that_is_killed_while_it_receives_disturbs_nothing(started: Started, group: Group, victim: int) -> None:
    """The group ends, and the request continues where it runs."""
    move = Move(await started(2), LONG)
    async with stalled(move) as preparing:
        os.kill(group.pids[victim], signal.SIGKILL)
        if victim:
            await group.engines.reported(group.starts[0].instance_id, lambda r: r.state == "failed")
        preparing.cancel()
        with contextlib.suppress(asyncio.CancelledError, ThawError):
            await preparing
    await move.yield_()
    await move.finish(at=0)


async def test_frozen_stage_delays_the_group_until_it_continues(started: Started, group: Group) -> None:
    """No token counts before it has reported its layers."""
    move = Move(await started(2), LONG)
    await move.begin()
    read = await move.read()
    stop(group.pids[1])
    try:
        preparing = asyncio.create_task(move.prepare(read, read.kv))
        done, _ = await asyncio.wait({preparing}, timeout=1.0)
        assert not done
    finally:
        os.kill(group.pids[1], signal.SIGCONT)
    prepared = await preparing
    assert (prepared.tokens, prepared.left, prepared.kv_reason) == (0, 0, "")
    await move.yield_()
    await move.finish()


async def test_damaged_pieces_are_not_used(started: Started) -> None:
    move = Move(await started(2), LONG)
    await move.begin(31)
    read = await move.read()
    assert read.kv is not None
    proxy = Proxy(read.kv.port, Fault("flip", 8_000))
    try:
        damaged = await move.prepare(read, proxy.offered(read.kv), name="damaged")
    finally:
        proxy.close()
    assert (damaged.kv_tokens, damaged.left, bool(damaged.kv_reason)) == (0, 0, True)
    right = await move.prepare(read, read.kv)
    assert (right.tokens, right.left, right.kv_reason) == (0, 0, "")
    await move.yield_()
    await move.finish()


async def test_dropped_preparation_ends_the_transfer(started: Started) -> None:
    pair = await started(2)
    move = Move(pair, LONG)
    async with stalled(move) as preparing:
        await pair.engines.mesh.request(pair.controls[1], ForgetResume(prepared=move.stream.request_id), Done)
        with pytest.raises(ThawError, match="discarded"):
            await preparing
    await move.yield_()
    await move.finish()


async def test_request_moves_from_one_group_to_another(
    started: Started, engines: Engines, client: ZygoteClient, loader: FakeLoader, tmp_path: Path
) -> None:
    """Of other stages: three read from two."""
    pair = await started(2)
    other = Group(engines, client, loader)
    try:
        engine, source = pair.paces
        await other.begin(model(tmp_path, "float32"), 3, engine)
        first = await other.ready()
        instances, pids = (pair.instances[1], first), (pair.pids[1], other.pids[0])
        move = Move(Pair(instances, pids, engines, client, (source, engine)), LONG)
        await move.begin()
        read = await move.read()
        prepared = await move.prepare(read, read.kv)
        assert (prepared.tokens, prepared.left, prepared.kv_reason) == (0, 0, "")
        await move.yield_()
        await move.finish()
    finally:
        await other.close()
