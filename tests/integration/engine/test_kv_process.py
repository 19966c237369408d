"""A running request moves with its keys and values between engine processes, over NATS and TCP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine
from shared.contracts.migration import ForgetResume
from shared.errors import ThawError
from tests.integration.engine.engine_pair import LONG, Move, Pair, stalled
from tests.integration.engine.processes import forked
from tests.support.engines import Engines, ZygoteClient
from tests.support.paced_zygote import Pace
from tests.support.segments import FakeLoader, card_of
from tests.support.stopping import stop

BODY = LONG | {"n": 2}


@pytest.fixture
async def pair(
    engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path, paces: tuple[Pace, Pace]
) -> AsyncIterator[Pair]:
    starts = [engines.paced(card_of(demo_directory), pace) for pace in paces]
    pids = [await forked(client, start) for start in starts]
    for start in starts:
        assert (await engines.settled(start.instance_id)).state == "ready"
    made = Pair((starts[0].instance_id, starts[1].instance_id), (pids[0], pids[1]), engines, client, paces)
    yield made
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await made.exited(pid)


async def test_request_moves_with_its_keys_and_values(pair: Pair) -> None:
    move = Move(pair, BODY)
    await move.begin()
    read = await move.read()
    assert read.kv is not None
    prepared = await move.prepare(read, read.kv)
    assert (prepared.tokens, prepared.left, prepared.kv_reason) == (0, 0, "")
    lengths = [len(p) + len(c.token_ids) - 1 for p, c in zip(read.prompt_token_ids, read.choices, strict=True)]
    assert prepared.kv_tokens == sum(lengths)
    assert prepared.kv_bytes == prepared.kv_tokens * read.kv.layout.token_bytes
    await move.yield_()
    await move.finish()
    first = next(r for r in move.rest.replies if getattr(r, "phases", ()) and r.kind == "chunk")
    (prefill,) = (s for s in first.phases if s.phase == "prefill")
    assert int(prefill.detail["kv_tokens"]) >= prepared.kv_tokens
    assert int(prefill.detail["kv_bytes"]) >= prepared.kv_bytes


async def test_source_that_is_killed_while_it_sends_costs_no_answer(pair: Pair) -> None:
    move = Move(pair, BODY)
    async with stalled(move) as preparing:
        os.kill(pair.pids[0], signal.SIGKILL)
        prepared = await preparing
    assert prepared.kv_reason
    assert prepared.left == 0
    assert prepared.tokens > 0
    await move.finish()


async def test_source_that_is_killed_after_it_has_sent_costs_no_answer(pair: Pair) -> None:
    move = Move(pair, BODY)
    await move.begin()
    read = await move.read()
    await move.prepare(read, read.kv)
    os.kill(pair.pids[0], signal.SIGKILL)
    await move.finish()


async def test_destination_that_is_killed_while_it_receives_disturbs_nothing(pair: Pair) -> None:
    move = Move(pair, BODY)
    async with stalled(move) as preparing:
        os.kill(pair.pids[1], signal.SIGKILL)
        preparing.cancel()
        with contextlib.suppress(asyncio.CancelledError, ThawError):
            await preparing
    await move.yield_()
    await move.finish(at=0)


async def test_frozen_source_delays_a_resumed_request_only_briefly(pair: Pair) -> None:
    """The last tokens are computed if the source does not send them."""
    move = Move(pair, BODY)
    await move.begin()
    read = await move.read()
    assert read.kv is not None
    await move.prepare(read, read.kv)
    await move.yield_()
    stop(pair.pids[0])
    try:
        await move.finish()
    finally:
        os.kill(pair.pids[0], signal.SIGCONT)


async def test_draining_source_ends_when_its_last_request_was_read(pair: Pair) -> None:
    move = Move(pair, BODY)
    await move.begin()
    read = await move.read()
    await move.prepare(read, read.kv)
    await pair.engines.mesh.request(pair.controls[0], DrainEngine(reason="test"), Done)
    await move.yield_()
    await move.finish()
    await pair.exited(pair.pids[0])


async def test_dropped_preparation_ends_the_transfer(pair: Pair) -> None:
    move = Move(pair, BODY)
    await move.begin()
    read = await move.read()
    await move.prepare(read, read.kv)
    await pair.engines.mesh.request(pair.controls[1], ForgetResume(prepared=move.stream.request_id), Done)
    await move.yield_()
    await move.finish()
