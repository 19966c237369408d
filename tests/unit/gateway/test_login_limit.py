"""The limit on failed logins, over a sliding minute, and which addresses are one client."""

from __future__ import annotations

from typing import Any, cast

import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from services.gateway.domain.client_address import client_of_address, trusted_peers
from services.gateway.domain.login_limit import IN_ALL, PER_CLIENT, WINDOW_S, LoginLimit


def fail(limit: LoginLimit, address: str, count: int, now: float = 0.0) -> None:
    for _ in range(count):
        assert limit.wait_s(address, now) == 0
        limit.on_failure(address, now)


def test_a_client_waits_until_its_first_failure_is_a_minute_old() -> None:
    limit = LoginLimit()
    fail(limit, "10.0.0.1", 1, now=5.0)
    fail(limit, "10.0.0.1", PER_CLIENT - 1, now=20.0)
    assert limit.wait_s("10.0.0.1", 25.0) == WINDOW_S - 20
    assert limit.wait_s("10.0.0.2", 25.0) == 0
    assert limit.wait_s("10.0.0.1", WINDOW_S + 5) == 0


def test_many_clients_have_a_limit_together() -> None:
    limit = LoginLimit()
    for n in range(IN_ALL):
        fail(limit, f"10.0.0.{n}", 1)
    assert limit.wait_s("10.0.1.1", 10.0) == WINDOW_S - 10
    assert limit.wait_s("10.0.1.1", WINDOW_S) == 0


def test_addresses_of_one_network_fail_together() -> None:
    limit = LoginLimit()
    for n in range(PER_CLIENT):
        fail(limit, f"2001:db8::{n + 1}", 1)
    assert limit.wait_s("2001:db8::ffff", 0.0) > 0


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("", "unix", False),
    ],
)
def test_addresses_of_one_client(one: str, other: str, is_same: bool) -> None:
    assert (client_of_address(one) == client_of_address(other)) == is_same


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("10.1.2.3", "203.0.113.7"),
        ("::ffff:10.1.2.3", "203.0.113.7"),
        ("::ffff:11.1.2.3", "::ffff:11.1.2.3"),
        ("fd00::1", "203.0.113.7"),
        ("fd00::2", "fd00::2"),
    ],
)
async def test_a_proxy_is_trusted_in_both_forms_of_its_address(peer: str, client: str) -> None:
    clients: list[str] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        clients.append(scope["client"][0])

    headers = [(b"x-forwarded-for", b"198.51.100.1, 203.0.113.7")]
    proxied = ProxyHeadersMiddleware(note, trusted_peers("10.0.0.0/8,fd00::1/128"))
    await proxied(cast(Any, {"type": "http", "client": (peer, 1), "headers": headers}), cast(Any, None), cast(Any, None))
    assert clients == [client]
    assert trusted_peers("") == ""
