"""Keys with a scope, models, an expiry and a rotation, on several gateways with real clients."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from services.gateway.authorization import hash_key
from shared.messaging.buckets import BucketWatcher
from tests.integration.gateway.api_keys import ADMIN, add_key, status_of
from tests.integration.gateway.clients import openai_client
from tests.integration.gateway.command_line import thaw
from tests.integration.gateway.conftest import CARDS, Served, chat, until
from tests.support.fake_engine import FakeNode, hang


async def _is(status: int, served: Served, key: str) -> bool:
    return await status_of(served, key) == status


async def test_read_only_key_sees_everything_and_changes_nothing(pair: tuple[Served, Served]) -> None:
    served, _ = pair
    await add_key(served, "dashboard", "sk-look", scope="read-only")
    assert await status_of(served, "sk-look") == 200
    for path in ("keys", "traces", "doctor"):
        assert await status_of(served, "sk-look", f"/admin/v1/{path}") == 200
    for method, path in (
        ("POST", "keys"),
        ("PUT", "keys/dashboard"),
        ("PATCH", "keys/dashboard"),
        ("DELETE", "keys/dashboard"),
        ("POST", "keys/dashboard/rotate"),
        ("GET", "key-log"),
        ("POST", "models"),
        ("DELETE", "models/alpha"),
        ("POST", "models/alpha/wake"),
        ("PATCH", "models/alpha/settings"),
        ("POST", "models/alpha/sleep"),
        ("POST", "models/alpha/pull"),
        ("DELETE", "models/alpha/pull"),
        ("POST", "nodes/n/drain"),
        ("POST", "nodes/n/cordon"),
        ("POST", "nodes/n/uncordon"),
        ("DELETE", "nodes/n"),
        ("POST", "migrations"),
    ):
        assert await status_of(served, "sk-look", f"/admin/v1/{path}", method) == 403, (method, path)
    assert await status_of(served, "sk-look", "/v1/chat/completions", "POST", **chat()) == 403
    assert await status_of(served, "sk-look", "/admin/v1/keys") == 200


async def test_models_that_a_key_may_not_use_do_not_exist_for_it(
    pair: tuple[Served, Served], node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused in the same words, after the same question to NATS."""
    questions, catch_up = 0, BucketWatcher.catch_up

    async def count(self: BucketWatcher, within_s: float) -> bool:
        nonlocal questions
        questions += 1
        return await catch_up(self, within_s)

    served, _ = pair
    await node.engine("alpha")
    await add_key(served, "team", "sk-team", models=["al*"])
    monkeypatch.setattr(BucketWatcher, "catch_up", count)
    async with openai_client(served, "sk-team") as client:
        assert [m.id for m in (await client.models.list()).data] == ["alpha"]
        answered = await client.chat.completions.create(model="a", messages=[{"role": "user", "content": "Hi"}])
        assert answered.choices[0].message.content
        assert questions == 0
        refused, asked_for = [], []
        for name in ("beta", "missing"):
            before = questions
            with pytest.raises(openai.NotFoundError) as listed:
                await client.models.retrieve(name)
            with pytest.raises(openai.NotFoundError) as asked:
                await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
            refused.append([str(e.value).replace(name, "NAME") for e in (listed, asked)])
            asked_for.append(questions - before)
        assert refused[0] == refused[1]
        assert asked_for == [2, 2]


async def test_changes_take_effect_on_every_gateway_and_are_logged(pair: tuple[Served, Served]) -> None:
    one, two = pair
    status, made = await thaw(one, "keys", "add", "ci", "--models", "beta", "--rpm", "5", "--expires", "30d")
    assert (status, made["models"], made["requests_per_minute"]) == (0, ["beta"], 5)
    assert made["expires"] > time.time() + 29 * 86_400
    await until(lambda: _is(200, two, made["key"]))
    status, changed = await thaw(two, "keys", "change", "ci", "--models", "*", "--rpm", "0")
    assert (status, changed["models"], changed["requests_per_minute"], changed["expires"]) == (0, [], None, made["expires"])
    headers = {"authorization": f"Bearer {made['key']}"}

    async def sees_all() -> bool:
        return len((await one.http.get("/v1/models", headers=headers)).json()["data"]) == len(CARDS)

    await until(sees_all)
    assert (await thaw(two, "keys", "revoke", "ci"))[0] == 0
    await until(lambda: _is(401, one, made["key"]))
    entries = (await thaw(one, "keys", "log"))[1]["entries"]
    assert [(e["action"], e["key"], e["actor"]) for e in entries] == [
        (action, "ci", "THAW_ADMIN_KEY") for action in ("revoke", "change", "add")
    ]
    assert entries[1]["details"] == {"models": [], "requests_per_minute": None}


