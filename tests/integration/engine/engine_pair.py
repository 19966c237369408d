"""Two engine processes of one model: a request moves from the first to the second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import EngineExited
from shared.contracts.inference import InferFinished, InferStarted, InferYielded, Resume, ResumedChoice
from shared.contracts.kv_transfer import KvOffer
from shared.contracts.migration import PrepareResume, ReadTokens, ResumePrepared, TokensRead, YieldInfer
from tests.integration.engine.processes import SLOW
from tests.support.engines import Engines, ZygoteClient
from tests.support.kv_transfer import Fault, Proxy
from tests.support.paced_zygote import Pace
from tests.support.sizes import size

LONG: dict[str, Any] = SLOW | {"max_tokens": size(80, 200), "temperature": 1.0, "seed": 11}
"""A request that lasts until it is resumed: the engine is slow, and held, until then.

With drawn seeds some run would meet a near-tie, which the rounding of recomputed tokens decides.
"""
STEP_S = 0.05
"""The wait of each step until a response has begun; then the engine is held until it is resumed."""


@dataclass(frozen=True)
class Pair:
    """Two ready engines of one model, their processes and their paces."""

    instances: tuple[str, str]
    pids: tuple[int, int]
    engines: Engines
    client: ZygoteClient
    paces: tuple[Pace, Pace]
    gone: set[int] = field(default_factory=set)

    def reversed(self) -> Pair:
        """Return the pair whose requests move from the second engine to the first."""
        first, second = self.instances
        pid, other = self.pids
        return Pair((second, first), (other, pid), self.engines, self.client, self.paces[::-1], self.gone)

    async def exited(self, pid: int) -> None:
        """Wait until this process has ended."""
        while pid not in self.gone:
            reported = await self.client.hear()
            if isinstance(reported, EngineExited):
                self.gone.add(reported.pid)

    @property
    def controls(self) -> tuple[str, str]:
        return subjects.engine_control(self.instances[0]), subjects.engine_control(self.instances[1])


class Move:
    """One request that is answered by the first engine, and resumed by the second."""

    def __init__(self, pair: Pair, body: dict[str, Any]) -> None:
        self._pair, self._body = pair, body
        self._engines = pair.engines
        self._slow = contextlib.ExitStack()

    async def begin(self, tokens: int = 8, **named: Any) -> None:
        """Begin a slow response, and hold it once it has some tokens."""
        source = self._pair.paces[0]
        self._slow.enter_context(source.slowed(STEP_S))
        self.stream = await self._engines.ask(self._pair.instances[0], "completion", **named, **self._body)
        await self.stream.until(lambda _: len(self.stream.tokens()) >= tokens)
        source.hold()
        started = self.stream.replies[0]
        assert isinstance(started, InferStarted)
        self.started = started

    async def read(self) -> TokensRead:
        order = ReadTokens(request_id=self.stream.request_id, offer_kv=True)
        return await self._engines.mesh.request(self._pair.controls[0], order, TokensRead)

    async def prepare(
        self, read: TokensRead, offer: KvOffer | None, revision: str = "test", name: str | None = None
    ) -> ResumePrepared:
        """Order the destination to prepare the request's sequences.

        Args:
            read: The tokens so far.
            offer: Where the destination reads the keys and values; None: it computes them.
            revision: Revision of the model.
            name: Name of the prepared sequences; None: the request's.
        """
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
