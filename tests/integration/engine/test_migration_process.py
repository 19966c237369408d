"""A running request migrates between real engines at a token, over NATS."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.inference import InferFailed, InferFinished, InferStarted, InferYielded, Resume, ResumedChoice
from shared.contracts.migration import (
    ForgetResume,
    ListRequests,
    PrepareResume,
    ReadTokens,
    RequestsListed,
    ResumePrepared,
    TokensRead,
    YieldInfer,
)
from shared.errors import Conflict, InsufficientMemory, InvalidRequest, NotFound
from tests.integration.engine.processes import SLOW, exited, forked, until_streaming
from tests.support.engines import Engines, ZygoteClient
from tests.support.paced_zygote import Pace
from tests.support.segments import FakeLoader, card_of

BODY: dict[str, Any] = {**SLOW, "max_tokens": 200, "temperature": 1.0, "n": 2, "seed": 11}
"""A request that lasts until it yields: the engine is slow, and held, until then.

With drawn seeds some run would meet a near-tie, which the rounding of recomputed tokens decides.
"""
STEP_S = 0.05


@pytest.fixture
async def pair(
    engines: Engines, loader: FakeLoader, client: ZygoteClient, demo_directory: Path, paces: tuple[Pace, Pace]
) -> AsyncIterator[tuple[str, str]]:
    """Yield two ready engines of one model."""
    starts = [engines.paced(card_of(demo_directory), pace) for pace in paces]
    pids = [await forked(client, start) for start in starts]
    for start in starts:
        assert (await engines.settled(start.instance_id)).state == "ready"
    yield starts[0].instance_id, starts[1].instance_id
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        await exited(client, pid)


async def test_a_request_resumes_at_another_engine(engines: Engines, pair: tuple[str, str], pace: Pace) -> None:
    source, to = (subjects.engine_control(instance) for instance in pair)
    mesh = engines.mesh
    with pace.slowed(STEP_S):
        stream = await engines.ask(pair[0], "completion", **BODY)
        await until_streaming(stream)
        pace.hold()
        started = stream.replies[0]
        assert isinstance(started, InferStarted)
        assert (started.fixed, started.seed) == ("", BODY["seed"])
        read = await mesh.request(source, ReadTokens(request_id=stream.request_id), TokensRead)
        assert [c.index for c in read.choices] == [0, 1]
        assert read.running.generated_tokens == sum(len(c.token_ids) for c in read.choices) > 0
        known = tuple((*p, *c.token_ids) for p, c in zip(read.prompt_token_ids, read.choices, strict=True))
        prepared = await mesh.request(to, PrepareResume(prepared="m", revision="test", sequences=known), ResumePrepared)
        assert prepared.tokens == sum(len(s) - 1 for s in known)
        await mesh.request(source, YieldInfer(request_id=stream.request_id), Done)
        assert isinstance(await stream.last(), InferYielded)
    for gone in (YieldInfer(request_id=stream.request_id), ReadTokens(request_id=stream.request_id)):
        with pytest.raises(NotFound):
            await mesh.request(source, gone, Done)
    choices = tuple(ResumedChoice(index=i, token_ids=tuple(stream.tokens(i)), text_chars=len(stream.text(i))) for i in (0, 1))
    resume = Resume(revision="test", choices=choices, prompt_tokens=started.prompt_tokens, seed=started.seed, prepared="m")
    rest = await engines.ask(pair[1], "completion", resume=resume, **BODY)
    last = await rest.last()
    assert isinstance(last, InferFinished)
    assert last.usage.completion_tokens == 400
    whole = await engines.answer(pair[0], "completion", **BODY)
    for i in (0, 1):
        assert stream.tokens(i) + rest.tokens(i) == whole.tokens(i)
        assert stream.text(i) + rest.text(i) == whole.text(i)
        assert rest.finish(i) == "length"


async def test_a_drawn_seed_is_reported_and_gives_the_same_tokens(engines: Engines, pair: tuple[str, str]) -> None:
    body = {**BODY, "max_tokens": 20, "seed": None}
    drawn = await engines.answer(pair[0], "completion", **body)
    started = drawn.replies[0]
    assert isinstance(started, InferStarted)
    assert started.seed is not None
    again = await engines.answer(pair[1], "completion", **{**body, "seed": started.seed})
    assert [again.tokens(i) for i in (0, 1)] == [drawn.tokens(i) for i in (0, 1)]


async def test_invalid_prepare_and_resume_requests_are_refused(engines: Engines, pair: tuple[str, str]) -> None:
    to, mesh = subjects.engine_control(pair[0]), engines.mesh
    order = PrepareResume(prepared="m", revision="test", sequences=((5, 6, 7),))
    for changes, error in (
        ({"revision": "other"}, Conflict),
        ({"sequences": ()}, InvalidRequest),
        ({"sequences": ((5, 10**6),)}, InvalidRequest),
        ({"sequences": tuple(tuple(range(1, 900)) for _ in range(200))}, InsufficientMemory),
    ):
        with pytest.raises(error):
            await mesh.request(to, order.model_copy(update=changes), ResumePrepared)
    await mesh.request(to, order, ResumePrepared)
    for _ in range(2):
        await mesh.request(to, ForgetResume(prepared="m"), Done)
    assert (await mesh.request(to, ListRequests(), RequestsListed)).requests == ()
    resume = Resume(revision="other", choices=(ResumedChoice(token_ids=(5,), text_chars=0),), prompt_tokens=1)
    refused = (await engines.ask(pair[0], "completion", resume=resume, prompt="x", max_tokens=3)).last()
    failed = await refused
    assert isinstance(failed, InferFailed)
    assert (failed.seq, failed.error.code, failed.error.param) == (0, "conflict", "resume")
