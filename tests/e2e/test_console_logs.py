"""Logs of engines and of services in the console, in a real browser against a real mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from playwright.sync_api import Browser, Page, expect

from services.gateway.authorization import hash_key
from tests.support.browser import log_in, needs_chromium, opened, serious_findings
from tests.support.launcher import Thaw

SHARED = True
pytestmark = needs_chromium
VIEWER = "sk-thaw-logs-viewer"
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture
def page(browser: Browser, mesh: Thaw) -> Iterator[Page]:
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        yield page
        assert faults == []


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_log_of_an_instance_is_shown_escaped_filtered_and_followed(page: Page, mesh: Thaw, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="one", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    page.get_by_role("region", name="Node node-0").get_by_role("button", name=re.compile("^one ready")).click()
    page.get_by_role("complementary", name="Details").get_by_role("link", name="Log of its engine").click()
    choice = page.get_by_label("Log", exact=True)
    expect(choice).to_have_value(re.compile(r"\.engine$"))
    name = choice.input_value()
    path = mesh.home / "nodes" / "node-0" / "logs" / f"{name}.log"
    lines = page.get_by_role("region", name=f"Lines of {name}")
    append(path, f"{EVIL}\n\x1b[31mred\x1b[0m line\nnot ended")
    expect(lines).to_contain_text(EVIL)
    expect(lines).to_contain_text("red line")
    expect(lines).to_contain_text("not ended")
    assert page.locator("img, script:not([src])").count() == 0
    append(path, ' yet\n{"time": "2026-01-01T00:00:00.123", "level": "error", "message": "broken", "pid": 7}\n')
    expect(lines).to_contain_text("not ended yet")
    expect(lines).to_contain_text("00:00:00.123 error broken pid=7")
    assert lines.inner_text().count("not ended") == 1
    page.get_by_label("Lines with").fill("RED")
    expect(lines).to_have_text(re.compile(r"^(Earlier lines are left out\.\s*)?red line\s*$"))
    assert serious_findings(page) == []


def test_logs_are_found_by_model_and_those_of_services_are_listed(page: Page, mesh: Thaw, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="two", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    page.get_by_role("link", name="Logs").click()
    choice = page.get_by_label("Log", exact=True)
    page.get_by_label("Instance, model or service").fill("two")
    page.get_by_role("button", name="List again").click()
    running = re.escape(mesh.instance("two")["instance_id"])
    expect(choice.locator("option", has_text=re.compile(rf"{running}\.engine \(two\)"))).to_have_count(1)
    page.get_by_label("Instance, model or service").fill("loader")
    choice.select_option("loader.node-0")
    expect(page.get_by_role("region", name="Lines of loader.node-0")).to_contain_text("info")
    page.get_by_label("Lines", exact=True).select_option("50")
    expect(page.get_by_role("status").last).to_have_text(re.compile(r"^\d+ of ([1-4]?\d|50|51) lines$"))
    assert serious_findings(page) == []


def test_rotated_log_is_followed(page: Page, mesh: Thaw) -> None:
    path = mesh.home / "nodes" / "node-0" / "logs" / "test-rotated.log"
    path.write_text("before the rotation\n" * 3)
    try:
        page.goto(f"{mesh.url}/ui#/logs/node-0/test-rotated")
        lines = page.get_by_role("region", name="Lines of test-rotated")
        expect(lines).to_contain_text("before the rotation")
        path.write_text("after the rotation\n")
        expect(lines).to_contain_text("after the rotation")
        expect(lines).to_contain_text("Earlier lines are left out.")
    finally:
        path.unlink()
    expect(page.get_by_role("alert")).to_contain_text("has no log test-rotated")


def test_read_only_keys_see_no_logs(browser: Browser, mesh: Thaw, admin: httpx.Client) -> None:
    admin.post("/keys", json={"name": "viewer", "scope": "read-only", "sha256": hash_key(VIEWER)}).raise_for_status()
    try:
        with opened(browser) as (page, faults):
            log_in(page, mesh.url, VIEWER)
            page.get_by_role("link", name="Cluster").wait_for()
            expect(page.get_by_role("link", name="Logs")).to_have_count(0)
            status = page.evaluate("fetch('/ui/api/admin/v1/nodes/node-0/logs').then((answer) => answer.status)")
            assert status == 403
            assert faults == []
    finally:
        admin.delete("/keys/viewer").raise_for_status()


def test_command_line_reads_the_same_logs_through_a_gateway(mesh: Thaw, tmp_path: Path) -> None:
    elsewhere = {"THAW_URL": mesh.url, "THAW_ADMIN_KEY": mesh.endpoints["admin_key"], "THAW_HOME": str(tmp_path / "none")}
    before = dict(mesh.environment)
    mesh.environment |= elsewhere
    try:
        done = mesh.run("logs", "nodeagent", "--lines", "5", "--json")
    finally:
        mesh.environment.clear()
        mesh.environment.update(before)
    assert done.returncode == 0, done.stdout
    assert '"nodeagent.node-0"' in done.stdout
