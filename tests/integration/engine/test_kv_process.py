"""A running request moves with its keys and values between engine processes, over NATS and TCP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import DrainEngine, EngineExited
from shared.contracts.inference import InferFinished, InferStarted, InferYielded, Resume, ResumedChoice
from shared.contracts.kv_transfer import KvOffer
from shared.contracts.migration import ForgetResume, PrepareResume, ReadTokens, ResumePrepared, TokensRead, YieldInfer
from shared.errors import ThawError
from tests.integration.engine.processes import SLOW, forked
from tests.support.engines import Engines, ZygoteClient
from tests.support.kv_transfer import Fault, Proxy
from tests.support.paced_zygote import Pace
from tests.support.segments import FakeLoader, card_of
from tests.support.sizes import size

LONG: dict[str, Any] = SLOW | {"max_tokens": size(80, 200), "temperature": 1.0}
"""A request that lasts until it is resumed: the engine is slow until then."""
BODY = LONG | {"n": 2}
STEP_S, LATER_STEP_S = 0.05, 0.2
"""The wait of each step until a response has begun, and until it is resumed."""


@dataclass(frozen=True)
class Pair:
    """Two ready engines of one model, and their processes."""

    instances: tuple[str, str]
    pids: tuple[int, int]
    engines: Engines
    client: ZygoteClient
    pace: Pace
    gone: set[int] = field(default_factory=set)

    def reversed(self) -> Pair:
        """Return the pair whose requests move from the second engine to the first."""
        first, second = self.instances
        pid, other = self.pids
        return Pair((second, first), (other, pid), self.engines, self.client, self.pace, self.gone)

    async def exited(self, pid: int) -> None:
        """Wait until this process has ended."""
        while pid not in self.gone:
            reported = await self.client.hear()
            if isinstance(reported, EngineExited):
                self.gone.add(reported.pid)

    @property
    def controls(self) -> tuple[str, str]:
        return subjects.engine_control(self.instances[0]), subjects.engine_control(self.instances[1])


@pytest.fixture
async def pair(engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path, pace: Pace) -> AsyncIterator[Pair]:
    starts = [engines.paced(card_of(demo_directory), pace) for _ in range(2)]
    pids = [await forked(client, start) for start in starts]
    for start in starts:
        assert (await engines.settled(start.instance_id)).state == "ready"
    made = Pair((starts[0].instance_id, starts[1].instance_id), (pids[0], pids[1]), engines, client, pace)
    yield made
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await made.exited(pid)


class Move:
    """One request that is answered by the first engine, and resumed by the second."""

    def __init__(self, pair: Pair, body: dict[str, Any]) -> None:
        self._pair, self._body = pair, body
        self._engines = pair.engines
        self._slow = contextlib.ExitStack()

    async def begin(self, tokens: int = 8, **named: Any) -> None:
        """Begin a slow response, and wait until it has some tokens."""
        self._slow.enter_context(self._pair.pace.slowed(STEP_S))
        self.stream = await self._engines.ask(self._pair.instances[0], "completion", **named, **self._body)
        await self.stream.until(lambda _: len(self.stream.tokens()) >= tokens)
        self._pair.pace.change(LATER_STEP_S)
        started = self.stream.replies[0]
        assert isinstance(started, InferStarted)
        self.started = started

    async def read(self) -> TokensRead:
        order = ReadTokens(request_id=self.stream.request_id, offer_kv=True)
        return await self._engines.mesh.request(self._pair.controls[0], order, TokensRead)

    async def prepare(
        self, read: TokensRead, offer: KvOffer | None, revision: str = "test", name: str | None = None
    ) -> ResumePrepared:
        """Order it; `name` is that of other prepared sequences than the request's."""
        known = tuple((*p, *c.token_ids) for p, c in zip(read.prompt_token_ids, read.choices, strict=True))
        order = PrepareResume(prepared=name or self.stream.request_id, revision=revision, sequences=known, kv=offer)
        return await self._engines.mesh.request(self._pair.controls[1], order, ResumePrepared)

    async def yield_(self) -> None:
        await self._engines.mesh.request(self._pair.controls[0], YieldInfer(request_id=self.stream.request_id), Done)
        assert isinstance(await self.stream.last(), InferYielded)

    async def finish(self, at: Literal[0, 1] = 1) -> None:
        """Resume the request, and compare the whole response with that of an undisturbed run.

        Tokens of a killed engine that arrive later are not part of it.
        """
        self._slow.close()
        stream, count = self.stream, self._body.get("n", 1)
        received = [(stream.tokens(i), stream.text(i)) for i in range(count)]
        choices = tuple(
            ResumedChoice(index=i, token_ids=tuple(tokens), text_chars=len(text)) for i, (tokens, text) in enumerate(received)
        )
        resume = Resume(
            revision="test",
            choices=choices,
            prompt_tokens=self.started.prompt_tokens,
            seed=self.started.seed,
            prepared=self.stream.request_id,
        )
        self.rest = await self._engines.ask(self._pair.instances[at], "completion", resume=resume, **self._body)
        assert isinstance(await self.rest.last(), InferFinished)
        whole = await self._engines.answer(self._pair.instances[at], "completion", **{**self._body, "seed": self.started.seed})
        for i, (tokens, text) in enumerate(received):
            assert tokens + self.rest.tokens(i) == whole.tokens(i)
            assert text + self.rest.text(i) == whole.text(i)


@contextlib.asynccontextmanager
async def stalled(move: Move, part: int = 0) -> AsyncIterator[asyncio.Task[ResumePrepared]]:
    """Begin to prepare, and stop the bytes of one part of the transfer on their way."""
    await move.begin()
    read = await move.read()
    assert read.kv is not None
    proxy = Proxy(read.kv.parts[part].port, Fault("stall", 1_000))
    try:
        preparing = asyncio.create_task(move.prepare(read, proxy.offered(read.kv, part)))
        assert await asyncio.to_thread(proxy.struck.wait, 60)
        yield preparing
    finally:
        proxy.close()


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
    os.kill(pair.pids[0], signal.SIGSTOP)
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
