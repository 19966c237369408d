"""API keys that are added and revoked while gateways run, and the command line that does it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.access import hash_key
from shared.contracts import subjects
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode

ADMIN = {"authorization": "Bearer root"}


@pytest.fixture
async def guarded(node: FakeNode, serve: ServeFn) -> AsyncIterator[Served]:
    async with serve(admin_key="root") as served:
        await until_listed(served, CARDS)
        yield served


async def thaw(served: Served, *arguments: str) -> tuple[int | None, Any]:
    """Run the command line against a gateway; its status and its document."""
    status, out = await _run(served, *arguments, "--json")
    return status, json.loads(out)


async def said(served: Served, *arguments: str) -> str:
    """What the command line tells a person, in one line."""
    return " ".join((await _run(served, *arguments))[1].split())


async def _run(served: Served, *arguments: str) -> tuple[int | None, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THAW_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "thaw.cli.app",
        *arguments,
        env=environment | {"THAW_URL": served.base, "THAW_ADMIN_KEY": "root"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()


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
        assert await opens(guarded, "/v1/models", None)
        assert (await thaw(guarded, "keys", "revoke", "alice"))[1]["error"]["code"] == "not_found"


async def test_revoking_the_last_key_says_that_the_endpoint_is_open(guarded: Served) -> None:
    assert [(await thaw(guarded, "keys", "add", name))[0] for name in ("alice", "bob")] == [0, 0]
    assert "whoever reaches" not in await said(guarded, "keys", "revoke", "alice")
    assert "whoever reaches" in await said(guarded, "keys", "revoke", "bob")


async def test_an_endpoint_that_requires_keys_is_closed_without_any(node: FakeNode, serve: ServeFn) -> None:
    async with serve(admin_key="root", require_key=True) as served:
        assert not await opens(served, "/v1/models", None)
        assert "whoever reaches" not in await said(served, "keys", "list")
        _, made = await thaw(served, "keys", "add", "alice")
        assert await opens(served, "/v1/models", made["key"])
        assert "whoever reaches" not in await said(served, "keys", "revoke", "alice")
        assert not await opens(served, "/v1/models", None)


async def _closed(served: Served) -> bool:
    return not await opens(served, "/v1/models", None)


async def test_admin_keys_are_separate(node: FakeNode, serve: ServeFn) -> None:
    async with serve() as open_gateway:
        await until_listed(open_gateway, CARDS)
        assert await opens(open_gateway, "/admin/v1/keys", None)
        body = {"name": "ops", "scope": "admin", "sha256": hash_key("sk-ops")}
        assert (await open_gateway.http.post("/admin/v1/keys", json=body)).status_code == 200
        assert not await opens(open_gateway, "/admin/v1/keys", None)
        assert await opens(open_gateway, "/admin/v1/keys", "sk-ops")
        assert await opens(open_gateway, "/v1/models", None)
        taken = await open_gateway.http.post(
            "/admin/v1/keys", json=body | {"name": "other"}, headers={"authorization": "Bearer sk-ops"}
        )
        assert (taken.status_code, taken.json()["error"]["param"]) == (409, "sha256")


@pytest.mark.parametrize("fields", [{"name": "a b"}, {"sha256": "sk-raw"}, {"scope": "root"}, {"name": None}])
async def test_what_is_no_key_is_refused_by_name(guarded: Served, fields: dict[str, Any]) -> None:
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
    stored = [(name, (await bucket.get(name)).value or b"") for name in await bucket.keys()]
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
