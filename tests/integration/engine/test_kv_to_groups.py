"""A request continues at a group in stages, each of which receives its own layers.

Its tokens are compared with those of an undisturbed run. The stages run in this process;
`test_kv_to_group_process.py` has processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.domain.kv_pieces import plan_pieces
from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.kv_transfer import readers
from shared.contracts.inference import FairShare
from shared.contracts.kv_transfer import KvOffer
from shared.errors import ThawError
from tests.integration.engine.batcher_pair import BODIES, BODY, MOVED_AT, PROMPT, Pair
from tests.integration.engine.loaded_model import LoadedModel
from tests.integration.engine.recorded_batcher import flat, request
from tests.integration.engine.transfer_rounds import Round, check_rounds, rounds_of
from tests.support.kv_transfer import Fault, Proxy, faults_of_parts, stall_s_with
from tests.support.launcher import until
from tests.support.stage_group import LocalGroup

pytestmark = pytest.mark.usefixtures("one_thread", "patient_transfers")

LAYERS = 3


class ToGroup(Pair):
    """A group, to which the requests of an engine or of another group move."""

    def __init__(self, loaded: LoadedModel, stages: tuple[int, int], **options: Any) -> None:
        """Create them.

        Args:
            stages: Of source and destination; a source of one stage is an engine.
            options: Of the destination.
        """
        card = loaded.start.card
        self.group = LocalGroup(loaded.bound, card, stages[1], **options)
        self.origin = LocalGroup(loaded.bound, card, stages[0]) if stages[0] > 1 else None
        super().__init__(loaded, runners=(self.origin.runner if self.origin is not None else None, self.group.runner))

    async def close(self) -> None:
        await super().close()
        await self.group.close()
        if self.origin is not None:
            await self.origin.close()


DIVISIONS = [(1, 2), (1, 3), (3, 3), (3, 2), (2, 3)]
MOVES = [*((stages, "two choices") for stages in DIVISIONS), ((3, 2), "greedy"), ((3, 2), "sampled")]
"""The property below combines any division with any body, in float32."""
TYPES = [
    pytest.param(dtype, *move, marks=() if dtype == "bfloat16" or move == MOVES[-2] else pytest.mark.long)
    for dtype in ("float32", "bfloat16")
    for move in MOVES
]


@pytest.fixture
async def pair(request: pytest.FixtureRequest, llama: LoadedModel) -> AsyncIterator[ToGroup]:
    made = ToGroup(llama, request.param)
    yield made
    await made.close()


@pytest.fixture
async def exact(exact_llama: LoadedModel) -> AsyncIterator[ToGroup]:
    made = ToGroup(exact_llama, (1, 3))
    yield made
    await made.close()


@pytest.fixture
async def same(exact_llama: LoadedModel) -> AsyncIterator[ToGroup]:
    """Both are groups of equal stages: each stage reads from one of the source."""
    made = ToGroup(exact_llama, (3, 3))
    yield made
    await made.close()


@pytest.mark.parametrize(("llama", "pair", "body"), TYPES, indirect=["llama", "pair"])
async def test_group_receives_all_keys_and_values(pair: ToGroup, body: str) -> None:
    """Also those of the last tokens. In bfloat16 too nothing is computed: nothing is rounded."""
    whole = pair.whole(**BODIES[body])
    asked = await pair.begin(**BODIES[body])
    for tokens in MOVED_AT:
        await pair.until_generated(asked, tokens)
        sequences = pair.sequences(asked)
        offer = await pair.offer(asked)
        outcome, received = await pair.to.receive(asked.request_id, sequences, offer)
        assert (outcome.tokens, outcome.left, received.reason) == (0, 0, "")
        assert received.nbytes == outcome.received * offer.token_bytes
        assert received.tokens == outcome.received
    moved = await pair.finish(asked, **BODIES[body])
    assert {i: flat(d) for i, d in moved.items()} == {i: flat(d) for i, d in whole.items()}
    generated = sum(len(d) for d in pair.recorded[0].deltas[asked.request_id].values())
    last = pair.to.exchange.take_received(asked.request_id)
    assert last.tokens == generated + (len(PROMPT) - 1) * len(sequences)
    await asyncio.to_thread(until, lambda: set(pair.group.sequences()) == {0})


@given(st.sampled_from(DIVISIONS), rounds_of(1, 60_000), st.sampled_from(sorted(BODIES)), st.booleans())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_rounds_gives_the_undisturbed_tokens(
    exact_llama: LoadedModel, stages: tuple[int, int], rounds: list[Round], body: str, is_preempted: bool
) -> None:
    async def run() -> None:
        pair = ToGroup(exact_llama, stages)

        async def offer_if_computed(asked: Any) -> KvOffer | None:
            try:
                return await pair.source.exchange.source.offer(asked.request_id, "", "")
            except ThawError:  # it is over, or was preempted a moment ago
                return None

        await check_rounds(pair, rounds, body, offer_if_computed, is_preempted=is_preempted)

    asyncio.run(run())


@pytest.mark.parametrize(("part", "fault", "reason"), faults_of_parts(LAYERS))
async def test_fault_at_one_stage_costs_only_tokens_that_lack_a_layer(
    same: ToGroup, part: int, fault: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "plan_pieces", partial(plan_pieces, piece_bytes=1))
    whole = same.whole()
    asked = await same.begin()
    await same.until_generated(asked, 50)
    sequences, offer = same.sequences(asked), await same.offer(asked)
    first = BLOCK_TOKENS * offer.parts[part].layout.token_bytes
    proxy = Proxy(offer.parts[part].port, Fault(fault, first + 2_000))  # in the second block of this stage
    try:
        offered, stall_s = proxy.offered(offer, part), stall_s_with(fault)
        outcome, received = await same.to.receive(asked.request_id, sequences, offered, stall_s=stall_s)
        assert proxy.struck.is_set()
        assert reason in received.reason
        assert outcome.received in (0, BLOCK_TOKENS)
        assert (outcome.tokens + outcome.received, outcome.left) == (len(sequences[0]) - 1, 0)
        assert flat((await same.finish(asked))[0]) == flat(whole[0])
    finally:
        proxy.close()


@pytest.mark.parametrize(("fault", "reason"), [("cut", "closed"), ("flip", ""), ("stall", "")], ids=["cut", "flip", "stall"])
async def test_fault_of_all_connections_to_one_engine(exact: ToGroup, fault: Any, reason: str) -> None:
    whole = exact.whole()
    asked = await exact.begin()
    await exact.until_generated(asked, 50)
    sequences, offer = exact.sequences(asked), await exact.offer(asked)
    proxy = Proxy(offer.port, Fault(fault, 6_000))
    try:
        offered, stall_s = proxy.offered(offer), stall_s_with(fault)
        outcome, received = await exact.to.receive(asked.request_id, sequences, offered, stall_s=stall_s)
        assert proxy.struck.is_set()
        assert received.reason
        assert reason in received.reason
        assert (outcome.tokens + outcome.received, outcome.left) == (len(sequences[0]) - 1, 0)
        assert flat((await exact.finish(asked))[0]) == flat(whole[0])
    finally:
        proxy.close()


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "secret": ({"secret": "x" * 43}, ""),
    "salt": ({"cache_salt": "another key"}, "other tokens"),
    "previous version": ({"selects_layers": False}, "no selected layers"),
    "port": ({"port": 9}, "refused"),
}


@pytest.mark.parametrize("change", CHANGED)
async def test_wrong_offer_is_not_used(exact: ToGroup, change: str) -> None:
    asked = await exact.begin()
    await exact.until_generated(asked, 50)
    changes, reason = CHANGED[change]
    offer = (await exact.offer(asked)).model_copy(update=changes)
    outcome, received = await exact.to.receive(asked.request_id, exact.sequences(asked), offer)
    assert received.reason
    assert reason in received.reason
    assert (outcome.received, outcome.left) == (0, 0)


async def test_source_of_the_previous_version_with_equal_stages_is_read(same: ToGroup) -> None:
    """Each stage wants all layers of one part: nothing has to be selected."""
    asked = await same.begin()
    await same.until_generated(asked, 30)
    offer = await same.offer(asked)
    later = tuple(p.model_copy(update={"selects_layers": False}) for p in offer.later)
    old = offer.model_copy(update={"selects_layers": False, "later": later})
    sequences = same.sequences(asked)
    outcome, received = await same.to.receive(asked.request_id, sequences, old)
    assert (outcome.received, received.reason) == (len(sequences[0]) - 1, "")


async def test_group_with_a_stage_of_the_previous_version_computes(exact_llama: LoadedModel) -> None:
    pair = ToGroup(exact_llama, (1, 3), sending_stages=(2,))
    try:
        whole = pair.whole()
        asked = await pair.begin()
        await pair.until_generated(asked, 20)
        sequences = pair.sequences(asked)
        outcome, received = await pair.to.receive(asked.request_id, sequences, await pair.offer(asked))
        assert (outcome.received, outcome.tokens) == (0, len(sequences[0]) - 1)
        assert "version" in received.reason
        assert flat((await pair.finish(asked))[0]) == flat(whole[0])
    finally:
        await pair.close()


async def test_dropped_sequences_are_dropped_in_all_stages(same: ToGroup) -> None:
    """While they are received: no stage stores anything afterwards, or keeps a connection."""
    asked = await same.begin()
    await same.until_generated(asked, 50)
    offer = await same.offer(asked)
    proxies = [Proxy(part.port, Fault("stall", 3_000)) for part in offer.parts]
    for index, proxy in enumerate(proxies):
        offer = proxy.offered(offer, index)
    batcher = same.recorded[1].batcher
    try:
        receiving = asyncio.create_task(same.to.receive("dropped", same.sequences(asked), offer))
        for proxy in proxies:
            assert await asyncio.to_thread(proxy.struck.wait, 60)
        batcher.discard_prepared("dropped")
        same.to.exchange.forget("dropped")
        with pytest.raises(AssertionError, match="discarded"):
            await receiving
        await asyncio.to_thread(until, lambda: set(same.group.sequences()) == {0})
        for stage in same.group.later:
            await asyncio.to_thread(until, lambda s=stage: not s.receiving._destination._active)  # type: ignore[misc]
            assert stage.receiving._orders == {}
            assert stage.receiving._destination._kept == {}
    finally:
        for proxy in proxies:
            proxy.close()


async def test_group_keeps_keys_and_values_to_the_key_that_they_are_of(exact: ToGroup) -> None:
    asked = replace(request(exact.loaded, exact.name(), **{**BODY, "prompt": PROMPT}), share=FairShare(flow="key a"))
    exact.recorded[0].batcher.submit(asked)
    await exact.until_generated(asked, 5)
    offer = await exact.offer(asked)
    prompts = exact.sequences(asked)
    outcome, _ = await exact.to.receive("shared", prompts, offer)
    assert outcome.received == len(prompts[0]) - 1

    def claim(flow: str) -> int:
        return exact.recorded[1].batcher.transfer(lambda t: t._prepared.claim("shared", "", prompts, flow)[0].computed).result(60)

    assert claim("key b") == 0
    await exact.to.receive("shared", prompts, offer)
    assert claim("key a") == len(prompts[0]) - 1
