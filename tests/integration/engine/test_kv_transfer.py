"""A request whose keys and values are sent continues as if it had never moved.

Its tokens are compared with those of an undisturbed run: after any number of rounds, of either
kind, and with every fault of the connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.generation.events import Event
from services.engine.generation.kv_transfers import KvTransfers
from services.engine.generation.request import GenerationRequest
from services.engine.generation.runner import Runner
from shared.contracts.inference import FairShare
from shared.contracts.kv_transfer import KvOffer
from shared.errors import UnsupportedParameter
from tests.integration.engine.test_families import LoadedModel, save
from tests.integration.engine.test_resume import Deltas, RecordedBatcher, cut, flat, request
from tests.support.kv_transfer import Fault, Proxy, Side
from tests.support.launcher import until
from tests.support.sizes import size

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = size(120, 280)
BODY: dict[str, Any] = {"max_tokens": TOKENS}
PROMPT = [5 + i % 900 for i in range(220)]
MOVED_AT = size((20, 60), (20, 120))
"""Tokens generated when keys and values are sent: those of a whole block more the second time."""
_WHOLE: WeakKeyDictionary[LoadedModel, dict[str, Deltas]] = WeakKeyDictionary()
"""Undisturbed responses of each model, by what their request changes in `BODY`."""


class HeldBatcher(RecordedBatcher):
    """A batcher that generates as many tokens as a test wants, and then one more for each command.

    Without it a response would need tokens for as long as a test takes on a busy machine.
    """

    def __init__(self, loaded: LoadedModel, runner: Runner | None = None) -> None:
        self._wanted = 0
        super().__init__(loaded, runner)
        self.batcher.on_command = self._on_command

    def hold_at(self, tokens: int) -> None:
        """Generate `tokens` of each choice, unless more are wanted already."""
        with self.grew:
            self._wanted = max(self._wanted, tokens)
            self.grew.notify_all()

    def release(self) -> None:
        """Generate all tokens."""
        self.hold_at(TOKENS)

    def _on_command(self) -> None:
        with self.grew:
            self.grew.notify_all()
        self.loop.wake()

    def _deliver(self, events: Sequence[Event]) -> None:
        super()._deliver(events)
        with self.grew:
            assert self.grew.wait_for(lambda: self._is_short() or self.batcher.has_commands(), 60)

    def _is_short(self) -> bool:
        running = [deltas for name, deltas in self.deltas.items() if name not in self.over]
        return not running or min(len(d) for deltas in running for d in deltas.values()) < self._wanted

    def close(self) -> None:
        self.release()
        super().close()


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


@pytest.fixture
async def pair(llama: LoadedModel) -> AsyncIterator[Pair]:
    made = Pair(llama)
    yield made
    await made.close()


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 3},
    "two choices": {"temperature": 0.8, "seed": 5, "n": 2},
}


@pytest.mark.parametrize("body", BODIES)
async def test_moved_request_continues_token_for_token_without_computing_anything(pair: Pair, body: str) -> None:
    """In bfloat16 too: every key and value is the source's, so nothing is rounded otherwise."""
    whole = pair.whole(**BODIES[body])
    asked = await pair.begin(**BODIES[body])
    for tokens in MOVED_AT:
        await pair.until_generated(asked, tokens)
        sequences = pair.sequences(asked)
        outcome, received = await pair.to.receive(asked.request_id, sequences, await pair.offer(asked))
        assert (outcome.tokens, outcome.left, received.reason) == (0, 0, "")
        assert received.nbytes == outcome.received * (await pair.offer(asked)).layout.token_bytes
    steps = pair.recorded[1].batcher
    moved = await pair.finish(asked, **BODIES[body])
    assert {i: flat(d) for i, d in moved.items()} == {i: flat(d) for i, d in whole.items()}
    assert pair.to.exchange.take_received(asked.request_id).tokens >= sum(len(s) for s in sequences) - len(sequences)
    assert steps.blocks_used == 0


@dataclass(frozen=True)
class Round:
    """A round of a migration, after so many more tokens, with a fault of one part's connection."""

    tokens: int
    way: str
    part: int
    fault: Fault


