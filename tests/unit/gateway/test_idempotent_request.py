"""The end of a request with an Idempotency-Key that cannot be continued."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from nats.errors import ConnectionClosedError
from nats.js.kv import KeyValue

from services.gateway.adapters.engine_client import EngineClient
from services.gateway.adapters.idempotency_store import Claim, Entry, IdempotencyStore
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.http.responses.event_stream import EventStream
from services.gateway.http.responses.openai_objects import Head
from services.gateway.idempotency import store_retry
from services.gateway.idempotency.idempotent_request import IdempotentRequest
from services.gateway.requests.active_request import ActiveRequest
from shared.contracts.node import InstanceState
from shared.errors import Unavailable
from tests.support.fake_engine import card_of
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket

ENTRY = Entry(request="r", answer_id="a", created=1, reply="one", attempt_id="t-1", instance_id="i", node="n")


class LostStore:
    """A store of idempotency keys that cannot be reached."""

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: object, **__: object) -> None:
            raise ConnectionClosedError

        return fail


async def test_failed_adoption_leaves_the_engine_to_the_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher forgets it; else its response timeout would fail a request that is gone."""
    monkeypatch.setattr(store_retry, "_STORE_RETRY_TIMEOUT_S", -1.0)
    store, effects, now = LostStore(), RecordedEffects(), time.monotonic()
    dispatcher = Dispatcher("gw", effects)
    dispatcher.on_status(status(instance("i", "alpha", InstanceState.READY)), now)
    sink = EventStream(Head("id", "chat.completion.chunk", 1, "m"), include_usage=False, token_ids=False, logprobs=False)
    request = ActiveRequest(ticket("t", "alpha", now), card_of("alpha"), EngineRequest("chat", b"{}"), sink, dispatcher, 1 << 30)
    idempotent = IdempotentRequest(
        "gw",
        cast(IdempotencyStore, store),
        dispatcher,
        cast(EngineClient, None),
        request,
        Claim(cast(KeyValue, store), "key", ENTRY, 1),
        ENTRY,
        lambda _: None,
        lambda: None,
    )
    await idempotent.run()
    assert isinstance(request.completion.error, Unavailable)
    dispatcher.on_tick(now + 1e6)
    assert (effects.failed, effects.cancelled) == ({}, [])
