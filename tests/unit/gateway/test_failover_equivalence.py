"""Engines die, yield, refuse or lose messages; the response stays undisturbed."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Stage, Ticket
from services.gateway.http.responses.buffered import BufferedCompletion
from services.gateway.http.responses.event_stream import EventStream
from services.gateway.http.responses.openai_objects import Head
from services.gateway.requests.active_request import ActiveRequest
from shared.contracts.inference import InferChunk, InferFailed, InferFinished, InferStarted, InferYielded, Resume
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed, InstanceDraining
from tests.support.examples import examples
from tests.support.fake_engine import card_of
from tests.support.scripted_engine import Script
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket

Fault = Literal["lost", "gap", "yield", "silent"]
FAULTS: tuple[Fault, ...] = ("lost", "gap", "yield", "silent")
ALPHABET = st.characters(codec="utf-8", exclude_categories=["Cc"])
TEXTS = st.lists(st.text(st.one_of(st.sampled_from("abé日🙂 "), ALPHABET), min_size=1, max_size=10), min_size=1, max_size=3)
CUTS = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(FAULTS), st.booleans()), max_size=6)
KINDS = st.sampled_from(["plain", "full", "whole"])


class World(RecordedEffects):
    """One request and its engine.

    Its clock is the real clock plus the time that was skipped: the request reads the real clock,
    and would else be ahead of the world after a pause of the process.

    Args:
        script: The messages of an undisturbed response.
        sink: Receives the response.
        cuts: For each fault the number of messages before it, the fault, and whether the next
            instance refuses.
        unstored: For each attempt the number of its last messages that the next attempt shall
            generate again, although the client has them.
    """

    def __init__(
        self, script: Script, sink: EventStream | BufferedCompletion, cuts: list[tuple[int, Fault, bool]], unstored: list[int]
    ) -> None:
        super().__init__()
        self.script, self.cuts, self.skipped_s = script, list(cuts), 0.0
        self.unstored = list(unstored)
        self.received: list[dict[str, Any]] = []
        self.device_s = 0.0
        self.dispatcher = Dispatcher("gw", self)
        self.hear(InstanceState.READY)
        self.ticket = ticket("r", "alpha", self.now, wait=1e9, response=1e9)
        self.request = ActiveRequest(self.ticket, card_of("alpha"), EngineRequest("chat", b"{}"), sink, self.dispatcher, 1 << 30)
        self.refuses = False
        self.dispatcher.on_request(self.ticket, 1, self.now)

    @property
    def now(self) -> float:
        return time.monotonic() + self.skipped_s

    def hear(self, first: InstanceState) -> None:
        """Report two instances.

        Args:
            first: State of the instance that has the request; the other one is ready.
        """
        here = self.request.handoffs.instance_id if hasattr(self, "request") else ""
        states = {name: first if name == here else InstanceState.READY for name in ("i", "j")}
        made = [instance(name, "alpha", state, capacity=8) for name, state in states.items()]
        self.dispatcher.on_status(status(*made), self.now)

    def send(self, ticket: Ticket, route: Route) -> None:
        super().send(ticket, route)
        if self.received and self.unstored:
            stored = max(0, len(self.received) - self.unstored.pop(0))
            self.request.resume_state.rewind_to(self.received[:stored])
        self.received = []
        self.request.begin_attempt(route, self.now)

    def fail(self, ticket: Ticket, error: Any) -> None:
        super().fail(ticket, error)
        self.request.completion.fail(error)

    def run(self) -> None:
        for _ in range(100):
            if self.request.completion.is_done:
                request = self.request
                assert request.stats.earlier_device_s + request.attempt.device_s == self.device_s
                return
            if self.ticket.stage is Stage.SENT:
                self.attempt()
            else:
                self.skipped_s += 10
                self.hear(InstanceState.READY)
                self.dispatcher.on_tick(self.now)
        raise AssertionError("it never ended")

    def attempt(self) -> None:
        request = self.request
        if self.refuses:
            self.refuses = False
            request.on_message(InferFailed(seq=0, error=InstanceDraining().body()).model_dump_json().encode())
            return
        at, fault, refuses = self.cuts.pop(0) if self.cuts else (1000, "lost", False)
        resume = Resume.model_validate(request.attempt.resume) if request.attempt.resume is not None else None
        for seq, message in enumerate(self.script.answer(resume)):
            if seq == at and not isinstance(message, InferFinished):
                self.refuses = refuses
                self.disturb(fault, seq, message.model_copy(update={"seq": seq + 1}).model_dump_json().encode())
                return
            numbered = message.model_copy(update={"seq": seq, **self._use_device(message, seq)})
            self.received.append(numbered.model_dump(mode="json"))
            request.on_message(numbered.model_dump_json().encode())

    def _use_device(self, message: InferStarted | InferChunk | InferFinished, seq: int) -> dict[str, Any]:
        """Return the device time that the message reports: a quarter of a second for each."""
        if isinstance(message, InferStarted):
            return {}
        self.device_s += 0.25
        if isinstance(message, InferChunk):
            return {"device_s": 0.25 * seq}
        return {"usage": message.usage.model_copy(update={"device_s": 0.25 * seq})}

    def disturb(self, fault: Fault, seq: int, late: bytes) -> None:
        request = self.request
        match fault:
            case "lost":
                failed = InferFailed(seq=seq, error=EngineFailed("it ended").body(), engine_lost=True)
                request.on_message(failed.model_dump_json().encode())
            case "gap":
                request.on_message(late)
            case "yield":
                request.on_message(InferYielded(seq=seq).model_dump_json().encode())
            case _:
                self.skipped_s += 1
                self.hear(InstanceState.FAILED)
                self.skipped_s += 1
                self.dispatcher.on_tick(self.now)


def sink_of(kind: str, choices: int) -> EventStream | BufferedCompletion:
    if kind == "whole":
        return BufferedCompletion(Head("id", "chat.completion", 1, "m"), choices, True)
    head = Head("id", "chat.completion.chunk", 1, "m")
    return EventStream(head, include_usage=True, token_ids=kind == "full", logprobs=kind == "full")


def answered(script: Script, kind: str, cuts: list[tuple[int, Fault, bool]], unstored: list[int] | None = None) -> Any:
    sink = sink_of(kind, len(script.texts))
    world = World(script, sink, cuts, unstored or [])
    world.run()
    assert world.request.completion.error is None, world.request.completion.error
    assert world.dispatcher.count_in_flight("alpha") == world.dispatcher.count_waiting("alpha") == 0
    output = by_choice(sink.take()) if isinstance(sink, EventStream) else asyncio.run(sink.body())
    usage = world.request.stats.usage.model_copy(update={"device_s": 0.0})  # faults cost time, but no tokens
    return output, usage, world.request.resume_state.tokens


@settings(max_examples=examples(400), deadline=None)
@given(texts=TEXTS, stops=st.lists(st.text("abé日🙂 ", min_size=1, max_size=3), max_size=2), cuts=CUTS, kind=KINDS)
def test_client_receives_the_same_response_as_without_faults(
    texts: list[str], stops: list[str], cuts: list[tuple[int, Fault, bool]], kind: str
) -> None:
    script = Script(tuple(texts), tuple(stops), logprobs=kind == "full")
    assert answered(script, kind, bounded(cuts)) == answered(script, kind, [])


@settings(max_examples=examples(400), deadline=None)
@given(
    texts=TEXTS,
    yields=st.lists(st.integers(2, 12), max_size=6),
    unstored=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    kind=KINDS,
)
def test_regenerated_output_reaches_the_client_once(texts: list[str], yields: list[int], unstored: list[int], kind: str) -> None:
    script = Script(tuple(texts), logprobs=kind == "full")
    cuts: list[tuple[int, Fault, bool]] = [(at, "yield", False) for at in yields]
    assert answered(script, kind, cuts, unstored) == answered(script, kind, [])


def by_choice(data: bytes) -> dict[Any, list[bytes]]:
    """Return each choice's events in order: engines interleave choices differently."""
    found: dict[Any, list[bytes]] = {}
    for line in data.split(b"\n\n"):
        choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else []
        found.setdefault(choices[0]["index"] if choices else None, []).append(line)
    return found


def bounded(cuts: list[tuple[int, Fault, bool]]) -> list[tuple[int, Fault, bool]]:
    """Bound faults: a request alone fails after repeated deaths without a token.

    At most two faults occur before any token, and a token separates two deaths.
    """
    kept: list[tuple[int, Fault, bool]] = []
    before = deaths = 0
    for cut in cuts:
        begun, died = cut[0] >= 2, cut[1] in ("lost", "silent")
        before, deaths = (0 if begun else before + 1), (0 if begun else deaths) + died
        if before > 2 or deaths > 1:
            break
        kept.append(cut)
    return kept
