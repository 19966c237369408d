"""Invariants of every policy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.domain.policies.port import Ask, DeviceView, Usage
from services.scheduler.profiles import profile_named
from shared.errors import InvalidRequest
from simulator.policies import PROFILES
from tests.unit.scheduler.policies.views import ask, devices, option


@pytest.mark.parametrize("name", PROFILES)
@settings(deadline=None)
@given(view=devices(), short=st.integers(1, 60), now=st.floats(0, 10))
def test_no_protected_victim_enough_freed_and_the_same_again(name: str, view: DeviceView, short: int, now: float) -> None:
    found = PROFILES[name].clear(ask(), view, short, now)
    assert found == PROFILES[name].clear(ask(), view, short, now)
    if found is None:
        return
    by_key = {r.key: r for r in view.residents}
    victims = [by_key[k] for k in found.victims]
    assert len(set(found.victims)) == len(victims)
    assert not any(v.protected_reason or v.model == "new" for v in victims)
    assert found.freed_bytes == sum(v.nbytes for v in victims) >= short
    serving = [v for v in victims if v.state == "serving"]
    assert not serving or found.how in ("suspend", "preempt", "migrate")
    assert set(found.moves) == ({v.key for v in serving} if found.how == "migrate" else set())


@pytest.mark.parametrize("name", PROFILES)
def test_the_order_is_a_permutation(name: str) -> None:
    asks = [ask(f"m{n % 3}", waited=float(n * 7 % 5), request_id=str(n)) for n in range(9)]
    book = {f"m{n}": Usage(f"m{n}", 10 * n, 9 * n) for n in range(3)}
    ordered = PROFILES[name].order(asks, book, 0.5)
    assert sorted(a.request_id for a in ordered) == [str(n) for n in range(9)]
    assert ordered == PROFILES[name].order(list(reversed(asks)), book, 0.5)


@pytest.mark.parametrize("name", PROFILES)
def test_choice_is_one_of_the_options_and_independent_of_their_order(name: str) -> None:
    wanted: Ask = ask()
    choose = PROFILES[name].choose
    assert choose(wanted, [], "seed") is None
    options = [option(f"n{n}/g0", seconds=float(n * 3 % 4), free=n) for n in range(5)]
    chosen = choose(wanted, options, "seed")
    assert chosen in options
    assert choose(wanted, options[::-1], "seed") == chosen


def test_unknown_profile_is_refused_with_the_known_names() -> None:
    assert profile_named("torpor").slo_queue
    with pytest.raises(InvalidRequest, match=r"'best'.*hydraserve.*torpor"):
        profile_named("best")
