"""API keys are added and revoked while gateways run, by API and command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NoKeysError

from services.gateway.adapters.idempotency_store import Claim, Entry, ExistingKey, IdempotencyStore
from services.gateway.authorization import hash_key
from shared.contracts import subjects
from tests.integration.gateway.api_keys import ADMIN, add_key
from tests.integration.gateway.command_line import output_of, thaw
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode


async def opens(served: Served, path: str, key: str | None) -> bool:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    status = (await served.http.get(path, headers=headers)).status_code
    assert status in (200, 401)
    return status == 200


async def test_the_first_key_closes_the_endpoint_on_every_gateway(guarded: Served, node: FakeNode, serve: ServeFn) -> None:
    async with serve(admin_key="root") as other:
        await until_listed(other, CARDS)
        assert await opens(other, "/v1/models", None)
        status, made = await thaw(guarded, "keys", "add", "alice")
        assert (status, made["name"], made["scope"]) == (0, "alice", "inference")
        assert not await opens(guarded, "/v1/models", None)
        assert await opens(guarded, "/v1/models", made["key"])
        await until(lambda: _closed(other))
        assert await opens(other, "/v1/models", made["key"])
        assert not await opens(guarded, "/admin/v1/keys", made["key"])
        again, refused = await thaw(guarded, "keys", "add", "alice")
        assert (again, refused["error"]["code"]) == (1, "conflict")
        assert [k["name"] for k in (await thaw(guarded, "keys", "list"))[1]["keys"]] == ["alice"]
        assert (await thaw(guarded, "keys", "revoke", "alice"))[0] == 0
        assert not await opens(guarded, "/v1/models", made["key"])
        assert not await opens(guarded, "/v1/models", None)
        assert (await thaw(guarded, "keys", "revoke", "alice"))[1]["error"]["code"] == "not_found"


async def test_revoking_the_last_key_warns_that_every_request_is_refused(guarded: Served) -> None:
    assert [(await thaw(guarded, "keys", "add", name))[0] for name in ("alice", "bob")] == [0, 0]
    assert "every request is refused" not in await output_of(guarded, "keys", "revoke", "alice")
    assert "every request is refused" in await output_of(guarded, "keys", "revoke", "bob")


async def test_only_an_explicit_setting_opens_the_endpoint_with_the_last_key(node: FakeNode, serve: ServeFn) -> None:
    async with serve(admin_key="root", require_key=False) as served:
        _, made = await thaw(served, "keys", "add", "alice")
        assert not await opens(served, "/v1/models", None)
        assert await opens(served, "/v1/models", made["key"])
        assert "every client that reaches" in await output_of(served, "keys", "revoke", "alice")
        await until_listed(served, CARDS)
        assert await opens(served, "/v1/models", None)
    async with serve(admin_key="root") as served:
        assert not await opens(served, "/v1/models", None)


async def test_loss_of_the_keys_bucket_does_not_open_the_endpoint(node: FakeNode, serve: ServeFn) -> None:
    async with serve(admin_key="root") as served:
        await thaw(served, "keys", "add", "alice")
        js = node.mesh.nc.jetstream()
        await js.delete_key_value(subjects.KEYS_BUCKET)
    async with serve(admin_key="root") as served:
        assert not await opens(served, "/v1/models", None)
        assert (await thaw(served, "keys", "list"))[1]["required"]


async def test_revoked_key_closes_the_endpoint_for_a_new_gateway(node: FakeNode, serve: ServeFn, tmp_path: Path) -> None:
    async with serve(admin_key="root") as served:
        await thaw(served, "keys", "add", "alice")
        await thaw(served, "keys", "revoke", "alice")
    async with serve(admin_key="root", home=tmp_path / "another") as served:
        assert not await opens(served, "/v1/models", None)


@pytest.mark.parametrize("require_key", [None, False])
@pytest.mark.parametrize("value", [b"{", b'{"name": "alice"}', b'{"name": "alice", "scope": "root", "created": 1}'])
async def test_damaged_key_entry_grants_no_access(node: FakeNode, serve: ServeFn, value: bytes, require_key: bool | None) -> None:
    async with serve(require_key=require_key) as served:
        await until_listed(served, CARDS)
        bucket = await node.mesh.nc.jetstream().key_value(subjects.KEYS_BUCKET)
        await bucket.put(hash_key("sk-damaged"), value)
        await until(lambda: _closed(served))
        assert not await opens(served, "/v1/models", "sk-damaged")
        assert not await opens(served, "/admin/v1/keys", None)
        assert not await opens(served, "/admin/v1/keys", "sk-damaged")


async def test_endpoint_beyond_loopback_is_closed_without_keys(node: FakeNode, serve: ServeFn) -> None:
    async with serve(gateway_host="0.0.0.0") as served:
        assert not await opens(served, "/v1/models", None)
        for method, path in (("GET", "cluster"), ("GET", "keys"), ("POST", "keys"), ("POST", "models")):
            answer = await served.http.request(method, f"/admin/v1/{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
            assert "THAW_ADMIN_KEY" in answer.json()["error"]["message"]
    async with serve(gateway_host="0.0.0.0", require_key=False) as served:
        await until_listed(served, CARDS)
        assert await opens(served, "/v1/models", None)
        assert (await served.http.get("/admin/v1/keys")).status_code == 403
    async with serve(gateway_host="0.0.0.0", admin_key="root") as served:
        assert not await opens(served, "/v1/models", None)
        _, made = await thaw(served, "keys", "add", "alice")
        assert await opens(served, "/v1/models", made["key"])


async def test_published_address_decides_whether_a_container_is_beyond_loopback(node: FakeNode, serve: ServeFn) -> None:
    async with serve(gateway_host="0.0.0.0", published_address="127.0.0.1") as served:
        await until_listed(served, CARDS)
        assert await opens(served, "/v1/models", None)
    async with serve(gateway_host="127.0.0.1", published_address="0.0.0.0") as served:
        assert not await opens(served, "/v1/models", None)
        assert (await served.http.get("/admin/v1/keys")).status_code == 403


async def test_keys_removed_from_the_settings_leave_the_endpoint_closed(node: FakeNode, serve: ServeFn) -> None:
    async with serve(api_keys=hash_key("sk-listed")) as served:
        assert await opens(served, "/v1/models", "sk-listed")
    async with serve() as served:
        assert not await opens(served, "/v1/models", None)


async def test_require_key_without_keys_refuses_every_request(node: FakeNode, serve: ServeFn) -> None:
    async with serve(admin_key="root", require_key=True) as served:
        assert not await opens(served, "/v1/models", None)
        assert "every request is refused" in await output_of(served, "keys", "list")
        _, made = await thaw(served, "keys", "add", "alice")
        assert await opens(served, "/v1/models", made["key"])
        assert "every request is refused" in await output_of(served, "keys", "revoke", "alice")
        assert not await opens(served, "/v1/models", None)


async def _closed(served: Served) -> bool:
    return not await opens(served, "/v1/models", None)


async def test_open_admin_api_creates_no_admin_key(node: FakeNode, serve: ServeFn) -> None:
    """An open admin API creates no admin key.

    With an admin key of its own, a caller could have commands run on every node.
    """
    async with serve() as open_gateway:
        await until_listed(open_gateway, CARDS)
        body = {"name": "mallory", "scope": "admin", "sha256": hash_key("sk-mallory")}
        refused = await open_gateway.http.post("/admin/v1/keys", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert refused.json()["error"]["param"] == "scope"
        command = {"name": "own", "source": "engine://own", "engine": "openai", "memory": 1 << 30, "max_model_len": 128}
        spec = {"specs": [command | {"command": ["/bin/sh", "-c", "id"]}]}
        mallory = {"authorization": "Bearer sk-mallory"}
        assert (await open_gateway.http.post("/admin/v1/models", json=spec, headers=mallory)).status_code == 403
        assert not (await open_gateway.http.get("/admin/v1/keys")).json()["keys"]
        inference = body | {"scope": "inference", "name": "alice"}
        assert (await open_gateway.http.post("/admin/v1/keys", json=inference)).status_code == 200


async def test_admin_keys_are_separate(guarded: Served, serve: ServeFn) -> None:
    body = {"name": "ops", "scope": "admin", "sha256": hash_key("sk-ops")}
    assert (await guarded.http.post("/admin/v1/keys", json=body, headers=ADMIN)).status_code == 200
    assert await opens(guarded, "/admin/v1/keys", "sk-ops")
    assert await opens(guarded, "/v1/models", None)
    taken = await guarded.http.post("/admin/v1/keys", json=body | {"name": "other"}, headers={"authorization": "Bearer sk-ops"})
    assert (taken.status_code, taken.json()["error"]["param"]) == (409, "sha256")
    async with serve() as without_its_own:
        assert not await opens(without_its_own, "/admin/v1/keys", None)
        assert await opens(without_its_own, "/admin/v1/keys", "sk-ops")
        assert (await guarded.http.delete("/admin/v1/keys/ops", headers=ADMIN)).status_code == 200
        await until(lambda: _refuses(without_its_own, "sk-ops"))
        assert not await opens(without_its_own, "/admin/v1/keys", None)


async def _refuses(served: Served, key: str) -> bool:
    return not await opens(served, "/admin/v1/keys", key)


@pytest.mark.parametrize("fields", [{"name": "a b"}, {"sha256": "sk-raw"}, {"scope": "root"}, {"name": None}])
async def test_invalid_key_field_is_refused_by_name(guarded: Served, fields: dict[str, Any]) -> None:
    body = {"name": "bob", "sha256": hash_key("x")} | fields
    answer = await guarded.http.post("/admin/v1/keys", json=body, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


async def test_keys_outlive_a_restart_and_are_kept_as_hashes(
    guarded: Served, node: FakeNode, serve: ServeFn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    _, made = await thaw(guarded, "keys", "add", "carol")
    key = made["key"]
    bucket = await node.mesh.nc.jetstream().key_value(subjects.KEYS_BUCKET)
    stored = [(name, (await bucket.get(name)).value or b"") for name in await bucket.keys() if name != "existed.inference"]
    assert [name for name, _ in stored] == [hash_key(key)]
    assert all(key.encode() not in value for _, value in stored)
    refusals = [await guarded.http.post("/v1/chat/completions", json=chat(), headers={"authorization": f"Bearer {key}x"})]
    refusals.append(
        await guarded.http.post("/v1/chat/completions", json=chat("nobody"), headers={"authorization": f"Bearer {key}"})
    )
    assert [r.status_code for r in refusals] == [401, 404]
    assert all(key not in r.text for r in refusals)
    assert key not in caplog.text
    async with serve() as fresh:
        assert await opens(fresh, "/v1/models", key)
        assert not await opens(fresh, "/v1/models", None)


async def test_request_whose_key_is_revoked_while_it_is_received_is_refused(guarded: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    await add_key(guarded, "alice", "sk-alice")
    body = json.dumps(chat()).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-alice\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.settings.gateway_port)
    async with asyncio.timeout(60):
        writer.write(head.encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"), "its key is valid"
        assert (await guarded.http.delete("/admin/v1/keys/alice", headers=ADMIN)).status_code == 200
        writer.write(body)
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401"), answer
    assert engine.requests == []


async def test_claim_of_an_api_key_that_is_revoked_meanwhile_is_deleted(
    guarded: Served, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await node.engine("alpha")
    await add_key(guarded, "alice", "sk-alice")
    claim_or_get = IdempotencyStore.claim_or_get

    async def revoking(self: IdempotencyStore, key: str, new_entry: Entry) -> Claim | ExistingKey:
        place = await claim_or_get(self, key, new_entry)
        assert (await guarded.http.delete("/admin/v1/keys/alice", headers=ADMIN)).status_code == 200
        return place

    monkeypatch.setattr(IdempotencyStore, "claim_or_get", revoking)
    headers = {"authorization": "Bearer sk-alice", "idempotency-key": "k-1"}
    assert (await guarded.http.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 401
    assert engine.requests == []
    bucket = await node.mesh.nc.jetstream().key_value(subjects.IDEMPOTENCY_BUCKET)
    with pytest.raises(NoKeysError):
        await bucket.keys()
