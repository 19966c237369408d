"""Limits of a key hold over several gateways, and clients receive them as OpenAI reports them."""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from nats.aio.msg import Msg

from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from services.gateway.adapters.rate_limiter import LEASE_LIMITS, RateLimiter
from services.gateway.domain.limits.members import Members
from shared.contracts import subjects
from shared.contracts.keys import ApiKey
from shared.contracts.limits import GatewayPresent, LeaseLimits, LimitsLeased
from shared.errors import RateLimitExceeded
from tests.integration.gateway.api_keys import add_key, status_of
from tests.integration.gateway.clients import openai_client
from tests.integration.gateway.command_line import output_of, thaw
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode, hang
from tests.support.mesh_client import connected_mesh
from tests.support.nats_accounts import NatsAccount
from tests.support.nats_link import linked
from tests.support.nats_relay import NatsRelay
from tests.support.servers import NatsServer

ASK: dict[str, Any] = {"model": "alpha", "messages": [{"role": "user", "content": "Hi"}]}


async def send(served: Served, key: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    headers = {"authorization": f"Bearer {key}"}
    answer = await served.http.post("/v1/chat/completions", json=chat(**fields), headers=headers)
    return answer.status_code, dict(answer.headers)


async def _known(served: Served, key: str) -> bool:
    return await status_of(served, key) == 200


async def flood(gateways: tuple[Served, ...], key: str, count: int) -> list[int]:
    sent = [send(gateways[i % len(gateways)], key) for i in range(count)]
    return [status for status, _ in await asyncio.gather(*sent)]


async def test_a_flood_over_two_gateways_is_admitted_up_to_the_limit(pair: tuple[Served, Served], node: FakeNode) -> None:
    one, two = pair
    await node.engine("alpha")
    rate = 30
    for number in range(4):  # keys of either gateway
        name = f"team-{number}"
        await add_key(one, name, f"sk-{name}", requests_per_minute=rate)
        await until(partial(_known, two, f"sk-{name}"))
        began = time.monotonic()
        statuses = await flood(pair, f"sk-{name}", 3 * rate)
        earned = (time.monotonic() - began) * rate / 60
        assert set(statuses) == {200, 429}
        assert rate - 1 <= statuses.count(200) <= rate + earned


async def test_clients_receive_limits_in_headers_and_a_refusal_with_a_time_to_retry(
    pair: tuple[Served, Served], node: FakeNode
) -> None:
    one, two = pair
    await node.engine("alpha")
    await add_key(one, "ci", "sk-ci", requests_per_minute=3, tokens_per_minute=100_000)
    await until(lambda: _known(two, "sk-ci"))
    remaining = []
    async with openai_client(one, "sk-ci") as first, openai_client(two, "sk-ci") as second:
        for client in (first, second, first):
            raw = await client.chat.completions.with_raw_response.create(**ASK)
            assert raw.headers["x-ratelimit-limit-requests"] == "3"
            assert raw.headers["x-ratelimit-limit-tokens"] == "100000"
            assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
            remaining.append(int(raw.headers["x-ratelimit-remaining-requests"]))
            # The other gateway may hold a sixteenth, which its requests have not used yet.
            assert 93_000 < int(raw.headers["x-ratelimit-remaining-tokens"]) <= 100_000
        assert remaining == [2, 1, 0]
        with pytest.raises(openai.RateLimitError) as caught:
            await second.chat.completions.create(**ASK, stream=True)
    error = caught.value
    assert error.code == "rate_limit_exceeded"
    assert 1 <= int(error.response.headers["retry-after"]) <= 20
    assert error.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert "ci" in error.message


async def test_requests_do_not_ask_a_frozen_gateway_one_after_the_other(own_nats: NatsAccount, tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def receive(message: Msg) -> None:
        asked.append(message.data)  # a frozen process replies to nothing

    async with connected_mesh(own_nats) as mesh:
        own, live = (RateLimiter(mesh, name, KeyStore(KeyMarker(tmp_path))) for name in ("own", "live"))
        await mesh.nc.subscribe(subjects.gateway_limits("frozen"), cb=receive)
        await mesh.respond(subjects.gateway_limits("live"), LEASE_LIMITS, live.on_lease).start()
        for name in ("frozen", "live"):
            await own.on_presence(GatewayPresent(gateway=name))
        key = ApiKey(name=_key_owned_in_order("frozen", "live", "own"), created=0, requests_per_minute=100)
        await asyncio.gather(*(own.admit(key, 1.0) for _ in range(4)))
        assert len(asked) in (1, 2)  # a second time only if this process was paused beyond the deadline


async def test_a_pause_of_this_process_gives_its_keys_no_second_budget(
    own_nats: NatsAccount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That of the tests stands still in a pause.
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: time.monotonic())
    async with connected_mesh(own_nats) as mesh:
        own, other = (RateLimiter(mesh, name, KeyStore(KeyMarker(tmp_path))) for name in ("own", "other"))
        pauses = [2.0]

        async def lease(ask: LeaseLimits) -> LimitsLeased:
            if pauses:
                time.sleep(pauses.pop())  # noqa: ASYNC251  # the whole process is paused
            return await other.on_lease(ask)

        await mesh.respond(subjects.gateway_limits("other"), LEASE_LIMITS, lease).start()
        await own.on_presence(GatewayPresent(gateway="other"))
        key = ApiKey(name=_key_owned_in_order("other", "own"), created=0, requests_per_minute=2)
        await asyncio.gather(*(own.admit(key, 1.0) for _ in range(2)))
        assert not pauses
        for limiter in (own, other):
            with pytest.raises(RateLimitExceeded):
                await limiter.admit(key, 1.0)


async def _count_admitted(limiter: RateLimiter, key: ApiKey) -> int:
    """Send requests until one is refused."""
    for count in itertools.count():
        try:
            await limiter.admit(key, 1.0)
        except RateLimitExceeded:
            return count
    raise AssertionError


@pytest.mark.own_nats_server
@pytest.mark.parametrize("is_half_open", [False, True], ids=["lost", "half-open"])
async def test_a_gateway_without_nats_admits_its_share_of_a_limit(own_nats: NatsServer, tmp_path: Path, is_half_open: bool) -> None:
    relay = NatsRelay(own_nats)
    async with (
        relay.serving(),
        linked(own_nats) as link,
        connected_mesh(own_nats) as direct,
        connected_mesh(NatsAccount(relay.url if is_half_open else link.url)) as mesh,
    ):
        own, other = (RateLimiter(m, name, KeyStore(KeyMarker(tmp_path))) for m, name in ((mesh, "own"), (direct, "other")))
        await direct.respond(subjects.gateway_limits("other"), LEASE_LIMITS, other.on_lease).start()
        await direct.flush()
        await own.on_presence(GatewayPresent(gateway="other"))
        key = ApiKey(name=_key_owned_in_order("other", "own"), created=0, requests_per_minute=8)
        await own.admit(key, 1.0)

        async def is_away() -> bool:
            return not mesh.is_connected

        async def is_back() -> bool:
            return mesh.is_connected

        if is_half_open:
            relay.up.clear()
        else:
            await link.cut()
            await until(is_away)
        assert await _count_admitted(own, key) == 4
        if is_half_open:
            relay.up.set()
        else:
            await link.open()
        await until(is_back)
        # The owner counts what was admitted without it: three of eight are left.
        began, admitted = time.monotonic(), 0
        async with asyncio.timeout(60):
            while not admitted:
                admitted = await _count_admitted(own, key)
                await asyncio.sleep(0.05)  # a refusal is repeated for a moment without a question to the owner
        assert 3 <= admitted <= 4 + (time.monotonic() - began) * 8 / 60


def _key_owned_in_order(*gateways: str) -> str:
    """Return the name of a key that each gateway owns if those before it are gone."""
    for number in itertools.count():
        members, name = Members(gateways[-1]), f"key-{number}"
        for gateway in gateways[:-1]:
            members.on_presence(gateway, 0.0)
        owners = []
        for gateway in gateways:
            owners.append(members.owner(name))
            members.remove(gateway)
        if owners == list(gateways):
            return name
    raise AssertionError


async def test_concurrent_requests_are_limited_over_gateways(pair: tuple[Served, Served], node: FakeNode) -> None:
    one, two = pair
    await node.engine("alpha", hang)
    await add_key(one, "ci", "sk-ci", concurrent_requests=2)
    await until(lambda: _known(two, "sk-ci"))
    async with openai_client(one, "sk-ci") as first, openai_client(two, "sk-ci") as second:
        streams = [await c.chat.completions.create(**ASK, stream=True) for c in (first, second)]
        for client in (first, second):
            with pytest.raises(openai.RateLimitError, match="2 concurrent requests"):
                await client.chat.completions.create(**ASK)
        await streams[0].close()

        async def admits(client: openai.AsyncOpenAI) -> bool:
            try:
                streams.append(await client.chat.completions.create(**ASK, stream=True))
            except openai.RateLimitError:
                return False
            return True

        await until(lambda: admits(second))
        for stream in streams[1:]:
            await stream.close()


async def test_tokens_of_responses_count(pair: tuple[Served, Served], node: FakeNode) -> None:
    one, _ = pair
    await node.engine("alpha")  # 7 prompt and 9 completion tokens
    await add_key(one, "ci", "sk-ci", tokens_per_minute=60)
    answers = []
    for _ in range(8):
        answers.append(await send(one, "sk-ci"))
        if answers[-1][0] == 429:
            break
    statuses = [status for status, _ in answers]
    assert statuses[-1] == 429
    assert 2 <= statuses.count(200) <= 4
    assert int(answers[0][1]["x-ratelimit-remaining-tokens"]) < 60


async def test_a_changed_limit_applies_at_once_without_a_restart(pair: tuple[Served, Served], node: FakeNode) -> None:
    one, two = pair
    await node.engine("alpha")
    await add_key(one, "ci", "sk-ci", requests_per_minute=1)
    await until(lambda: _known(two, "sk-ci"))
    assert set(await flood(pair, "sk-ci", 8)) == {200, 429}
    assert (await thaw(one, "keys", "change", "ci", "--rpm", "0"))[0] == 0

    async def is_open() -> bool:
        return (await send(two, "sk-ci"))[0] == 200

    await until(is_open)
    assert set(await flood((two,), "sk-ci", 8)) == {200}
    assert (await thaw(one, "keys", "change", "ci", "--budget-day-tokens", "5", "--budget-month-money", "0.5"))[0] == 0
    (key,) = (await thaw(one, "keys", "list"))[1]["keys"]
    assert (key["tokens_per_day"], key["money_per_month"]) == (5, "0.5")
    assert "BUDGETS" in await output_of(one, "keys", "list")


async def test_another_gateway_owns_the_keys_of_one_that_ended(node: FakeNode, serve: ServeFn) -> None:
    async with serve(admin_key="root") as one:
        await until_listed(one, CARDS)
        await node.engine("alpha")
        async with serve(admin_key="root") as two:
            await until_listed(two, CARDS)
            for number in range(6):
                await add_key(two, f"k{number}", f"sk-{number}", requests_per_minute=1000)
                await until(partial(_known, one, f"sk-{number}"))
                assert set(await flood((one, two), f"sk-{number}", 4)) == {200}
        for number in range(6):
            assert set(await flood((one,), f"sk-{number}", 4)) == {200}


async def test_requests_that_are_refused_before_their_queue_use_no_tokens(pair: tuple[Served, Served], node: FakeNode) -> None:
    one, _ = pair
    await node.engine("alpha")
    await add_key(one, "ci", "sk-ci", tokens_per_minute=200, concurrent_requests=1)
    headers = {"authorization": "Bearer sk-ci", "idempotency-key": "no good"}
    for _ in range(4):
        body = chat(max_tokens=150)
        assert (await one.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 400
    assert (await send(one, "sk-ci", max_tokens=150))[0] == 200
