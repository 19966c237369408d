"""A gateway whose own connection to NATS is lost or half-open: its routes outlive that."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import SecretStr

from shared.contracts.node import NODE_LOST_AFTER_S
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed, until_running
from tests.support.fake_engine import FakeEngine, FakeNode
from tests.support.nats_link import Link, linked
from tests.support.nats_relay import NatsRelay
from tests.support.servers import NatsServer

URL = "/v1/chat/completions"
pytestmark = pytest.mark.own_nats_server


@pytest.fixture
async def engines(node: FakeNode) -> list[FakeEngine]:
    """Return two engines in the order in which idle ones are chosen."""
    return sorted([await node.engine("alpha") for _ in range(2)], key=lambda engine: engine.id)


async def lose_connection(link: Link, served: Served) -> None:
    await link.cut()

    async def is_away() -> bool:
        return (await served.http.get("/ready")).status_code == 503

    await until(is_away)


async def ask_in_the_outage(link: Link, served: Served) -> int:
    """Send a request, open the link once the gateway has it, and return the response's status."""
    waiting = asyncio.create_task(served.http.post(URL, json=chat()))

    async def has_request() -> bool:
        rows = (await served.http.get("/metrics")).text.splitlines()
        return any(r.startswith(("thaw_queue_length{", "thaw_requests_in_flight{")) and not r.endswith(" 0.0") for r in rows)

    await until(has_request)
    await link.open()
    return (await waiting).status_code


async def is_running(served: Served, model: str) -> bool:
    return any(m["name"].startswith(model) for m in (await served.http.get("/api/ps")).json()["models"])


async def test_routes_outlive_a_lost_connection(engines: list[FakeEngine], serve: ServeFn, own_nats: NatsServer) -> None:
    async with linked(own_nats) as link, serve(nats_url=SecretStr(link.url)) as gateway:
        await until_listed(gateway, CARDS)
        await until_running(gateway, "alpha")
        await lose_connection(link, gateway)
        await asyncio.sleep(NODE_LOST_AFTER_S + 1)
        assert await is_running(gateway, "alpha")
        assert await ask_in_the_outage(link, gateway) == 200


async def test_request_whose_engine_stopped_in_the_outage_is_served_by_another(
    engines: list[FakeEngine], serve: ServeFn, own_nats: NatsServer
) -> None:
    async with linked(own_nats) as link, serve(nats_url=SecretStr(link.url)) as gateway:
        await until_listed(gateway, CARDS)
        await until_running(gateway, "alpha")
        await lose_connection(link, gateway)
        await engines[0].vanish()
        assert await ask_in_the_outage(link, gateway) == 200
        assert len(engines[1].requests) == 1


async def test_routes_outlive_a_half_open_connection(engines: list[FakeEngine], serve: ServeFn, own_nats: NatsServer) -> None:
    relay = NatsRelay(own_nats)
    async with relay.serving(), serve(nats_url=SecretStr(relay.url)) as gateway:
        await until_listed(gateway, CARDS)
        await until_running(gateway, "alpha")
        relay.break_at(b"PING\r\n", "lose")
        async with asyncio.timeout(60):
            await relay.broken.wait()
        await asyncio.sleep(NODE_LOST_AFTER_S + 1)
        assert await is_running(gateway, "alpha")
        assert (await gateway.http.post(URL, json=chat())).status_code == 200