def rounds_of(parts: int, most_bytes: int) -> st.SearchStrategy[list[Round]]:
    """Return migrations from a source of several parts; faults begin before `most_bytes`."""
    faults = st.builds(Fault, st.sampled_from(["pass", "pass", "cut", "flip"]), st.integers(200, most_bytes))
    ways = st.sampled_from(["transfer", "transfer", "compute"])
    return st.lists(st.builds(Round, st.integers(0, 30), ways, st.integers(0, parts - 1), faults), max_size=4)


Offer = Callable[[GenerationRequest], Awaitable[KvOffer | None]]


async def check_rounds(pair: Pair, rounds: list[Round], body: str, offer_of: Offer, *, is_preempted: bool) -> None:
    """Move a request in rounds, compare it with the undisturbed one, and close the engines.

    Args:
        offer_of: Asks the source for its offer; None: the round is computed instead.
    """
    proxies: list[Proxy] = []
    try:
        asked_for = {**BODIES[body], "max_tokens": 110}
        whole = pair.whole(**asked_for)
        pair.recorded[0].release()  # the source computes while it sends
        asked, generated = await pair.begin(**asked_for), 0
        for each in rounds:
            generated += each.tokens
            await pair.until_generated(asked, generated)
            if is_preempted:
                pair.recorded[0].batcher.grant(1)
                pair.recorded[0].batcher.grant(pair.loaded.limits.kv_blocks)
            offer = await offer_of(asked) if each.way == "transfer" else None
            if offer is None:
                await pair.to.compute(asked.request_id, pair.sequences(asked))
            else:
                proxies.append(Proxy(offer.parts[each.part].port, each.fault))
                await pair.to.receive(asked.request_id, pair.sequences(asked), proxies[-1].offered(offer, each.part))
        moved = await pair.finish(asked, **asked_for)
        assert {i: flat(d) for i, d in moved.items()} == {i: flat(d) for i, d in whole.items()}
    finally:
        for proxy in proxies:
            proxy.close()
        await pair.close()


@given(rounds_of(1, 200_000), st.sampled_from(sorted(BODIES)), st.booleans())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_rounds_gives_the_undisturbed_tokens(
    exact_llama: LoadedModel, rounds: list[Round], body: str, is_preempted: bool
) -> None:
    async def run() -> None:
        pair = Pair(exact_llama)
        await check_rounds(pair, rounds, body, pair.offer, is_preempted=is_preempted)

    asyncio.run(run())


@pytest.fixture
async def exact(exact_llama: LoadedModel) -> AsyncIterator[Pair]:
    made = Pair(exact_llama)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("cut", 60_000), "closed"),
        (Fault("flip", 60_000), "damaged"),
        (Fault("stall", 60_000), "timed out"),
    ],
    ids=lambda x: x.kind if isinstance(x, Fault) else "",
)
async def test_fault_of_the_connection_costs_only_what_was_not_received(exact: Pair, fault: Fault, reason: str) -> None:
    whole = exact.whole()
    asked = await exact.begin()
    await exact.until_generated(asked, 50)
    offer = await exact.offer(asked)
    proxy = Proxy(offer.port, fault)
    try:
        outcome, received = await exact.to.receive(asked.request_id, exact.sequences(asked), proxy.offered(offer))
        assert proxy.struck.is_set()
        assert reason in received.reason
        assert outcome.tokens > 0
        assert outcome.left == 0
        assert flat((await exact.finish(asked))[0]) == flat(whole[0])
    finally:
        proxy.close()


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "secret": ({"secret": "x" * 43}, ""),
    "ticket": ({"ticket": "0" * 32}, ""),
    "port": ({"port": 9}, "refused"),
    "salt": ({"cache_salt": "another key"}, "other tokens"),
}


@pytest.mark.parametrize("change", CHANGED)
async def test_wrong_offer_is_not_used(exact: Pair, change: str) -> None:
    whole = exact.whole()
    asked = await exact.begin()
    await exact.until_generated(asked, 50)
    changes, reason = CHANGED[change]
    offer = (await exact.offer(asked)).model_copy(update=changes)
    outcome, received = await exact.to.receive(asked.request_id, exact.sequences(asked), offer)
    assert received.reason
    assert reason in received.reason
    assert (outcome.received, outcome.left) == (0, 0)
    assert flat((await exact.finish(asked))[0]) == flat(whole[0])


