"""Rounds of a migration between two batchers, with faults of their connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from services.engine.generation.request import GenerationRequest
from shared.contracts.kv_transfer import KvOffer
from tests.integration.engine.batcher_pair import BODIES, Pair
from tests.integration.engine.recorded_batcher import flat
from tests.support.kv_transfer import Fault, Proxy


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
