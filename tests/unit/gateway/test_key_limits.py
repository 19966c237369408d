"""Budgets and leases of a key's limits, over any order of messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.adapters.rate_limiter import format_reset, share_of
from services.gateway.domain.limits.estimate import estimate_tokens, predict_cost
from services.gateway.domain.limits.key_budget import LEASE_S, KeyBudget
from services.gateway.domain.limits.lease import VALID_S, Lease
from services.gateway.domain.limits.members import SILENT_S, Members
from services.gateway.domain.limits.token_bucket import TokenBucket
from shared.contracts.engines import Engine
from shared.contracts.keys import ApiKey, KeyLimits
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest
from tests.support.examples import examples


@dataclass
class Mesh:
    """Gateways that lease from one budget, with a clock of their own."""

    limits: KeyLimits
    budget: KeyBudget = field(default_factory=KeyBudget)
    leases: dict[str, Lease] = field(default_factory=dict)
    now: float = 0.0
    admitted: list[tuple[float, float]] = field(default_factory=list)

    def send(self, gateway: str, tokens: float = 1.0, *, is_lost: bool = False) -> bool:
        lease = self.leases.setdefault(gateway, Lease())
        for _ in range(2):
            if lease.admit(self.limits, tokens, "owner", self.now):
                self.admitted.append((self.now, tokens))
                return True
            own = self.leases.get("owner")
            if gateway != "owner" and own is not None and own.answer is not None:
                self.renew("owner")  # the owner gives back what it took ahead
            answer = self.budget.lease(lease.ask(gateway, self.limits, tokens), self.now)
            if is_lost:
                return False
            lease.accept_answer(answer, "owner", self.now, self.now)
        return False

    def renew(self, gateway: str) -> None:
        lease = self.leases.setdefault(gateway, Lease())
        if lease.answer is None:
            return
        ask = lease.renewal(gateway, self.limits, self.now, is_owner=gateway == "owner")
        lease.accept_answer(self.budget.lease(ask, self.now), "owner", self.now, self.now, is_renewal=True)

    @property
    def in_flight(self) -> int:
        return sum(lease.in_flight for lease in self.leases.values())


@pytest.mark.parametrize("gateways", [("owner",), ("owner", "b"), ("b", "c")])
def test_a_burst_over_all_gateways_admits_exactly_the_limit(gateways: tuple[str, ...]) -> None:
    mesh = Mesh(KeyLimits(requests_per_minute=60))
    sent = [mesh.send(gateways[i % len(gateways)]) for i in range(200)]
    assert sum(sent) == 60
    assert mesh.admitted[0][0] == mesh.admitted[-1][0]
    mesh.now = 10.0
    assert sum(mesh.send(gateways[i % len(gateways)]) for i in range(200)) == 10


def test_an_exhausted_limit_reports_when_to_repeat() -> None:
    mesh = Mesh(KeyLimits(requests_per_minute=6))
    while mesh.send("b"):
        pass
    answer = mesh.leases["b"].answer
    assert answer is not None
    assert (answer.exhausted, answer.retry_after_s, answer.remaining_requests) == ("requests", 10.0, 0)


def test_tokens_are_corrected_when_a_request_ends() -> None:
    mesh = Mesh(KeyLimits(tokens_per_minute=1000))
    assert mesh.send("b", 900)
    assert not mesh.send("b", 900)
    mesh.leases["b"].settle(900, 100)
    assert mesh.send("b", 890)
    mesh.leases["b"].settle(890, 3000)  # three minutes' worth: a debt
    mesh.now = 61.0
    mesh.renew("b")
    assert not mesh.send("owner", 1)
    mesh.now = 190.0
    assert mesh.send("owner", 1)


def test_concurrent_requests_are_counted_over_all_gateways_until_one_is_lost() -> None:
    mesh = Mesh(KeyLimits(concurrent_requests=4))
    assert [mesh.send(g) for g in ("owner", "b", "b", "c", "c", "owner")] == [True] * 4 + [False] * 2
    mesh.leases["b"].settle(1, 1)
    mesh.renew("b")
    mesh.renew("b")
    mesh.now = LEASE_S / 2
    for gateway in ("owner", "c"):
        mesh.renew(gateway)
    mesh.now = LEASE_S + 0.1  # b is dead
    assert [mesh.send("c") for _ in range(3)] == [True, True, False]


def test_a_lease_without_an_answer_is_void_before_its_owner_gives_it_away() -> None:
    assert VALID_S < LEASE_S
    mesh = Mesh(KeyLimits(requests_per_minute=60))
    assert mesh.send("b")
    assert not mesh.leases["b"].admit(mesh.limits, 1, "owner", VALID_S + 0.1)
    assert not mesh.leases["b"].admit(mesh.limits, 1, "another", 0.1)


def test_an_idle_lease_returns_what_it_has_not_used() -> None:
    mesh = Mesh(KeyLimits(requests_per_minute=160))
    assert mesh.send("b")
    mesh.leases["b"].settle(1, 1)
    assert mesh.budget.requests is not None
    assert mesh.budget.requests.level < 159
    mesh.now = 2.5
    mesh.renew("b")
    assert mesh.budget.requests.level == 160
    assert mesh.budget.is_idle(mesh.now + LEASE_S + 1)


def test_a_changed_limit_keeps_what_was_used() -> None:
    mesh = Mesh(KeyLimits(requests_per_minute=10))
    assert sum(mesh.send("owner") for _ in range(20)) == 10
    mesh.limits = KeyLimits(requests_per_minute=15)
    assert sum(mesh.send("owner") for _ in range(20)) == 5


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["send", "lost", "settle", "renew", "wait"]), st.sampled_from(["owner", "b", "c"]), st.integers(1, 40)
    ),
    max_size=120,
)


@settings(max_examples=examples(200), deadline=None)
@given(_EVENTS)
def test_no_order_of_messages_exceeds_a_limit(events: list[tuple[str, str, int]]) -> None:
    """In any interval at most the bucket's capacity and its refill are admitted."""
    mesh = Mesh(KeyLimits(requests_per_minute=30, tokens_per_minute=300, concurrent_requests=5))
    running: dict[str, list[float]] = {"owner": [], "b": [], "c": []}
    for event, gateway, amount in events:
        if event in ("send", "lost"):
            if mesh.send(gateway, amount, is_lost=event == "lost"):
                running[gateway].append(amount)
        elif event == "settle" and running[gateway]:
            estimated = running[gateway].pop()
            mesh.leases[gateway].settle(estimated, estimated)
        elif event == "renew":
            mesh.renew(gateway)
        elif event == "wait":
            mesh.now += amount / 20
            for other in running:
                mesh.renew(other)
        assert mesh.in_flight <= 5
    for i, (start, _) in enumerate(mesh.admitted):
        for j in range(i, len(mesh.admitted)):
            span = mesh.admitted[j][0] - start
            assert j - i + 1 <= 30 + span * 0.5 + 1e-6
            assert sum(t for _, t in mesh.admitted[i : j + 1]) <= 300 + span * 5 + 1e-6


