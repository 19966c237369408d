"""What the builtin engine has to do with its own suspension: take no requests meanwhile, and show afterwards that it is as it was."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from pydantic import BaseModel

from services.engine.server.serving import Serving
from shared.contracts.engine import EngineAsleep, EngineProbed
from shared.contracts.inference import EmbeddingsFinished, InferChunk, InferFailed, InferFinished, InferRequest
from shared.contracts.models import ModelCard
from shared.errors import EngineFailed, UnsupportedParameter, from_body

_TOKENS = 3
_DEADLINE_S = 20.0
Answer = tuple[object, ...]


class Suspension:
    """Its reference answer is taken before each suspension, so that no cold start waits for it."""

    def __init__(self, instance_id: str, card: ModelCard, serving: Serving) -> None:
        self._instance_id = instance_id
        self._card = card
        self._serving = serving
        self._before: Answer | None = None

    async def sleep(self, level: int) -> EngineAsleep:
        """Raises `InstanceBusy` while requests are served."""
        if level != 0:
            raise UnsupportedParameter("the builtin engine has no sleep levels: it is suspended without its knowledge, or stopped")
        begun = time.monotonic()
        self._serving.hold()
        try:
            self._before = await self._ask()
        except BaseException:
            self._serving.let_go()
            raise
        return EngineAsleep(level=0, took_ms=(time.monotonic() - begun) * 1e3)

    async def wake(self) -> EngineProbed:
        """Serves again only if it answers as before."""
        probed = await self.probe()
        if probed.same:
            self._serving.let_go()
        return probed

    async def probe(self) -> EngineProbed:
        begun = time.monotonic()
        answer = await self._ask()
        return EngineProbed(same=self._before is None or answer == self._before, took_ms=(time.monotonic() - begun) * 1e3)

    async def _ask(self) -> Answer:
        """A request of its own: what was generated."""
        embeds = self._card.info.task == "embed"
        body: dict[str, Any] = {"model": self._card.name}
        body |= {"input": "a"} if embeds else {"prompt": "a", "max_tokens": _TOKENS, "temperature": 0}
        request = InferRequest(
            request_id=f"probe-{secrets.token_hex(8)}",
            instance_id=self._instance_id,
            model=self._card.name,
            endpoint="embedding" if embeds else "completion",
            body=body,
            deadline_ms=int(_DEADLINE_S * 1e3),
        )
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found: list[object] = []

        def heard(part: BaseModel) -> None:
            match part:
                case InferChunk():
                    found.extend(t for choice in part.choices for t in choice.token_ids)
                case EmbeddingsFinished():
                    found.extend(part.vectors)
                case InferFailed() if not done.done():
                    done.set_exception(from_body(part.error))
            if isinstance(part, InferFinished | EmbeddingsFinished) and not done.done():
                done.set_result(None)

        try:
            self._serving.take_own(request, heard)
            async with asyncio.timeout(_DEADLINE_S):
                await done
        except TimeoutError:
            raise EngineFailed(f"it gave no answer within {_DEADLINE_S:g} s") from None
        if not found:
            raise EngineFailed("it answered without a token")
        return tuple(found)