async def test_keys_and_values_of_another_layout_are_not_used(exact: Pair) -> None:
    asked = await exact.begin()
    await exact.until_generated(asked, 5)
    offer = await exact.offer(asked)
    other = offer.model_copy(update={"layout": offer.layout.model_copy(update={"dtype": "bfloat16", "itemsize": 2})})
    outcome, received = await exact.to.receive(asked.request_id, exact.sequences(asked), other)
    assert "differently (dtype)" in received.reason
    assert outcome.received == 0


async def test_keys_and_values_of_another_model_or_other_tokens_are_not_used(exact_llama: LoadedModel) -> None:
    pair = Pair(exact_llama, revision="another revision")
    try:
        asked = await pair.begin()
        await pair.until_generated(asked, 5)
        outcome, received = await pair.to.receive(asked.request_id, pair.sequences(asked), await pair.offer(asked))
        assert (outcome.received, "of another model" in received.reason) == (0, True)
    finally:
        await pair.close()


async def test_other_tokens_at_the_destination_are_computed(exact: Pair) -> None:
    asked = await exact.begin()
    await exact.until_generated(asked, 5)
    ((first, *rest),) = exact.sequences(asked)
    outcome, received = await exact.to.receive(asked.request_id, ((first + 1, *rest),), await exact.offer(asked))
    assert (outcome.received, "other tokens" in received.reason) == (0, True)
    assert outcome.tokens == len(rest)


async def test_received_keys_and_values_are_only_for_the_key_that_they_are_of(exact: Pair) -> None:
    """A request of another key that names the same prepared sequences gets nothing of them."""
    asked = replace(request(exact.loaded, exact.name(), **{**BODY, "prompt": PROMPT}), share=FairShare(flow="key a"))
    exact.recorded[0].batcher.submit(asked)
    await exact.until_generated(asked, 5)
    outcome, _ = await exact.to.receive("shared", exact.sequences(asked), await exact.offer(asked))
    assert outcome.received > 0
    prompts = exact.sequences(asked)

    def claim(flow: str) -> int:
        """Return the tokens that a request of this key does not compute."""

        def work(transfers: KvTransfers) -> int:
            return transfers._prepared.claim("shared", "", prompts, flow)[0].computed

        return exact.recorded[1].batcher.transfer(work).result(60)

    assert claim("key b") == 0
    await exact.to.receive("shared", prompts, await exact.offer(asked))
    assert claim("key a") > 0


async def test_slow_transfer_is_reported_with_what_is_left_and_continues(exact: Pair) -> None:
    asked = await exact.begin()
    await exact.until_generated(asked, 60)
    sequences = exact.sequences(asked)
    outcome, received = await exact.to.receive(asked.request_id, sequences, await exact.offer(asked), within_s=1e-9)
    assert outcome.received + outcome.tokens + outcome.left == len(sequences[0]) - 1
    assert received.reason == ""


async def test_model_that_computes_one_sequence_at_a_time_offers_nothing(
    tmp_path_factory: pytest.TempPathFactory, demo_directory: Path
) -> None:
    model = LoadedModel(save("llama-dynamic-rope", tmp_path_factory.mktemp("one") / "m", demo_directory, torch.float32), "float32")
    recorded = RecordedBatcher(model)
    try:
        with pytest.raises(UnsupportedParameter):
            recorded.batcher.transfer(KvTransfers.layout).result(60)
    finally:
        recorded.close()
        model.close()


async def test_moved_request_leaves_nothing_at_its_source(exact: Pair) -> None:
    asked = await exact.begin()
    await exact.until_generated(asked, 20)
    await exact.to.receive(asked.request_id, exact.sequences(asked), await exact.offer(asked))
    await exact.finish(asked)
    batcher = exact.recorded[0].batcher

    def used() -> int:
        batcher.transfer(lambda t: None).result(60)
        return batcher.blocks_used

    await asyncio.to_thread(until, lambda: used() == 0)
    assert exact.source.exchange.source.retain_s(asked.request_id) == 0.0