def test_only_keys_of_a_gateway_that_is_added_or_removed_change_their_owner() -> None:
    keys = [f"key-{i}" for i in range(200)]
    one, two = Members("a"), Members("b")
    one.on_presence("b", 0.0)
    two.on_presence("a", 0.0)
    before = {key: one.owner(key) for key in keys}
    assert before == {key: two.owner(key) for key in keys}
    assert set(before.values()) == {"a", "b"}
    one.on_presence("c", 0.0)
    after = {key: one.owner(key) for key in keys}
    assert {after[k] for k in keys if after[k] != before[k]} == {"c"}
    one.on_presence("b", SILENT_S)
    one.expire(SILENT_S + 1, 0.0)
    assert {key: one.owner(key) for key in keys} == before


def test_after_a_pause_no_gateway_is_silent_yet() -> None:
    members = Members("a")
    members.on_presence("b", 0.0)
    members.touch(9.0)  # b's announcements wait to be read
    members.expire(9.0 + SILENT_S, 0.0)
    assert len(members) == 2
    members.expire(9.1 + SILENT_S, 0.0)
    assert len(members) == 1


def test_silence_counts_since_the_own_connection_works() -> None:
    members = Members("a")
    members.on_presence("b", 0.0)
    assert not members.has_silent(SILENT_S)
    assert members.has_silent(20.0)
    members.expire(20.0, 18.0)
    assert len(members) == 2
    members.expire(18.1 + SILENT_S, 18.0)
    assert len(members) == 1


def test_a_share_of_a_limit_is_never_zero() -> None:
    key = ApiKey(name="ci", created=0, requests_per_minute=100, concurrent_requests=2)
    share = share_of(key, 3)
    assert (share.requests_per_minute, share.concurrent_requests, share.tokens_per_minute) == (33, 1, None)


def test_a_token_bucket_refills_to_its_capacity() -> None:
    bucket = TokenBucket.full(60, 0.0)
    assert bucket.take(50, 100) == 60
    assert bucket.take(1, 0) == 0
    bucket.refill(2.0)
    assert (bucket.level, bucket.wait_s(5), bucket.full_in_s) == (2.0, 3.0, 58.0)
    bucket.refill(1000.0)
    assert bucket.level == 60


def test_a_token_bucket_earns_nothing_twice_if_a_time_is_older_than_the_last() -> None:
    bucket = TokenBucket(60, 0.0, 0.0)
    for now in (10.0, 4.0, 10.0):
        bucket.refill(now)
    assert bucket.level == 10


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0101, "11ms"), (1.5, "1.5s"), (59.97, "1m0s"), (60, "1m0s"), (119.7, "2m0s"), (367.2, "6m7s")],
)
def test_resets_are_formatted_as_openai_does(seconds: float, text: str) -> None:
    assert format_reset(seconds) == text


def test_the_estimate_adds_the_completion_that_the_client_allows() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10, "n": 2}
    assert estimate_tokens(ChatCompletionRequest.model_validate(fields), 400) == 120


@pytest.mark.parametrize(
    ("engine", "fields", "completion"),
    [
        ("builtin", {}, 16),
        ("vllm", {"n": 2}, 32),
        ("builtin", {"max_tokens": None}, 256),
        ("builtin", {"max_tokens": 40}, 40),
        ("llamacpp", {}, 256),
    ],
)
def test_a_completion_is_predicted_with_the_default_limit_of_its_engine(
    engine: Engine, fields: dict[str, Any], completion: int
) -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "Hi", **fields})
    assert predict_cost(request, 400, engine) == 100 + completion


def test_a_chat_without_a_limit_is_predicted_with_256_tokens() -> None:
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
    assert predict_cost(request, 400, "builtin") == 356
