"""Parts of a stored response that a gateway reads before another engine continues it."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from services.gateway.adapters.idempotency_store import Entry, IdempotencyStore, ResponsePart
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.ticket import Stage
from services.gateway.http.responses.event_stream import EventStream
from services.gateway.http.responses.openai_objects import Head
from services.gateway.idempotency.replay import Replay
from services.gateway.requests.active_request import ActiveRequest
from shared.contracts.inference import InferFailed, InferYielded
from shared.contracts.node import InstanceState
from shared.errors import Conflict, EngineFailed
from tests.support.fake_engine import card_of
from tests.support.scripted_engine import Script
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket

ENTRY = Entry(request="r", answer_id="a", created=1, reply="one", attempt_id="t-1")
MESSAGES = [
    m.model_copy(update={"seq": seq}).model_dump_json().encode() for seq, m in enumerate(Script(("0123456789",)).answer(None))
]
"""Started, ten tokens, finished."""
CONFLICT = InferFailed(seq=0, error=Conflict("it is here already").body()).model_dump_json().encode()


class FakeStore:
    """Messages of reply subjects."""

    def __init__(self, **stored: list[bytes]) -> None:
        self.stored = stored

    async def stored_messages(self, reply: str) -> list[bytes]:
        return self.stored.get(reply, [])

    async def captured_messages(self, reply: str) -> int:
        return len(self.stored.get(reply, []))

    async def wait_until_captured(self, reply: str, messages: int) -> bool:
        return await self.captured_messages(reply) >= messages


class World(RecordedEffects):
    """A request whose owner received `received`, while `stored` is in the store."""

    def __init__(self, received: list[bytes], stored: list[bytes]) -> None:
        super().__init__()
        now = time.monotonic()
        self.dispatcher = Dispatcher("gw", self)
        self.dispatcher.on_status(status(instance("i", "alpha", InstanceState.READY)), now)
        self.ticket = ticket("t", "alpha", now)
        self.sink = EventStream(Head("id", "chat.completion.chunk", 1, "m"), include_usage=False, token_ids=False, logprobs=False)
        self.request = ActiveRequest(
            self.ticket, card_of("alpha"), EngineRequest("chat", b"{}"), self.sink, self.dispatcher, 1 << 30
        )
        self.request.reader.accepts_duplicates = True
        self.dispatcher.on_request(self.ticket, 1, now)
        for message in received:
            self.request.on_message(message)
        self.replay = Replay(cast(IdempotencyStore, FakeStore(one=stored)), self.request)

    @property
    def tokens_to_resume_from(self) -> int:
        fields = self.request.resume_state.resume_fields("", keeps_partial_output=True)
        return len(fields["choices"][0]["token_ids"]) if fields is not None else 0


def numbered(message: Any, seq: int) -> bytes:
    encoded: bytes = message.model_copy(update={"seq": seq}).model_dump_json().encode()
    return encoded


async def test_missed_messages_are_read_from_the_store() -> None:
    world = World(MESSAGES[:4], MESSAGES[:8])
    assert await world.replay.read_missed(ENTRY) == 8
    assert world.tokens_to_resume_from == 7


async def test_response_complete_in_the_store_finishes_the_request() -> None:
    world = World(MESSAGES[:4], MESSAGES)
    assert await world.replay.read_missed(ENTRY) == len(MESSAGES)
    assert world.request.completion.is_done
    assert world.ticket.stage is Stage.DONE
    assert world.dispatcher.count_in_flight("alpha") == 0


@pytest.mark.parametrize("stored", [MESSAGES[:6], MESSAGES[:6] + MESSAGES[8:11], MESSAGES[:6] + MESSAGES[9:]])
async def test_response_resumes_after_its_last_stored_message(stored: list[bytes]) -> None:
    world = World(MESSAGES[:10], stored)
    assert await world.replay.read_missed(ENTRY) == 6
    assert world.tokens_to_resume_from == 5


@pytest.mark.parametrize("end", [InferYielded(seq=0), InferFailed(seq=0, error=EngineFailed("dead").body(), engine_lost=True)])
async def test_stored_engine_error_does_not_fail_the_next_attempt(end: Any) -> None:
    world = World(MESSAGES[:4], [*MESSAGES[:6], numbered(end, 6)])
    assert await world.replay.read_missed(ENTRY) == 6
    assert (world.ticket.stage, world.ticket.losses, world.failed) == (Stage.SENT, 0, {})


async def test_refused_duplicate_in_the_store_is_skipped() -> None:
    world = World(MESSAGES[:2], [CONFLICT, *MESSAGES[:4], CONFLICT, *MESSAGES[4:8]])
    assert await world.replay.read_missed(ENTRY) == 8


@pytest.mark.parametrize(
    ("stored", "is_lost"),
    [(MESSAGES[:8], False), (MESSAGES[:5], True), (MESSAGES[:5] + MESSAGES[7:11], True), (MESSAGES[:6] + MESSAGES[9:], False)],
    ids=["complete", "too few", "a gap", "a gap after the part"],
)
async def test_stored_part_with_a_gap_counts_as_lost(stored: list[bytes], is_lost: bool) -> None:
    world = World([], stored)
    entry = ENTRY.model_copy(update={"parts": (ResponsePart(reply="one", messages=6),), "reply": "two"})
    assert await world.replay.has_lost_parts(entry) is is_lost
    assert await world.replay.is_available(entry.model_copy(update={"state": "done"})) is not is_lost
