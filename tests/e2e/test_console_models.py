"""Models are added in the console, in a real browser against a real mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from services.gateway.authorization import hash_key
from tests.integration.loader.tiers_server import TierServer
from tests.support.browser import log_in, needs_chromium, opened, serious_findings
from tests.support.launcher import Thaw
from thaw.demo.models import make_demo_model

SHARED = True
pytestmark = needs_chromium
VIEWER = "sk-thaw-models-viewer"
STALL_BYTES = 256 * 1024


@pytest.fixture
def page(browser: Browser, mesh: Thaw, admin: httpx.Client) -> Iterator[Page]:
    """The page of models with the form opened; models that a test adds are removed."""
    before = {m["card"]["spec"]["name"] for m in mesh.cluster()["models"]}
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        page.get_by_role("link", name="Models").click()
        page.get_by_text("Add a model", exact=True).click()
        yield page
        assert faults == []
    for name in {m["card"]["spec"]["name"] for m in mesh.cluster()["models"]} - before:
        admin.delete(f"/models/{name}").raise_for_status()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TierServer]:
    """A web server with the files of a model."""
    make_demo_model(tmp_path / "remote", "test", seed=7)
    server = TierServer(tmp_path)
    yield server
    server.close()


def submit(page: Page, name: str, source: str) -> None:
    form = page.get_by_role("form", name="Add a model")
    form.get_by_label("Name", exact=True).fill(name)
    form.get_by_label("Source", exact=True).fill(source)
    form.get_by_role("button", name="Add", exact=True).click()


def test_faults_are_shown_before_and_after_the_files_were_read(page: Page, mesh: Thaw) -> None:
    alert = page.get_by_role("alert")
    submit(page, "", "/models/x")
    expect(alert).to_have_text("Give the model a name.")
    submit(page, "relative", "models/x")
    expect(alert).to_contain_text("Write the directory in full")
    evil = "<img src=x onerror=alert(1)>"
    submit(page, evil, "/models/x")
    expect(alert).to_contain_text("specs[0].name")
    submit(page, "missing", str(mesh.home / "models" / evil))
    expect(alert).to_contain_text(evil)
    assert page.locator("img").count() == 0
    submit(page, "one", str(mesh.home / "models" / "two"))
    expect(alert).to_contain_text("another source")
    assert serious_findings(page) == []
    assert {"relative", "missing"}.isdisjoint(m["card"]["spec"]["name"] for m in mesh.cluster()["models"])


def test_model_of_a_url_is_followed_while_it_is_downloaded_until_it_is_ready(page: Page, mesh: Thaw, server: TierServer) -> None:
    server.faults.stall_after = STALL_BYTES
    page.get_by_text("More settings").click()
    page.get_by_label("Pin: never evict it").check()
    page.get_by_label("Other names").fill("far-alias, other-alias")
    page.get_by_label("Memory in GiB").fill("0.25")
    submit(page, "far", f"{server.url}/remote")
    progress = page.get_by_role("status", name="Progress of the model")
    expect(progress).to_contain_text("far is added. Starting it …")
    assert server.stalled.wait(60)
    expect(progress).to_contain_text(re.compile(r"node-0: .* of .* in memory"))
    expect(progress.get_by_role("meter", name="Loaded on node-0")).to_be_visible()
    assert serious_findings(page) == []
    server.unblocked.set()
    expect(progress).to_contain_text(re.compile("far is added, and ready after"))
    expect(page.get_by_role("row").filter(has=page.get_by_role("button", name="far", exact=True))).to_contain_text("ready")
    spec = spec_of(mesh, "far")
    assert (spec["pin"], spec["aliases"], spec["memory"]) == (True, ["far-alias", "other-alias"], 2**28)


def test_model_is_downloaded_without_a_start(page: Page, mesh: Thaw, server: TierServer) -> None:
    server.faults.stall_after = STALL_BYTES
    page.get_by_role("form", name="Add a model").get_by_label("Start it at once").uncheck()
    submit(page, "pulled", f"{server.url}/remote")
    expect(page.get_by_role("status", name="Progress of the model")).to_contain_text("pulled is added.")
    page.get_by_role("button", name="Download pulled to a node's disk").click()
    progress = page.get_by_role("status", name="Download of pulled")
    assert server.stalled.wait(60)
    expect(progress.get_by_role("meter", name="Downloaded to node-0")).to_be_visible()
    expect(progress).to_contain_text(re.compile(r"node-0, disk: .* of .*"))
    assert serious_findings(page) == []
    server.unblocked.set()
    expect(progress).to_contain_text("It is on the disk of node-0.")
    page.get_by_role("button", name="Download pulled to a node's disk").click()
    expect(progress).to_contain_text("node-0 has it on its disk already.")
    assert mesh.instances("pulled") == []


def test_a_download_that_another_began_is_shown_and_cancelled(
    browser: Browser, page: Page, mesh: Thaw, admin: httpx.Client, server: TierServer
) -> None:
    server.faults.stall_after = STALL_BYTES
    page.get_by_role("form", name="Add a model").get_by_label("Start it at once").uncheck()
    submit(page, "ordered", f"{server.url}/remote")
    expect(page.get_by_role("status", name="Progress of the model")).to_contain_text("ordered is added.")
    with mesh.popen("pull", "ordered") as elsewhere:
        assert server.stalled.wait(60)
        progress, button = page.get_by_role("status", name="Download of ordered"), "Cancel the download of ordered"
        expect(progress.get_by_role("meter", name="Downloaded to node-0")).to_be_visible()
        admin.post("/keys", json={"name": "viewer", "scope": "read-only", "sha256": hash_key(VIEWER)}).raise_for_status()
        with opened(browser) as (reader, faults):
            log_in(reader, mesh.url, VIEWER)
            reader.get_by_role("link", name="Models").click()
            seen = reader.get_by_role("status", name="Download of ordered")
            expect(seen.get_by_role("meter", name="Downloaded to node-0")).to_be_visible()
            expect(reader.get_by_role("button", name=button)).to_have_count(0)
            assert faults == []
        admin.delete("/keys/viewer").raise_for_status()
        page.get_by_role("button", name=f"{button} to the disk of node-0").click()
        expect(progress).to_have_text("")
        expect(page.get_by_role("button", name=button)).to_have_count(0)
        _, errors = elsewhere.communicate(timeout=120)
    assert (elsewhere.returncode, "was cancelled" in errors) == (1, True), errors
    assert mesh.json("pull", "--list") == {"pulls": []}
    server.unblocked.set()


def test_model_of_a_directory_is_added_without_a_start_by_keyboard(page: Page, mesh: Thaw, tmp_path: Path) -> None:
    source = make_demo_model(tmp_path / "near", "test", seed=8)
    form = page.get_by_role("form", name="Add a model")
    form.get_by_label("Start it at once").uncheck()
    form.get_by_label("Name", exact=True).fill("near")
    form.get_by_label("Source", exact=True).fill(str(source))
    page.keyboard.press("Enter")
    progress = page.get_by_role("status", name="Progress of the model")
    expect(progress).to_have_text("near is added. Nothing is loaded until a request asks for it.")
    page.keyboard.press("Enter")
    expect(progress).to_contain_text("registered with these settings already")
    assert mesh.instances("near") == []


def test_settings_are_changed_after_the_difference_was_shown(page: Page, mesh: Thaw, tmp_path: Path) -> None:
    submit(page, "tuned", str(make_demo_model(tmp_path / "tuned", "test", seed=9)))
    expect(page.get_by_role("status", name="Progress of the model")).to_contain_text("tuned is added, and ready")
    page.get_by_role("button", name="tuned", exact=True).click()
    details = page.get_by_role("complementary", name="Details")
    details.get_by_text("Change settings").click()
    group = details.get_by_role("group", name="Settings of tuned")
    expect(group.get_by_label("Seconds it stays when idle")).to_have_value("300")
    details.get_by_role("button", name="Show the change of tuned").click()
    expect(details.get_by_text("Nothing would change.")).to_be_visible()
    group.get_by_label("Pin: never evict it").check()
    group.get_by_label("Priority").fill("500")
    details.get_by_role("button", name="Show the change of tuned").click()
    expect(details.get_by_role("alert")).to_contain_text("Invalid value for 'priority'")
    group.get_by_label("Priority").fill("5")
    details.get_by_role("button", name="Show the change of tuned").click()
    table = details.get_by_role("table", name="The change, which is not applied yet")
    expect(table.get_by_role("row", name=re.compile("^pin false true$"))).to_be_visible()
    expect(table.get_by_role("row", name=re.compile("^priority 0 5$"))).to_be_visible()
    assert serious_findings(page) == []
    assert not spec_of(mesh, "tuned")["pin"]
    details.get_by_role("button", name="Apply the change of tuned").click()
    expect(details.get_by_text("Changed: priority, pin.")).to_be_visible()
    assert (spec_of(mesh, "tuned")["pin"], spec_of(mesh, "tuned")["priority"]) == (True, 5)
    group.get_by_label("Priority").fill("")
    details.get_by_role("button", name="Show the change of tuned").click()
    expect(table.get_by_role("row", name=re.compile("^priority 5 0$"))).to_be_visible()
    expect(table.get_by_role("row")).to_have_count(2)


def spec_of(mesh: Thaw, model: str) -> dict[str, Any]:
    """Return the settings of a model as the scheduler has them."""
    (spec,) = (m["card"]["spec"] for m in mesh.cluster()["models"] if m["card"]["spec"]["name"] == model)
    assert isinstance(spec, dict)
    return spec


def test_read_only_keys_add_no_models(browser: Browser, mesh: Thaw, admin: httpx.Client) -> None:
    admin.post("/keys", json={"name": "viewer", "scope": "read-only", "sha256": hash_key(VIEWER)}).raise_for_status()
    try:
        with opened(browser) as (page, faults):
            log_in(page, mesh.url, VIEWER)
            page.get_by_role("link", name="Models").click()
            page.get_by_role("button", name="one", exact=True).wait_for()
            expect(page.get_by_text("Add a model", exact=True)).to_have_count(0)
            headers = "{'x-thaw-console': '1', 'content-type': 'application/json'}"
            sent = f"fetch('/ui/api/admin/v1/models', {{method: 'POST', headers: {headers}, body: '{{}}'}})"
            assert page.evaluate(f"{sent}.then((answer) => answer.status)") == 403
            assert faults == []
    finally:
        admin.delete("/keys/viewer").raise_for_status()