async def test_rotated_key_is_valid_with_its_successor_until_the_overlap_ends(pair: tuple[Served, Served]) -> None:
    one, two = pair
    await add_key(one, "alice", "sk-old", models=["alpha"])
    await until(lambda: _is(200, two, "sk-old"))
    _, made = await thaw(two, "keys", "rotate", "alice", "--overlap", "1h")
    assert made["models"] == ["alpha"]
    await until(lambda: _is(200, one, made["key"]))
    assert await status_of(one, "sk-old") == 200
    again = await thaw(two, "keys", "rotate", "alice")
    assert (again[0], again[1]["error"]["code"]) == (1, "conflict")
    listed = (await thaw(two, "keys", "list"))[1]["keys"]
    assert [k["name"] for k in listed] == ["alice", "alice"]
    assert sorted(k["expires"] is None for k in listed) == [False, True]
    assert (await thaw(one, "keys", "revoke", "alice"))[0] == 0
    await until(lambda: _is(401, two, "sk-old"))
    await until(lambda: _is(401, two, made["key"]))


async def test_expired_key_is_refused_with_the_reason(pair: tuple[Served, Served]) -> None:
    served, _ = pair
    await add_key(served, "temporary", "sk-temporary", expires=int(time.time()) - 1)
    async with openai_client(served, "sk-temporary") as client:
        with pytest.raises(openai.AuthenticationError, match="temporary has expired"):
            await client.models.list()


async def test_revoking_a_key_ends_its_streams_and_no_others(pair: tuple[Served, Served], node: FakeNode) -> None:
    one, two = pair
    engine = await node.engine("alpha", hang)
    await add_key(one, "alice", "sk-alice")
    await add_key(one, "bob", "sk-bob")
    await until(lambda: _is(200, two, "sk-alice"))
    await until(lambda: _is(200, two, "sk-bob"))
    async with openai_client(two, "sk-alice") as alice, openai_client(two, "sk-bob") as bob:
        ask: dict[str, Any] = {"model": "alpha", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        running = [await client.chat.completions.create(**ask) for client in (alice, bob)]
        for stream in running:
            while not (await anext(stream)).choices[0].delta.content:
                pass
        assert (await thaw(one, "keys", "revoke", "alice"))[0] == 0
        with pytest.raises(openai.APIError, match="revoked") as ended:
            await asyncio.wait_for(anext(running[0]), 60)
        assert ended.value.code == "invalid_api_key"
        await engine.until(lambda: len(engine.cancelled) == 1)
        assert await status_of(two, "sk-bob") == 200
        await running[1].close()


async def test_key_of_a_file_is_added_changed_and_replaced_by_one_request(pair: tuple[Served, Served]) -> None:
    served, _ = pair

    async def put(key: str, **fields: Any) -> int:
        body = {"name": "declared", "sha256": hash_key(key)} | fields
        return (await served.http.put("/admin/v1/keys/declared", json=body, headers=ADMIN)).status_code

    assert [await put("sk-one"), await put("sk-one"), await put("sk-one", models=["alpha"])] == [200, 200, 200]
    assert await status_of(served, "sk-one") == 200
    assert await put("sk-two", models=["alpha"]) == 200
    assert [await status_of(served, key) for key in ("sk-one", "sk-two")] == [401, 200]
    entries = (await thaw(served, "keys", "log"))[1]["entries"]
    assert [e["action"] for e in entries] == ["rotate", "change", "add"]


async def test_unknown_limit_is_refused(pair: tuple[Served, Served]) -> None:
    served, _ = pair
    body = {"name": "typo", "sha256": hash_key("x"), "request_per_minute": 5}
    answer = await served.http.post("/admin/v1/keys", json=body, headers=ADMIN)
    assert answer.status_code == 400
    assert "request_per_minute" in answer.json()["error"]["message"]


async def test_revocation_wins_over_a_change_on_another_gateway(pair: tuple[Served, Served]) -> None:
    one, two = pair
    await add_key(one, "alice", "sk-alice")
    await until(lambda: _is(200, two, "sk-alice"))
    changes = [
        (two if i % 2 else one).http.patch("/admin/v1/keys/alice", json={"requests_per_minute": 5 + i}, headers=ADMIN)
        for i in range(8)
    ]
    answers = await asyncio.gather(*changes, one.http.delete("/admin/v1/keys/alice", headers=ADMIN))
    assert answers[-1].status_code == 200
    await until(lambda: _is(401, two, "sk-alice"))
    assert await status_of(one, "sk-alice") == 401
