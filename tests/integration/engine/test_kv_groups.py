"""A request of a group in stages continues at a whole instance with every stage's keys and values.

Its tokens are compared with those of an undisturbed run of one engine. The stages run in this
process; `test_kv_group_process.py` has processes.
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
from shared.errors import ThawError, UnsupportedParameter
from tests.integration.engine.batcher_pair import BODIES, BODY, MOVED_AT, PROMPT, Pair
from tests.integration.engine.loaded_model import LoadedModel
from tests.integration.engine.recorded_batcher import flat, request
from tests.integration.engine.transfer_rounds import Round, check_rounds, rounds_of
from tests.support.kv_transfer import Fault, Proxy, faults_of_parts, stall_s_with
from tests.support.launcher import until
from tests.support.stage_group import LocalGroup

pytestmark = pytest.mark.usefixtures("one_thread", "patient_transfers")

STAGES = 3
TYPES = [
    pytest.param(dtype, body, marks=() if dtype == "bfloat16" or body == "greedy" else pytest.mark.long)
    for dtype in ("float32", "bfloat16")
    for body in BODIES
]
"""Of the model, with a request. The property below has any request, in float32."""


class FromGroup(Pair):
    """A group, and a whole engine to which its requests move."""

    def __init__(self, loaded: LoadedModel, group: LocalGroup) -> None:
        super().__init__(loaded, runners=(group.runner, None))
        self.group = group

    async def close(self) -> None:
        await super().close()
        await self.group.close()


def from_group(loaded: LoadedModel, stages: int = STAGES, **options: Any) -> FromGroup:
    return FromGroup(loaded, LocalGroup(loaded.bound, loaded.start.card, stages, **options))


@pytest.fixture
async def pair(llama: LoadedModel) -> AsyncIterator[FromGroup]:
    made = from_group(llama)
    yield made
    await made.close()


@pytest.fixture
async def exact(exact_llama: LoadedModel) -> AsyncIterator[FromGroup]:
    made = from_group(exact_llama)
    yield made
    await made.close()


@pytest.mark.parametrize(("llama", "body"), TYPES, indirect=["llama"])
async def test_moved_request_has_all_keys_and_values_of_its_stages(pair: FromGroup, body: str) -> None:
    """Also those of the last tokens. In bfloat16 too nothing is computed: nothing is rounded."""
    whole = pair.whole(**BODIES[body])
    asked = await pair.begin(**BODIES[body])
    for tokens in MOVED_AT:
        await pair.until_generated(asked, tokens)
        sequences = pair.sequences(asked)
        offer = await pair.offer(asked)
        assert [[x.layer for x in part.layout.layers] for part in offer.parts] == [[0], [1], [2]]
        assert len({part.port for part in offer.parts}) == STAGES
        outcome, received = await pair.to.receive(asked.request_id, sequences, offer)
        assert (outcome.tokens, outcome.left, received.reason) == (0, 0, "")
        assert received.nbytes == outcome.received * offer.token_bytes
    moved = await pair.finish(asked, **BODIES[body])
    assert {i: flat(d) for i, d in moved.items()} == {i: flat(d) for i, d in whole.items()}
    generated = sum(len(d) for d in pair.recorded[0].deltas[asked.request_id].values())
    last = pair.to.exchange.take_received(asked.request_id)
    assert last.tokens == generated + (len(PROMPT) - 1) * len(sequences)
    await asyncio.to_thread(until, lambda: pair.group.sequences() == [0] * (STAGES - 1))


@given(rounds_of(STAGES, 60_000), st.sampled_from(sorted(BODIES)), st.booleans())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_rounds_gives_the_undisturbed_tokens(
    exact_llama: LoadedModel, rounds: list[Round], body: str, is_preempted: bool
) -> None:
    async def run() -> None:
        pair = from_group(exact_llama)
        await check_rounds(pair, rounds, body, lambda asked: offer_if_computed(pair, asked.request_id), is_preempted=is_preempted)

    asyncio.run(run())


async def offer_if_computed(pair: FromGroup, request_id: str) -> KvOffer | None:
    """Return an offer; None: the request is over, or was preempted a moment ago."""
    try:
        return await pair.source.exchange.source.offer(request_id, "", "")
    except ThawError:
        return None


@pytest.mark.parametrize(("part", "fault", "reason"), faults_of_parts(STAGES))
async def test_fault_of_one_stage_costs_only_tokens_that_lack_a_layer(
    exact: FromGroup, part: int, fault: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "plan_pieces", partial(plan_pieces, piece_bytes=1))
    whole = exact.whole()
    asked = await exact.begin()
    await exact.until_generated(asked, 50)
    sequences, offer = exact.sequences(asked), await exact.offer(asked)
    first = BLOCK_TOKENS * offer.parts[part].layout.token_bytes
    proxy = Proxy(offer.parts[part].port, Fault(fault, first + 2_000))  # in the second block of this stage
    try:
        offered, stall_s = proxy.offered(offer, part), stall_s_with(fault)
        outcome, received = await exact.to.receive(asked.request_id, sequences, offered, stall_s=stall_s)
        assert proxy.struck.is_set()
        assert reason in received.reason
        assert outcome.received in (0, BLOCK_TOKENS)
        assert (outcome.tokens + outcome.received, outcome.left) == (len(sequences[0]) - 1, 0)
        assert flat((await exact.finish(asked))[0]) == flat(whole[0])
    finally:
        proxy.close()


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "secret": ({"secret": "x" * 43}, ""),
    "salt": ({"cache_salt": "another key"}, "other tokens"),
    "only the first stage": ({"later": ()}, "differently (layers)"),
}


@pytest.mark.parametrize("change", CHANGED)
async def test_wrong_offer_is_not_used(exact: FromGroup, change: str) -> None:
    """An engine of the previous version sees only the first stage."""
    asked = await exact.begin()
    await exact.until_generated(asked, 50)
    changes, reason = CHANGED[change]
    offer = (await exact.offer(asked)).model_copy(update=changes)
    outcome, received = await exact.to.receive(asked.request_id, exact.sequences(asked), offer)
    assert received.reason
    assert reason in received.reason
    assert (outcome.received, outcome.left) == (0, 0)


async def test_stages_in_another_order_are_not_used(exact: FromGroup) -> None:
    asked = await exact.begin()
    await exact.until_generated(asked, 5)
    offer = await exact.offer(asked)
    swapped = offer.model_copy(update={"later": offer.later[::-1]})
    outcome, received = await exact.to.receive(asked.request_id, exact.sequences(asked), swapped)
    assert (outcome.received, "differently (layers)" in received.reason) == (0, True)
    one, two = offer.later
    lying = offer.model_copy(update={"later": (one.model_copy(update={"port": two.port}), two)})
    outcome, received = await exact.to.receive("other name", exact.sequences(asked), lying)
    assert (outcome.received, "another model" in received.reason) == (0, True)


async def test_stages_bind_keys_and_values_to_the_key_of_the_request(exact: FromGroup) -> None:
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


async def test_group_with_a_stage_of_the_previous_version_offers_nothing(exact_llama: LoadedModel) -> None:
    pair = from_group(exact_llama, old_stages=(2,))
    try:
        whole = pair.whole()
        asked = await pair.begin()
        await pair.until_generated(asked, 5)
        with pytest.raises(UnsupportedParameter, match="version"):
            await pair.offer(asked)
        assert flat((await pair.finish(asked))[0]) == flat(whole[0])
    finally:
        await pair.close()


async def test_stage_that_cannot_listen_costs_no_answer(exact: FromGroup) -> None:
    whole = exact.whole()
    asked = await exact.begin()
    await exact.until_generated(asked, 5)
    exact.group.later[0].kv._readers._host = "192.0.2.1"  # an address of no machine
    with pytest.raises(UnsupportedParameter, match="THAW_STAGE_HOST"):
        await exact.offer(asked)
    assert flat((await exact.finish(asked))[0]) == flat(whole[0])
