"""The findings about a real mesh in the console, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from services.gateway.authorization import hash_key
from tests.support.browser import log_in, needs_chromium, opened, serious_findings
from tests.support.launcher import Thaw

SHARED = True
pytestmark = needs_chromium
VIEWER = "sk-thaw-doctor-viewer"


@pytest.fixture
def viewer(admin: httpx.Client) -> Iterator[str]:
    """A read-only key."""
    admin.post("/keys", json={"name": "viewer", "scope": "read-only", "sha256": hash_key(VIEWER)}).raise_for_status()
    yield VIEWER
    admin.delete("/keys/viewer").raise_for_status()


def test_findings_are_those_of_the_command_line_with_their_remedies(
    browser: Browser, mesh: Thaw, admin: httpx.Client, viewer: str
) -> None:
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, viewer)
        page.get_by_role("link", name="Doctor").click()
        table = page.get_by_role("region", name="Table of findings")
        cordoned = table.get_by_role("row").filter(has_text="node-0 is cordoned")
        expect(table.get_by_role("row").filter(has_text="leads, epoch")).to_contain_text("ok")
        expect(cordoned).to_have_count(0)
        admin.post("/nodes/node-0/cordon").raise_for_status()
        try:
            page.get_by_role("button", name="Check again").click()
            expect(cordoned).to_contain_text("warning")
            expect(cordoned).to_contain_text("The scheduler starts no instance on it.")
            expect(cordoned).to_contain_text("thaw node uncordon node-0")
            expect(page.get_by_role("status")).to_contain_text("warning")
            assert serious_findings(page) == []
            document = json.loads(mesh.run("doctor", "--json").stdout)  # not in this process, where Playwright has a loop
            printed = {(f["subject"], f["text"]) for f in document["findings"]}
            shown = {tuple(row.locator("th, td").all_inner_texts()[1:3]) for row in table.locator("tbody tr").all()}
            assert {(s, t) for s, t in shown if s in ("node", "scheduler", "models", "keys")} <= printed
        finally:
            admin.post("/nodes/node-0/uncordon").raise_for_status()
        page.get_by_role("button", name="Check again").click()
        expect(cordoned).to_have_count(0)
        assert faults == []


def test_failed_model_is_a_finding_until_it_is_removed(browser: Browser, mesh: Thaw, admin: httpx.Client) -> None:
    source = mesh.home / "models" / "doctor-broken"
    config = json.loads((mesh.home / "models" / "one" / "config.json").read_text())
    source.mkdir()
    for file in (mesh.home / "models" / "one").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    name = "broken"
    admin.post("/models", json={"specs": [{"name": name, "source": str(source)}]}).raise_for_status()
    try:
        (source / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
        for weights in source.glob("*.safetensors"):
            weights.write_bytes(b"no weights")
        assert admin.post(f"/models/{name}/wake").is_error
        with opened(browser) as (page, faults):
            log_in(page, mesh.url, mesh.endpoints["admin_key"])
            page.get_by_role("link", name="Doctor").click()
            row = page.get_by_role("region", name="Table of findings").get_by_role("row").filter(has_text=f"{name} did not start")
            expect(row).to_contain_text("failure")
            expect(row).to_contain_text(f"thaw explain {name}")
            admin.delete(f"/models/{name}").raise_for_status()
            page.get_by_role("button", name="Check again").click()
            expect(row).to_have_count(0)
            assert faults == []
    finally:
        admin.delete(f"/models/{name}")
