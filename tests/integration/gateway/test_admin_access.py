"""The gateway protects its admin API from callers without a key, and its logs."""

from __future__ import annotations

import logging
import re
from typing import cast

import pytest
from pydantic import ValidationError

from services.gateway.authorization import hash_key
from services.gateway.http.endpoints.admin import Admin
from services.gateway.loop import Gateway
from services.gateway.settings import GatewaySettings
from shared.contracts import subjects
from shared.contracts.admin import ADMIN_REQUEST, AdminRequest, ClusterView, ModelView
from shared.contracts.base import Message
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, ServeFn, chat, until_listed
from tests.support.fake_engine import FakeNode, card_of

ROUTES = sorted((method, route.path) for route in Admin(cast(Gateway, None)).routes() for method in route.methods or ())


async def test_every_admin_route_requires_the_admin_key(node: FakeNode, serve: ServeFn, caplog: pytest.LogCaptureFixture) -> None:
    assert {path for _, path in ROUTES} >= {"/admin/v1/models", "/admin/v1/keys", "/admin/v1/nodes/{node}/drain"}
    async with serve(admin_key="root", api_keys="0" * 64) as served:
        for method, path in ROUTES:
            url = re.sub(r"\{[\w:]+\}", "x", path)
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                answer = await served.http.request(method, url, headers=headers)
                assert answer.status_code == 401, (method, url, headers)
        for disguised in ("/admin/v1/../v1/cluster", "//admin/v1/cluster", "/v1/%2e%2e/admin/v1/cluster", "/ADMIN/v1/cluster"):
            assert (await served.http.get(disguised)).status_code in (401, 404), disguised
    assert "administers the mesh" not in caplog.text
    async with serve():
        assert "administers the mesh" in caplog.text


@pytest.mark.parametrize(("trusted", "address"), [("", "127.0.0.1"), ("10.0.0.0/8, 127.0.0.1", "203.0.113.7")])
async def test_only_trusted_proxies_name_the_address_of_a_client(
    node: FakeNode, serve: ServeFn, trusted: str, address: str
) -> None:
    headers = {"authorization": "Bearer root", "x-forwarded-for": "198.51.100.1, 203.0.113.7"}
    async with serve(admin_key="root", trusted_proxies=trusted) as served:
        added = await served.http.post("/admin/v1/keys", json={"name": "ci", "sha256": hash_key("sk-ci")}, headers=headers)
        assert added.status_code == 200
        (entry,) = (await served.http.get("/admin/v1/key-log", headers=headers)).json()["entries"]
    assert entry["address"] == address


def test_a_trusted_proxy_is_an_address_or_a_network() -> None:
    assert GatewaySettings(trusted_proxies="10.1.2.3/8,::1,").trusted_proxies == "10.0.0.0/8,::1/128"
    with pytest.raises(ValidationError, match="trusted_proxies"):
        GatewaySettings(trusted_proxies="proxy.example")


async def test_model_list_contains_no_secrets_of_sources(node: FakeNode, serve: ServeFn) -> None:
    secret = card_of("gamma", source="https://me:hidden@host/models/gamma?X-Signature=hidden")
    await (await catalog_bucket(node.mesh.nc.jetstream())).put(subjects.token(secret.name), secret.model_dump_json().encode())
    async with serve() as served:
        await until_listed(served, (*CARDS, secret))
        for path in ("/v1/models", "/v1/models/gamma"):
            listed = (await served.http.get(path)).text
            assert "hidden" not in listed
            assert "https://host/models/gamma" in listed


async def test_read_only_keys_see_no_secrets_of_models(node: FakeNode, serve: ServeFn) -> None:
    """Credentials of sources and values of `env` are for those who may change the model."""
    source = "https://me:hidden@host/models/gamma?X-Signature=hidden"
    gamma = card_of("gamma", source=source)
    gamma = gamma.model_copy(update={"info": gamma.info.model_copy(update={"source": source})})
    delta = card_of("delta", engine="vllm", env={"HF_TOKEN": "hidden"})
    for card in (gamma, delta):
        await (await catalog_bucket(node.mesh.nc.jetstream())).put(subjects.token(card.name), card.model_dump_json().encode())

    async def view(_: AdminRequest) -> Message:
        return ClusterView(scheduler="s", epoch=1, models=(ModelView(card=gamma), ModelView(card=delta)))

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, view).start()
    async with serve(admin_key="root") as served:
        await until_listed(served, (*CARDS, gamma, delta))
        root = {"authorization": "Bearer root"}
        body = {"name": "viewer", "scope": "read-only", "sha256": hash_key("sk-viewer")}
        assert (await served.http.post("/admin/v1/keys", json=body, headers=root)).status_code == 200
        for path, shown in {
            "cluster": ("https://host/models/gamma", "HF_TOKEN"),
            "cluster?brief=true": ("https://host/models/gamma", "HF_TOKEN"),
            "models/gamma/settings": ("https://host/models/gamma",),
            "models/delta/settings": ("HF_TOKEN",),
        }.items():
            seen = await served.http.get(f"/admin/v1/{path}", headers={"authorization": "Bearer sk-viewer"})
            assert seen.status_code == 200, seen.text
            assert "hidden" not in seen.text
            assert all(text in seen.text for text in shown), seen.text


@pytest.mark.parametrize("asked", [False, True])
async def test_prompts_are_logged_only_if_enabled(
    asked: bool, node: FakeNode, serve: ServeFn, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the walrus keeps its own counsel"
    await node.engine("alpha")
    with caplog.at_level(logging.DEBUG):
        async with serve(log_prompts=asked) as served:
            await until_listed(served, CARDS)
            body = chat() | {"messages": [{"role": "user", "content": secret}]}
            assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
            # Nor does an error copy the request into a log.
            assert (await served.http.post("/v1/chat/completions", json=body | {"n": "many"})).status_code == 400
    logged = [vars(r) for r in caplog.records if r.name.startswith("services.")]
    assert (secret in str(logged)) is asked
