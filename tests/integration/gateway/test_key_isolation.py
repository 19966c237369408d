"""API keys are separate from each other; their changes are logged and applied from files."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats.js.errors import KeyNotFoundError
from rich.console import Console

from services.gateway import authorization
from services.gateway.adapters import key_writer
from services.gateway.authorization import hash_key
from shared.contracts import subjects
from shared.contracts.keys import NewKey
from tests.integration.gateway.api_keys import ADMIN, add_key, status_of
from tests.integration.gateway.command_line import thaw
from tests.integration.gateway.conftest import Served, chat
from tests.support.fake_engine import FakeNode
from thaw.cli.api import Api
from thaw.cli.apply import apply_keys
from thaw.launcher.home import Home

URL = "/v1/chat/completions"


async def test_one_idempotency_key_of_two_api_keys_gives_two_answers(guarded: Served, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    answers = []
    for name in ("alice", "bob"):
        await add_key(guarded, name, f"sk-{name}")
    for name in ("alice", "bob", "alice"):
        headers = {"authorization": f"Bearer sk-{name}", "idempotency-key": "k-1"}
        answers.append(await guarded.http.post(URL, json=chat(), headers=headers))
    assert [a.status_code for a in answers] == [200] * 3
    alice, bob, again = (a.json() for a in answers)
    assert alice["id"] != bob["id"]
    assert again == alice
    assert ["idempotent-replayed" in a.headers for a in answers] == [False, False, True]
    assert len(engine.requests) == 2


async def test_an_inference_key_reads_no_traces(guarded: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    await add_key(guarded, "alice", "sk-alice")
    await add_key(guarded, "dashboard", "sk-look", scope="read-only")
    answer = await guarded.http.post(URL, json=chat(), headers={"authorization": "Bearer sk-alice"})
    request_id = answer.headers["x-request-id"]
    for path in ("traces", "traces/last", f"traces/{request_id}", "traces/loads/p-1"):
        assert await status_of(guarded, "sk-alice", f"/admin/v1/{path}") == 401, path
        assert await status_of(guarded, "sk-look", f"/admin/v1/{path}") in (200, 404), path


async def test_the_old_key_of_a_rotation_is_refused_when_the_overlap_has_ended(
    guarded: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_key(guarded, "alice", "sk-old")
    body = {"sha256": hash_key("sk-new"), "overlap_s": 3600}
    begun = time.time()
    assert (await guarded.http.post("/admin/v1/keys/alice/rotate", json=body, headers=ADMIN)).status_code == 200
    ended = time.time()
    for now, statuses in ((begun + 3598, [200, 200]), (ended + 3601, [401, 200])):
        monkeypatch.setattr(authorization, "time", SimpleNamespace(time=lambda now=now: now))
        assert [await status_of(guarded, key) for key in ("sk-old", "sk-new")] == statuses
    answer = await guarded.http.get("/v1/models", headers={"authorization": "Bearer sk-old"})
    assert "alice has expired" in answer.json()["error"]["message"]
    # The key can be rotated again, and its expired predecessor is deleted.
    clock = SimpleNamespace(time=lambda: ended + 3601, monotonic=time.monotonic)
    monkeypatch.setattr(key_writer, "time", clock)
    body = {"sha256": hash_key("sk-newer"), "overlap_s": 60}
    assert (await guarded.http.post("/admin/v1/keys/alice/rotate", json=body, headers=ADMIN)).status_code == 200
    assert [await status_of(guarded, key) for key in ("sk-new", "sk-newer")] == [200, 200]
    listed = (await guarded.http.get("/admin/v1/keys", headers=ADMIN)).json()["keys"]
    assert sorted(key["expires"] is None for key in listed) == [False, True]


async def test_a_change_of_the_expiry_during_a_rotation_is_the_new_keys_and_prolongs_no_overlap(guarded: Served) -> None:
    day = int(time.time()) + 24 * 3600
    await add_key(guarded, "alice", "sk-old", expires=day)
    body = {"sha256": hash_key("sk-new"), "overlap_s": 3600}
    assert (await guarded.http.post("/admin/v1/keys/alice/rotate", json=body, headers=ADMIN)).status_code == 200
    soon = int(time.time()) + 600

    async def expiries(change: int | None) -> list[int | None]:
        """Change the expiry; return those of the old and the new key, which is the later."""
        answer = await guarded.http.patch("/admin/v1/keys/alice", json={"expires": change}, headers=ADMIN)
        assert answer.json()["expires"] == change
        keys = (await guarded.http.get("/admin/v1/keys", headers=ADMIN)).json()["keys"]
        return sorted((key["expires"] for key in keys), key=lambda at: (at is None, at or 0))

    overlap_end, changed = await expiries(day + 1)
    assert changed == day + 1
    assert overlap_end is not None
    assert overlap_end < day
    assert await expiries(None) == [overlap_end, None]
    assert await expiries(soon) == [soon, soon]
    assert await expiries(day) == [soon, day]


async def test_a_change_that_cannot_be_logged_is_refused_but_a_revocation_is_made(guarded: Served, node: FakeNode) -> None:
    begun = time.time()
    await add_key(guarded, "alice", "sk-alice", requests_per_minute=1000)
    (entry,) = (await thaw(guarded, "keys", "log"))[1]["entries"]
    assert begun <= entry["at"] <= time.time()
    assert (entry["action"], entry["key"], entry["address"]) == ("add", "alice", "127.0.0.1")
    # Another stream takes the subject of the log, so the log's own stream cannot be made again.
    js = node.mesh.nc.jetstream()
    await js.delete_stream(subjects.AUDIT_STREAM)
    await js.add_stream(name="taken", subjects=[subjects.AUDIT_KEYS])
    refused = [
        await guarded.http.post("/admin/v1/keys", json={"name": "bob", "sha256": hash_key("sk-bob")}, headers=ADMIN),
        await guarded.http.patch("/admin/v1/keys/alice", json={"requests_per_minute": 5}, headers=ADMIN),
        await guarded.http.post("/admin/v1/keys/alice/rotate", json={"sha256": hash_key("sk-new")}, headers=ADMIN),
    ]
    assert [a.status_code for a in refused] == [503] * 3
    assert [await status_of(guarded, key) for key in ("sk-alice", "sk-bob", "sk-new")] == [200, 401, 401]
    (key,) = (await guarded.http.get("/admin/v1/keys", headers=ADMIN)).json()["keys"]
    assert (key["name"], key["requests_per_minute"]) == ("alice", 1000)
    assert (await guarded.http.delete("/admin/v1/keys/alice", headers=ADMIN)).status_code == 200
    assert await status_of(guarded, "sk-alice") == 401
    bucket = await js.key_value(subjects.KEYS_BUCKET)
    with pytest.raises(KeyNotFoundError):
        await bucket.get(hash_key("sk-alice"))


def declared(name: str, key: str, **limits: Any) -> NewKey:
    return NewKey(name=name, sha256=hash_key(key), **limits)


async def test_keys_of_a_file_are_added_changed_and_revoked_when_they_leave_it(guarded: Served, tmp_path: Path) -> None:
    home, api, out = Home(tmp_path / "mesh"), Api(guarded.base, "root"), io.StringIO()
    home.root.mkdir()
    await add_key(guarded, "by-hand", "sk-hand")

    async def apply(*keys: NewKey) -> dict[str, int | None]:
        await asyncio.to_thread(apply_keys, api, home, keys, Console(file=out))
        listed = (await guarded.http.get("/admin/v1/keys", headers=ADMIN)).json()["keys"]
        return {key["name"]: key["requests_per_minute"] for key in listed}

    assert await apply() == {"by-hand": None}
    assert await apply(declared("ci", "sk-ci", requests_per_minute=60), declared("team", "sk-team")) == {
        "by-hand": None,
        "ci": 60,
        "team": None,
    }
    assert "API keys of the file: 2" in out.getvalue()
    assert await apply(declared("ci", "sk-ci", requests_per_minute=90), declared("team", "sk-other")) == {
        "by-hand": None,
        "ci": 90,
        "team": None,
    }
    assert [await status_of(guarded, key) for key in ("sk-ci", "sk-team", "sk-other")] == [200, 401, 200]
    # A key of the file that was revoked by hand may leave the file as well.
    assert (await guarded.http.delete("/admin/v1/keys/team", headers=ADMIN)).status_code == 200
    assert await apply() == {"by-hand": None}
    assert [await status_of(guarded, key) for key in ("sk-ci", "sk-hand")] == [401, 200]
    actions = [(e["action"], e["key"]) for e in (await thaw(guarded, "keys", "log"))[1]["entries"]]
    assert actions == [
        ("revoke", "ci"),
        ("revoke", "team"),
        ("rotate", "team"),
        ("change", "ci"),
        ("add", "team"),
        ("add", "ci"),
        ("add", "by-hand"),
    ]
