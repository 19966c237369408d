"""The engine's part in its suspension: pause, and verify its output.

Commands are carried out one after the other: a nodeagent whose command was not answered in time
sends the next one while the engine still works on the first.
"""

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
ProbeOutput = tuple[object, ...]


class Suspension:
    """Pauses and verifies the engine.

    The reference output is taken before each suspension, so that no cold start pays for it.
    """

    def __init__(self, instance_id: str, card: ModelCard, serving: Serving) -> None:
        self._instance_id = instance_id
        self._card = card
        self._serving = serving
        self._before: ProbeOutput | None = None
        self._is_changed = False
        self._turn = asyncio.Lock()

    async def sleep(self, level: int) -> EngineAsleep:
        """Pause, and record the reference output.

        Raises:
            InstanceBusy: Requests are running.
            EngineFailed: The last wake found another output, which must not become the reference.
        """
        if level != 0:
            raise UnsupportedParameter("The builtin engine has no sleep levels. The nodeagent suspends its process, or stops it")
        async with self._turn:
            begun = time.monotonic()
            if self._is_changed:
                raise EngineFailed("The output of the engine has changed since it was suspended. Stop the instance")
            self._serving.pause()
            try:
                self._before = await self._run_probe()
            except BaseException:
                self._serving.unpause()
                raise
            return EngineAsleep(level=0, took_ms=(time.monotonic() - begun) * 1e3)

    async def wake(self) -> EngineProbed:
        """Verify the output, and accept requests again if it is unchanged."""
        async with self._turn:
            probed = await self._compare()
            self._is_changed = not probed.same
            if probed.same:
                self._serving.unpause()
        return probed

    async def probe(self) -> EngineProbed:
        """Compare the output with the reference.

        The output of an engine that serves may differ by its batches: the engine may sleep still.
        """
        async with self._turn:
            return await self._compare()

    async def _compare(self) -> EngineProbed:
        begun = time.monotonic()
        output = await self._run_probe()
        return EngineProbed(same=self._before is None or output == self._before, took_ms=(time.monotonic() - begun) * 1e3)

    async def _run_probe(self) -> ProbeOutput:
        """Serve a probe request and return its tokens or vectors."""
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

        def on_response(part: BaseModel) -> None:
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
            self._serving.serve_internal(request, on_response)
            async with asyncio.timeout(_DEADLINE_S):
                await done
        except TimeoutError:
            raise EngineFailed(f"The engine did not answer a probe within {_DEADLINE_S:g} s") from None
        finally:
            self._serving.cancel(request.request_id)  # the next command finds no request
        if not found:
            raise EngineFailed("The engine answered a probe without a token")
        return tuple(found)
