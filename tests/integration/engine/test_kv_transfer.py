"""A request whose keys and values are sent continues as if it had never moved.

Its tokens are compared with those of an undisturbed run: after any number of rounds, of either
kind, and with every fault of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.generation import kv_transfers
from services.engine.generation.kv_transfers import KvTransfers
from shared.contracts.inference import FairShare
from shared.errors import UnsupportedParameter
from tests.integration.engine.batcher_pair import BODIES, BODY, MOVED_AT, PROMPT, Pair
from tests.integration.engine.loaded_model import LoadedModel
from tests.integration.engine.model_families import save
from tests.integration.engine.recorded_batcher import RecordedBatcher, flat, request
from tests.integration.engine.transfer_rounds import Round, check_rounds, rounds_of
from tests.support.kv_transfer import Fault, Proxy, stall_s_with
from tests.support.launcher import until

pytestmark = pytest.mark.usefixtures("one_thread", "patient_transfers")


@pytest.fixture
async def pair(llama: LoadedModel) -> AsyncIterator[Pair]:
    made = Pair(llama)
    yield made
    await made.close()


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
        offered, stall_s = proxy.offered(offer), stall_s_with(fault.kind)
        outcome, received = await exact.to.receive(asked.request_id, exact.sequences(asked), offered, stall_s=stall_s)
        assert proxy.struck.is_set()
        assert reason in received.reason
        assert outcome.tokens > 0
        assert outcome.left == 0
        assert flat((await exact.finish(asked))[0]) == flat(whole[0])
    finally:
        proxy.close()


def fail(*_: object) -> None:
    raise RuntimeError("CUDA out of memory")


async def test_keys_and_values_that_the_device_has_no_memory_for_are_computed(exact: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exact.whole()
    asked = await exact.begin()
    await exact.until_generated(asked, 50)
    monkeypatch.setattr(kv_transfers, "write_piece", fail)
    outcome, received = await exact.to.receive(asked.request_id, exact.sequences(asked), await exact.offer(asked))
    assert "out of memory" in received.reason
    assert (outcome.received, outcome.left) == (0, 0)
    assert flat((await exact.finish(asked))[0]) == flat(whole[0])


async def test_request_is_resumed_though_its_rest_cannot_be_received(exact: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exact.whole()
    asked = await exact.begin()
    await exact.until_generated(asked, 50)
    _, received = await exact.to.receive(asked.request_id, exact.sequences(asked), await exact.offer(asked))
    assert received.reason == ""
    await exact.until_generated(asked, 80)
    monkeypatch.setattr(exact.to.exchange._destination, "receive", fail)
    assert flat((await exact.finish(asked))[0]) == flat(whole[0])


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
