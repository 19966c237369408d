"""Two batchers of one model: a request moves from the first to the second with its KV cache."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from services.engine.generation.request import GenerationRequest
from services.engine.generation.runner import Runner
from shared.contracts.kv_transfer import KvOffer
from tests.integration.engine.loaded_model import LoadedModel
from tests.integration.engine.recorded_batcher import Deltas, HeldBatcher, RecordedBatcher, cut, request
from tests.support.kv_transfer import Side
from tests.support.sizes import size

TOKENS = size(120, 280)
BODY: dict[str, Any] = {"max_tokens": TOKENS}
PROMPT = [5 + i % 900 for i in range(220)]
MOVED_AT = size((20, 60), (20, 120))
"""Tokens generated when keys and values are sent: those of a whole block more the second time."""
_WHOLE: WeakKeyDictionary[LoadedModel, dict[str, Deltas]] = WeakKeyDictionary()
"""Undisturbed responses of each model, by what their request changes in `BODY`."""


class Pair:
    """Two engines of one model: a request moves from the first to the second."""

    def __init__(
        self, loaded: LoadedModel, revision: str = "test", runners: tuple[Runner | None, Runner | None] = (None, None)
    ) -> None:
        """Create them.

        Args:
            runners: Of the engines; None: the model's.
        """
        self.loaded = loaded
        self.recorded = HeldBatcher(loaded, runners[0]), RecordedBatcher(loaded, runners[1])
        self.source, self.to = (Side(r.batcher, v) for r, v in zip(self.recorded, ("test", revision), strict=True))
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"q{self._count}"

    def whole(self, **body: Any) -> Deltas:
        """Return the response of an undisturbed run of one engine: computed once for a model."""
        found, key = _WHOLE.setdefault(self.loaded, {}), json.dumps(body, sort_keys=True)
        if key not in found:
            alone = RecordedBatcher(self.loaded)
            try:
                found[key] = alone.answer(request(self.loaded, "whole", **{**BODY, "prompt": PROMPT, **body}))
            finally:
                alone.close()
        return found[key]

    async def begin(self, **body: Any) -> GenerationRequest:
        """Begin to answer at the source."""
        asked = request(self.loaded, self.name(), **{**BODY, "prompt": PROMPT, **body})
        self.recorded[0].batcher.submit(asked)
        return asked

    def sequences(self, asked: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        """Return the tokens so far: what the migrator reads."""
        deltas = self.recorded[0].deltas.get(asked.request_id, {})
        return tuple((*c.prompt, *(t for d in tuple(deltas.get(c.index, ())) for t in d.token_ids)) for c in asked.choices)

    async def until_generated(self, asked: GenerationRequest, tokens: int) -> None:
        first = self.recorded[0]

        def is_reached() -> bool:
            return min(map(len, self.sequences(asked))) >= len(PROMPT) + tokens or asked.request_id in first.over

        first.hold_at(tokens)
        await asyncio.to_thread(first.until, is_reached)

    async def offer(self, asked: GenerationRequest) -> KvOffer:
        return await self.source.exchange.source.offer(asked.request_id, "", asked.share.flow)

    async def finish(self, asked: GenerationRequest, **body: Any) -> Deltas:
        """Hand the request over, and return its whole response."""
        first = self.recorded[0]
        first.release()
        retain_s = self.source.exchange.source.retain_s(asked.request_id)
        first.batcher.yield_(asked.request_id, retain_s)
        await asyncio.to_thread(first.until, lambda: asked.request_id in first.over)
        deltas = first.deltas.get(asked.request_id, {})
        at = {c.index: len(deltas.get(c.index, ())) for c in asked.choices}
        resume = cut(deltas or {c.index: [] for c in asked.choices}, at, asked, asked.request_id)
        rest = request(self.loaded, f"{asked.request_id}-rest", resume, **{**BODY, "prompt": PROMPT, **body})
        rest = replace(rest, share=asked.share)
        if self.to.exchange.has_rest(rest):
            await self.to.exchange.receive_rest(self.recorded[1].batcher, rest)
        self.recorded[1].batcher.submit(rest)
        await asyncio.to_thread(self.recorded[1].until, lambda: rest.request_id in self.recorded[1].over)
        more = self.recorded[1].deltas.get(rest.request_id, {})
        return {i: [*deltas.get(i, ()), *more.get(i, ())] for i in at}

    async def close(self) -> None:
        for side, recorded in zip((self.source, self.to), self.recorded, strict=True):
            await side.exchange.close()
            recorded.close()


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 3},
    "two choices": {"temperature": 0.8, "seed": 5, "n": 2},
}
