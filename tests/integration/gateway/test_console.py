"""The console's routes: sessions, protection against other sites, live views, HTML in names."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
import pytest
from playwright.async_api import async_playwright

from services.gateway import authorization
from services.gateway.authorization import hash_key
from services.gateway.domain.console_session import SESSION_S
from services.gateway.domain.console_view import View, cluster_view
from services.gateway.domain.login_limit import PER_CLIENT, WINDOW_S
from services.gateway.http.console import endpoints, feed, sources
from shared.contracts import subjects
from shared.contracts.admin import (
    AddModels,
    ClusterView,
    ModelView,
    NodeView,
)
from shared.contracts.findings import Diagnosis
from shared.contracts.node import DeviceStatus, InstanceMemory, InstanceState, InstanceStatus
from shared.contracts.traces import TracePage
from shared.messaging.streams import ensure_trace_stream
from tests.integration.gateway.conftest import CARDS, Scheduler, Served, ServeFn, chat, until
from tests.support.browser import needs_chromium, open_page
from tests.support.fake_engine import FakeNode, card_of

CONSOLE = {"x-thaw-console": "1"}
NO_ACCESS = {"view": False, "change": False, "inference": False, "key": False, "guarded": False}
"""A session without rights at a gateway that needs no key."""
ROOT_KEY, USER_KEY = "root-key", "user-key"
BEARER = {"authorization": f"Bearer {ROOT_KEY}"}
HTML = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
async def guarded(node: FakeNode, scheduler: Scheduler, serve: ServeFn) -> AsyncIterator[Served]:
    async with serve(admin_key=ROOT_KEY, api_keys=hash_key(USER_KEY)) as served:
        await until_listed_with(served, USER_KEY)
        yield served


async def until_listed_with(served: Served, key: str) -> None:
    """Wait until the gateway has read every card.

    Args:
        served: The gateway.
        key: An API key that may list models.
    """

    async def listed() -> bool:
        answer = await served.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        return len(answer.json().get("data", ())) >= len(CARDS)

    await until(listed)


async def log_in(served: Served, key: str) -> httpx.Response:
    return await served.http.post("/ui/login", json={"key": key}, headers=CONSOLE)


async def add_key(served: Served, name: str, scope: str, key: str) -> None:
    body = {"name": name, "scope": scope, "sha256": hash_key(key)}
    assert (await served.http.post("/admin/v1/keys", json=body, headers=BEARER)).status_code == 200


async def test_a_session_is_a_strict_cookie_of_the_console_alone(guarded: Served) -> None:
    assert (await guarded.http.get("/ui/session")).json() == NO_ACCESS | {"guarded": True}
    assert (await log_in(guarded, "wrong")).status_code == 401
    answer = await log_in(guarded, ROOT_KEY)
    cookie = answer.headers["set-cookie"]
    assert {"httponly", "path=/ui", "samesite=strict"} <= {part.strip().lower() for part in cookie.split(";")}
    assert ROOT_KEY not in cookie
    assert (await guarded.http.get("/ui/session")).json()["change"]
    assert (await guarded.http.get("/ui/api/admin/v1/cluster")).status_code == 200
    # The cookie itself, sent to other paths, grants nothing there.
    header = {"cookie": cookie.split(";")[0]}
    assert (await guarded.http.get("/admin/v1/cluster", headers=header)).status_code == 401
    assert (await guarded.http.get("/v1/models", headers=header)).status_code == 401
    # A key in the headers does not count in the console.
    guarded.http.cookies.clear()
    assert (await guarded.http.get("/ui/api/admin/v1/cluster", headers=BEARER)).status_code == 401


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_cookie_is_secure_where_a_proxy_terminates_tls(guarded: Served, scheme: str) -> None:
    origin = f"{scheme}://{guarded.base.partition('://')[2]}"
    for path, body in (("login", {"key": ROOT_KEY}), ("logout", {})):
        answer = await guarded.http.post(f"/ui/{path}", json=body, headers=CONSOLE | {"origin": origin})
        parts = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")}
        assert ("secure" in parts) == (scheme == "https")


@pytest.mark.parametrize("other", ['state={"tab": 1}', "user@host=1", "without a value", "thaw_console=forged"])
async def test_cookies_of_other_programs_do_not_end_a_session(guarded: Served, other: str) -> None:
    """All programs of a machine that browsers know as localhost share their cookies."""
    cookie = (await log_in(guarded, ROOT_KEY)).headers["set-cookie"].split(";")[0]
    guarded.http.cookies.clear()
    session = await guarded.http.get("/ui/session", headers={"cookie": f"{other}; {cookie}"})
    assert session.json()["change"]


async def test_changes_need_the_header_and_the_same_origin(guarded: Served, scheduler: Scheduler) -> None:
    assert (await guarded.http.post("/ui/login", json={"key": ROOT_KEY})).status_code == 403
    await log_in(guarded, ROOT_KEY)
    url = "/ui/api/admin/v1/nodes/node-0/drain"
    for headers in (
        {},
        CONSOLE | {"origin": "https://evil.example"},
        CONSOLE | {"sec-fetch-site": "cross-site"},
        CONSOLE | {"origin": guarded.base, "sec-fetch-site": "same-site"},
    ):
        assert (await guarded.http.post(url, headers=headers)).status_code == 403, headers
    assert scheduler.asked == []
    assert (await guarded.http.post(url, headers=CONSOLE | {"origin": guarded.base})).status_code == 200
    assert [request.kind for request in scheduler.asked] == ["change_node"]


async def test_an_inference_key_opens_the_playground_only(guarded: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    await log_in(guarded, USER_KEY)
    session = (await guarded.http.get("/ui/session")).json()
    assert session == NO_ACCESS | {"inference": True, "key": True, "guarded": True}
    answer = await guarded.http.post("/ui/api/v1/chat/completions", json=chat(), headers=CONSOLE)
    assert answer.status_code == 200
    for path in ("/ui/events", "/ui/api/admin/v1/cluster", "/ui/api/admin/v1/traces/last"):
        assert (await guarded.http.get(path)).status_code == 401, path


async def test_a_read_only_key_sees_and_changes_nothing(guarded: Served, scheduler: Scheduler) -> None:
    await add_key(guarded, "viewer", "read-only", "view-key")
    await log_in(guarded, "view-key")
    assert (await guarded.http.get("/ui/session")).json() == NO_ACCESS | {"view": True, "key": True, "guarded": True}
    assert (await guarded.http.get("/ui/api/admin/v1/cluster")).status_code == 200
    settings = await guarded.http.get("/ui/api/admin/v1/models/alpha/settings")
    assert settings.json()["yaml"].startswith("models:\n- name: alpha\n")
    assert (await guarded.http.get("/ui/api/admin/v1/models/none/settings")).status_code == 404
    for path in ("nodes/node-0/drain", "models/alpha/sleep", "keys"):
        assert (await guarded.http.post(f"/ui/api/admin/v1/{path}", json={}, headers=CONSOLE)).status_code == 403, path


async def test_traces_of_a_newer_version_are_left_out(node: FakeNode, serve: ServeFn) -> None:
    async with serve() as served:
        await node.engine("alpha")
        js = node.mesh.nc.jetstream()
        await ensure_trace_stream(js, 1)
        newer = {"request_id": "newer", "model": "alpha", "endpoint": "chat", "received": 1.0, "status": "of a newer version"}
        await js.publish(subjects.request_trace("newer"), json.dumps(newer).encode())
        request_id = (await served.http.post("/v1/chat/completions", json=chat())).headers["x-request-id"]

        async def stored() -> bool:
            return (await served.http.get(f"/admin/v1/traces/{request_id}")).status_code == 200

        await until(stored)
        page = TracePage.model_validate((await served.http.get("/admin/v1/traces")).json())
        assert [t.request_id for t in page.traces] == [request_id]
        async with served.http.stream("GET", "/ui/events?topics=requests") as events:
            view = await anext(line async for line in events.aiter_lines() if line.startswith("data:"))
    assert list(json.loads(view.removeprefix("data:"))["view"]["requests"]) == [request_id]


async def test_doctor_reports_parts_that_do_not_answer_as_findings(
    guarded: Served, node: FakeNode, scheduler: Scheduler, serve: ServeFn
) -> None:
    card = card_of("alpha", source="https://user:secret@example.org/m?token=secret")
    failed = ModelView(card=card, error="The engine ended; the end of its log:\nsecret of a prompt")
    scheduler.view = ClusterView(scheduler="s", epoch=7, models=(failed,), nodes=(NodeView(node="n", alive=False),))
    await add_key(guarded, "viewer", "read-only", "view-key")
    await log_in(guarded, "view-key")
    answer = await guarded.http.get("/ui/api/admin/v1/doctor")
    diagnosis = Diagnosis.model_validate(answer.json())
    levels = [(f.subject, f.level) for f in diagnosis.findings]
    parts = [("gateway", "ok"), ("scheduler", "ok"), ("node", "fail"), ("model", "fail"), ("keys", "ok"), ("admin key", "ok")]
    assert (levels, diagnosis.ok) == (parts, False)
    assert "secret" not in answer.text
    assert all(f.remedy and f.meaning for f in diagnosis.findings if f.level == "fail")


async def test_settings_are_changed_by_an_admin_key_alone_and_not_over_a_newer_change(
    guarded: Served, scheduler: Scheduler
) -> None:
    await add_key(guarded, "viewer", "read-only", "view-key")
    path = "/ui/api/admin/v1/models/alpha/settings"
    await log_in(guarded, "view-key")
    assert (await guarded.http.patch(path, json={"settings": {}}, headers=CONSOLE)).status_code == 403
    await log_in(guarded, ROOT_KEY)
    assert (await guarded.http.patch(path, json={"settings": {}})).status_code == 403
    assert scheduler.asked == []
    scheduler.view = ClusterView(scheduler="s", epoch=1, models=(ModelView(card=card_of("alpha", priority=1)),))
    shown = (await guarded.http.patch(path, json={"settings": {"pin": True}, "dry_run": True}, headers=CONSOLE)).json()
    assert shown["changes"] == [{"setting": "pin", "before": False, "after": True}]
    assert {request.kind for request in scheduler.asked} == {"view"}
    for settings in ({"priority": 101}, {"source": "/other"}, {"no_such": 1}):
        assert (await guarded.http.patch(path, json={"settings": settings}, headers=CONSOLE)).status_code == 400, settings
    order = {"settings": {"pin": True}, "version": shown["version"]}
    scheduler.view = ClusterView(scheduler="s", epoch=1, models=(ModelView(card=card_of("alpha", priority=2)),))
    assert (await guarded.http.patch(path, json=order, headers=CONSOLE)).status_code == 409
    assert {request.kind for request in scheduler.asked} == {"view"}
    assert (await guarded.http.patch(path, json=order | {"version": None}, headers=CONSOLE)).status_code == 200
    added = scheduler.asked[-1]
    assert isinstance(added, AddModels)
    assert [(spec.name, spec.pin, spec.priority) for spec in added.specs] == [("alpha", True, 2)]
    assert added.before == (card_of("alpha", priority=2).spec,), "the scheduler refuses it after another change"


async def test_doctor_finds_that_no_scheduler_leads(serve: ServeFn, node: FakeNode) -> None:
    async with serve() as served:
        await until_listed_with(served, "none")
        diagnosis = Diagnosis.model_validate((await served.http.get("/admin/v1/doctor")).json())
    found = {f.subject: f for f in diagnosis.findings}
    assert (diagnosis.ok, found["scheduler"].level, found["admin key"].level) == (False, "fail", "warn")
    assert "thaw logs scheduler" in found["scheduler"].remedy


async def test_a_revoked_key_ends_its_sessions_and_a_restart_does_not(
    node: FakeNode, scheduler: Scheduler, serve: ServeFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_KEEP_ALIVE_S", 0.1)
    async with serve(admin_key=ROOT_KEY) as first:
        await add_key(first, "ops", "admin", "ops-key")
        cookie = {"cookie": (await log_in(first, "ops-key")).headers["set-cookie"].split(";")[0]}
    async with serve(admin_key=ROOT_KEY) as second:
        assert (await second.http.get("/ui/session", headers=cookie)).json()["change"]
        async with second.http.stream("GET", "/ui/events", headers=cookie) as stream:
            lines = stream.aiter_lines()
            assert await _next_event(lines) == "event: cluster"
            assert (await second.http.delete("/admin/v1/keys/ops", headers=BEARER)).status_code == 200
            async with asyncio.timeout(60):
                assert [line async for line in lines if line.startswith("event")] == []
        session = (await second.http.get("/ui/session", headers=cookie)).json()
        assert (session["view"], session["key"]) == (False, False), "the page asks for another key"
        assert (await second.http.get("/ui/api/admin/v1/cluster", headers=cookie)).status_code == 401


async def test_failed_logins_are_limited(guarded: Served) -> None:
    statuses = [(await log_in(guarded, f"wrong-{n}")).status_code for n in range(PER_CLIENT)]
    assert statuses == [401] * PER_CLIENT
    refused = await log_in(guarded, ROOT_KEY)  # a correct key shows nothing
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(refused.headers["retry-after"]) <= WINDOW_S
    assert (await guarded.http.get("/admin/v1/cluster", headers=BEARER)).status_code == 200


async def test_a_logout_ends_the_session_on_every_gateway(pair: tuple[Served, Served]) -> None:
    one, two = pair
    copied, kept = [(await log_in(one, "root")).headers["set-cookie"].split(";")[0] for _ in range(2)]
    one.http.cookies.clear()

    async def is_open(served: Served, cookie: str) -> bool:
        return bool((await served.http.get("/ui/session", headers={"cookie": cookie})).json()["change"])

    assert [await is_open(served, copied) for served in pair] == [True, True]
    for _ in range(2):
        assert (await one.http.post("/ui/logout", headers=CONSOLE | {"cookie": copied})).status_code == 200
    assert not await is_open(one, copied)

    async def has_ended() -> bool:
        return not await is_open(two, copied)

    await until(has_ended)
    assert [await is_open(served, kept) for served in pair] == [True, True]


async def test_a_session_whose_key_has_expired_has_no_key(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"name": "guest", "scope": "read-only", "sha256": hash_key("guest-key"), "expires": int(time.time()) + 3600}
    assert (await guarded.http.post("/admin/v1/keys", json=body, headers=BEARER)).status_code == 200
    await log_in(guarded, "guest-key")
    assert (await guarded.http.get("/ui/session")).json()["key"]
    now = time.time()
    monkeypatch.setattr(authorization, "time", SimpleNamespace(time=lambda: now + 7200, monotonic=time.monotonic))
    answer = await guarded.http.get("/ui/session")
    assert (answer.status_code, answer.json()) == (200, NO_ACCESS | {"guarded": True})


async def test_a_stream_ends_with_its_session(guarded: Served, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_KEEP_ALIVE_S", 0.1)
    await log_in(guarded, ROOT_KEY)
    async with guarded.http.stream("GET", "/ui/events") as stream:
        lines = stream.aiter_lines()
        assert await _next_event(lines) == "event: cluster"
        hours_later = time.time() + SESSION_S
        monkeypatch.setattr(endpoints, "time", SimpleNamespace(time=lambda: hours_later))
        async with asyncio.timeout(60):
            assert [line async for line in lines if line.startswith("event")] == []


async def _next_event(lines: AsyncIterator[str]) -> str:
    return await anext(line async for line in lines if line.startswith("event"))


async def test_a_gateway_on_loopback_without_admin_keys_needs_no_login(
    node: FakeNode, scheduler: Scheduler, serve: ServeFn
) -> None:
    async with serve(jaeger_url="http://jaeger:16686") as served:
        session = (await served.http.get("/ui/session")).json()
        assert session == NO_ACCESS | {"view": True, "change": True, "inference": True, "jaeger": "http://jaeger:16686"}
        assert (await served.http.get("/ui/api/admin/v1/cluster")).status_code == 200
        assert (await served.http.get("/ui", headers={"host": "evil.example"})).status_code == 403
        assert (await served.http.post("/ui/api/admin/v1/nodes/n/drain")).status_code == 403


async def test_page_is_served_with_a_strict_policy(guarded: Served) -> None:
    answer = await guarded.http.get("/ui")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert (await guarded.http.get("/ui/assets/none.js")).status_code == 404
    assert (await guarded.http.get("/ui/")).headers["location"] == "/ui"


def view_with_html(count: int) -> ClusterView:
    """Return a cluster of `count` models in which every free text is HTML."""
    models = tuple(ModelView(card=card_of(f"model-{n:03}"), error=HTML, waiting=n == 0) for n in range(count))
    instance = InstanceStatus(
        instance_id=HTML, plan_id=HTML, token=1, model=HTML, generation=1, revision="", device_ids=(HTML,),
        state=InstanceState.READY, memory=InstanceMemory(weights=2**28, kv=2**27, reserved=2**29),
    )  # fmt: skip
    device = DeviceStatus(device_id=HTML, kind="cpu", name=HTML, budget_bytes=2**30, reserved_bytes=2**29)
    nodes = NodeView(node=HTML, alive=True, labels={HTML: HTML}, devices=(device,), instances=(instance,))
    return ClusterView(scheduler=HTML, epoch=1, models=models, nodes=(nodes,))


async def test_live_views_send_only_what_changed(guarded: Served, scheduler: Scheduler) -> None:
    scheduler.view = view_with_html(500)
    await log_in(guarded, ROOT_KEY)
    async with guarded.http.stream("GET", "/ui/events?topics=cluster") as stream:
        events = (json.loads(line.removeprefix("data: ")) async for line in stream.aiter_lines() if line.startswith("data: "))
        async with asyncio.timeout(60):
            whole = await anext(events)
            assert len(whole["view"]["models"]) == 500
            scheduler.view = scheduler.view.model_copy(update={"epoch": 2})
            changed = await anext(events)
    assert changed["changes"] == {"cluster": {"scheduler": {"id": HTML, "epoch": 2}}}
    asked = len(scheduler.asked)
    assert (await guarded.http.get("/ui/session")).status_code == 200
    assert len(scheduler.asked) - asked <= 1, "after the last page is closed, only a read that had begun may end"


@needs_chromium
async def test_browser_shows_500_models_and_html_in_names_as_text(
    guarded: Served, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_html_name(cluster: ClusterView) -> View:
        """Give a model a name of HTML, which the contracts do not allow."""
        view = cluster_view(cluster)
        view["models"][HTML] = view["models"].pop("model-000")
        return view

    scheduler.view = view_with_html(500)
    monkeypatch.setattr(sources, "cluster_view", with_html_name)
    faults: list[str] = []
    async with async_playwright() as playwright:
        browser, page = await open_page(playwright)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: faults.append(request.url) if not request.url.startswith(guarded.base) else None)
        await page.goto(f"{guarded.base}/ui")
        await page.get_by_label("API key").fill(ROOT_KEY)
        await page.get_by_role("button", name="Log in").click()
        await page.get_by_role("button", name=HTML).first.click()
        await page.get_by_role("complementary", name="Details").get_by_text(HTML).first.wait_for()
        await page.get_by_role("link", name="Models").click()
        await page.get_by_text("the first 100 of 500").wait_for()
        await page.get_by_label("Find a model").fill("model-498")
        await page.get_by_role("button", name="model-498", exact=True).click()
        await page.get_by_label("Find a model").fill("<script>")
        await page.get_by_role("button", name=HTML, exact=True).click()
        await page.get_by_role("link", name="Doctor").click()
        await page.get_by_text("501 failures").wait_for()  # the node has no loader
        await page.get_by_role("cell", name=f"model-498 did not start: {HTML}").wait_for(state="detached")
        await page.get_by_label("Find a finding").fill("model-498")
        await page.get_by_role("cell", name=f"model-498 did not start: {HTML}").wait_for()
        await page.goto(f"{guarded.base}/ui#/requests/{HTML.replace('/', '%2F')}")
        await page.get_by_role("alert").wait_for()
        assert await page.locator("img, script:not([src])").count() == 0
        await browser.close()
    assert faults == []
