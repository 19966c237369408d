"""The console's playground: failures, models that are registered meanwhile, the session's end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from services.gateway.authorization import hash_key
from tests.support.browser import log_in, needs_chromium, opened, serious_findings
from tests.support.launcher import Thaw
from thaw.demo.models import make_demo_model

SHARED = True
pytestmark = needs_chromium
CHAT = "**/ui/api/v1/chat/completions"


@pytest.fixture
def page(browser: Browser, mesh: Thaw) -> Iterator[Page]:
    """A playground that is logged in with the admin key; no script on it may fail."""
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        page.get_by_role("link", name="Playground").click()
        page.get_by_label("Model", exact=False).first.select_option("one")
        yield page
        assert faults == []


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def answer(route: Route, body: str) -> None:
    route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body)


def test_answer_whose_stream_ends_too_early_is_shown_as_failed(page: Page) -> None:
    page.route(CHAT, lambda route: answer(route, event("Down the")))
    ask(page, "Where does the ice go?")
    expect(page.get_by_role("alert")).to_contain_text("ended in the middle of the answer")
    expect(page.get_by_role("status", name="Progress of one")).to_contain_text("failed")
    expect(page.locator(".turn.assistant")).to_contain_text("Down the")
    assert serious_findings(page) == []


def test_question_that_got_no_answer_is_not_sent_again(page: Page) -> None:
    sent: list[list[dict[str, str]]] = []

    def fail_first(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or "")["messages"])
        if len(sent) == 1:
            route.fulfill(status=503, json={"error": {"message": "No engine is there."}})
        else:
            answer(route, f"{event('Yes.')}data: [DONE]\n\n")

    page.route(CHAT, fail_first)
    ask(page, "First?")
    expect(page.get_by_role("alert")).to_contain_text("No engine is there.")
    ask(page, "Second?")
    expect(page.locator(".turn.assistant").last).to_contain_text("Yes.")
    ask(page, "Third?")
    expect(page.locator(".turn")).to_have_count(6)
    expect(page.locator(".turn.assistant").last).to_contain_text("Yes.")
    second = {"role": "user", "content": "Second?"}
    assert sent[1] == [second]
    assert sent[2] == [second, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Third?"}]


def test_models_are_offered_that_are_registered_while_the_page_is_open(page: Page, admin: httpx.Client, tmp_path: Path) -> None:
    chosen = page.get_by_label("Model", exact=False).first
    expect(chosen.locator("option", has_text="late")).to_have_count(0)
    source = str(make_demo_model(tmp_path / "late", "test"))
    admin.post("/models", json={"specs": [{"name": "late", "source": source}]}).raise_for_status()
    try:
        expect(chosen.locator("option", has_text="late")).to_have_count(1)
        expect(chosen).to_have_value("one")
    finally:
        admin.delete("/models/late").raise_for_status()
    expect(chosen.locator("option", has_text="late")).to_have_count(0)


def test_login_follows_a_change_that_a_revoked_key_asks_for(browser: Browser, mesh: Thaw, admin: httpx.Client) -> None:
    key = "sk-thaw-admin-that-leaves"
    for name, scope, text in (("leaving-admin", "admin", key), ("left-viewer", "read-only", "sk-thaw-left-viewer")):
        admin.post("/keys", json={"name": name, "scope": scope, "sha256": hash_key(text)}).raise_for_status()
    try:
        with opened(browser) as (page, _):
            page.on("dialog", lambda dialog: dialog.accept())
            log_in(page, mesh.url, key)
            page.get_by_role("link", name="Keys").click()
            revoke = page.get_by_role("button", name="Revoke the key left-viewer")
            revoke.wait_for()
            admin.delete("/keys/leaving-admin").raise_for_status()
            revoke.click()
            page.get_by_label("API key").wait_for()
    finally:
        admin.delete("/keys/left-viewer").raise_for_status()
