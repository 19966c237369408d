"""Migration commands of a host: list, read, warm the cache, yield."""

from __future__ import annotations

import time
from collections.abc import Iterator

from services.enginehost.drivers.cache_salt import CACHE_SALT
from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Client, call, json_request
from services.enginehost.server.serving import Serving
from shared.contracts.migration import PrepareResume, RequestsListed, ResumePrepared, RunningChoice, RunningRequest, TokensRead
from shared.errors import Conflict, NotFound, UnsupportedParameter

_REMEMBERED = 64
_PIECE_TOKENS = 512
"""Tokens per step when the prefix cache is warmed: other streams wait for no more than that."""
LOST = "its engine did not report all token ids: several tokens made one character"


class HostMigration:
    """Serves the migrator's commands for a hosted engine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._prepared: dict[str, tuple[int, ...]] = {}
        """Computed tokens of each sequence, by name."""

    def list(self) -> RequestsListed:
        return RequestsListed(requests=tuple(self._mark_partly_tracked(r) for r in self._serving.running()))

    def _mark_partly_tracked(self, running: RunningRequest) -> RunningRequest:
        """Mark a request whose tokens are only partly tracked as not resumable.

        It would restart from the last tracked token: not worth a migration, but better than nothing
        if its engine dies.
        """
        tracker = self._serving.stream(running.request_id).tracker
        return running.model_copy(update={"fixed": LOST}) if tracker is not None and tracker.lost else running

    def read(self, request_id: str) -> TokensRead:
        """Tokens of a request.

        Raises `NotFound` if it is unknown or its tokens are not tracked.
        """
        stream = self._serving.stream(request_id)
        tracker = stream.tracker
        if tracker is None or tracker.lost or stream.fixed:
            raise NotFound(f"The tokens of request {request_id} are not known: {stream.fixed or LOST}")
        generated = RunningChoice(token_ids=tracker.answer, finish_reason=tracker.finish_reason)
        return TokensRead(
            running=stream.running(),
            prompt_token_ids=(tracker.prompt[: tracker.prompt_tokens],),
            choices=(generated,),
            adapter=stream.adapter,
            cache_salt=stream.cache_salt,
        )

    async def offer_kv(self, read: TokensRead) -> TokensRead:
        """Return `read`: hosted engines send no keys and values."""
        return read

    def yield_(self, request_id: str) -> None:
        """Stop a request, which another engine will resume.

        Raises:
            NotFound: The request is not running here.
            Conflict: The request cannot be resumed elsewhere.
        """
        self._serving.yield_(request_id)

    async def prepare(self, order: PrepareResume, driver: Driver, client: Client) -> ResumePrepared:
        """Warm the engine's prefix cache with the sequences.

        For each sequence the engine generates one token, which is discarded. Sequences are computed
        in pieces, behind the engine's other requests. After `within_ms` the rest is left for a
        repeated order. The engine evicts unused entries by itself.

        Raises:
            Conflict: The weights have another revision.
            UnsupportedParameter: The engine has no prefix cache, or serves no LoRA adapters.
            ThawError: The LoRA adapter cannot be loaded.
        """
        if order.revision != driver.card.info.revision:
            raise Conflict(f"{driver.card.name} has weights of revision {driver.card.info.revision} here, not {order.revision}")
        if driver.tokens is None or not driver.caches_prefixes:
            raise UnsupportedParameter("This engine has no prefix cache to warm", param="sequences")
        fields = dict(driver.lowest_priority_fields)
        if order.cache_salt and driver.salts_prefixes:
            fields[CACHE_SALT] = order.cache_salt
        began = time.monotonic()
        known = self._prepared.get(order.prepared, ())[: len(order.sequences)]
        done = [*known, *[0] * (len(order.sequences) - len(known))]
        before = sum(done)
        async with self._serving.loaded(order.adapter):
            with self._serving.work(f"prepare {order.prepared}", order.caused_by):
                for i, end in _list_pieces(order.sequences, done):
                    is_late = order.within_ms is not None and (time.monotonic() - began) * 1e3 > order.within_ms
                    if is_late and sum(done) > before:
                        break
                    asked = {
                        "model": driver.name_of(order.adapter),
                        "prompt": list(order.sequences[i][:end]),
                        "max_tokens": 1,
                        "temperature": 0,
                    }
                    await call(
                        client, json_request("/v1/completions", {**asked, **fields}), "warming the prefix cache for a resume"
                    )
                    done[i] = end
                    self._remember(order.prepared, tuple(done))
        left = sum(map(len, order.sequences)) - sum(done)
        return ResumePrepared(tokens=max(0, sum(done) - before), took_ms=(time.monotonic() - began) * 1e3, left=left)

    def _remember(self, name: str, done: tuple[int, ...]) -> None:
        """Record what is computed: a repeated order, as after a deadline, continues there."""
        self._prepared.pop(name, None)
        self._prepared[name] = done
        while len(self._prepared) > _REMEMBERED:
            del self._prepared[next(iter(self._prepared))]

    def forget(self, name: str) -> None:
        self._prepared.pop(name, None)


def _list_pieces(sequences: tuple[tuple[int, ...], ...], done: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the index of a sequence, and the end of its next piece, until all are computed."""
    for i, sequence in enumerate(sequences):
        for end in (*range(done[i] + _PIECE_TOKENS, len(sequence), _PIECE_TOKENS), len(sequence)):
            yield i, end
