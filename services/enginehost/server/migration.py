"""The host's side of moving requests: what its engine serves, what that has said, its own cache warmed for what is to come, and stopping."""

from __future__ import annotations

import time

from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Client, call, json_request
from services.enginehost.server.serving import Serving
from shared.contracts.migration import PrepareResume, RequestsListed, ResumePrepared, RunningChoice, RunningRequest, TokensRead
from shared.errors import Conflict, NotFound, UnsupportedParameter

_REMEMBERED = 64
_PIECE_TOKENS = 512
"""That one step of the engine computes ahead: the streams beside it wait for no more than that."""
LOST = "its engine did not tell all of its tokens: one character was made of several"


class HostMigration:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._prepared: dict[str, tuple[int, ...]] = {}
        """Tokens of each sequence, by the name that they were prepared under."""

    def list(self) -> RequestsListed:
        return RequestsListed(requests=tuple(self._told(r) for r in self._serving.running()))

    def _told(self, running: RunningRequest) -> RunningRequest:
        """What is followed to some token only would begin again from there: it is not worth moving, though better than nothing where its
        engine dies."""
        tracker = self._serving.stream(running.request_id).tracker
        return running.model_copy(update={"fixed": LOST}) if tracker is not None and tracker.lost else running

    def read(self, request_id: str) -> TokensRead:
        """Raises `NotFound`, also for a request whose tokens are not followed."""
        stream = self._serving.stream(request_id)
        tracker = stream.tracker
        if tracker is None or tracker.lost or stream.fixed:
            raise NotFound(f"the tokens of request {request_id} are not known: {stream.fixed or LOST}")
        made = RunningChoice(token_ids=tracker.answer, finish_reason=tracker.finish_reason)
        return TokensRead(running=stream.running(), prompt_token_ids=(tracker.prompt[: tracker.prompt_tokens],), choices=(made,))

    def yield_(self, request_id: str) -> None:
        """Raises `NotFound`, or `Conflict` for what cannot be gone on with."""
        self._serving.yield_(request_id)

    async def prepare(self, order: PrepareResume, driver: Driver, client: Client) -> ResumePrepared:
        """Have the engine's prefix cache know the sequences: one more token is generated after each, and thrown away. They are computed in
        pieces, after whatever else the engine serves. What is not used again leaves that cache by itself.

        Raises `Conflict` for other weights, `UnsupportedParameter` where there is no such cache.
        """
        if order.revision != driver.card.info.revision:
            raise Conflict(f"{driver.card.name} has weights of revision {driver.card.info.revision} here, not {order.revision}")
        if driver.tokens is None or not driver.caches_prefixes or order.adapter is not None:
            raise UnsupportedParameter("this engine has no prefix cache to prepare", param="sequences")
        began = time.monotonic()
        before = self._prepared.pop(order.prepared, ())
        for i, sequence in enumerate(order.sequences):
            known = before[i] if i < len(before) else 0
            for end in (*range(known + _PIECE_TOKENS, len(sequence), _PIECE_TOKENS), len(sequence)):
                asked = {"model": driver.served_name, "prompt": list(sequence[:end]), "max_tokens": 1, "temperature": 0}
                await call(client, json_request("/v1/completions", {**asked, **driver.last}), "preparing to go on with an answer")
        total = sum(map(len, order.sequences))
        self._prepared[order.prepared] = tuple(map(len, order.sequences))
        while len(self._prepared) > _REMEMBERED:
            del self._prepared[next(iter(self._prepared))]
        return ResumePrepared(tokens=max(0, total - sum(before)), took_ms=(time.monotonic() - began) * 1e3)

    def forget(self, name: str) -> None:
        self._prepared.pop(name, None)
