"""Simulations, migrations and drains in the console, in a real browser against two nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from playwright.sync_api import Browser, expect

from services.gateway.authorization import hash_key
from shared.contracts.models import ModelSpec
from shared.sizing import need_of
from tests.support.browser import log_in, needs_chromium, opened, serious_findings
from tests.support.launcher import Thaw, until
from tests.support.moving import Stream, body
from tests.support.paced_zygote import Pace
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model

pytestmark = needs_chromium
MODELS = ("one", "two", "three")
REQUESTS = ("one", "two", "three", "one", "three", "two")
VIEWER = "sk-thaw-simulate-viewer"


@pytest.fixture(scope="module")
def mesh(pace: Pace) -> Iterator[Thaw]:
    """Start a mesh whose two nodes hold one instance each, and send it requests."""
    thaw = Thaw(**pace.environment)
    sources = {name: str(make_demo_model(thaw.home / "models" / name, "test", seed=i)) for i, name in enumerate(MODELS)}
    budget = need_of(card_of(ModelSpec(name="one", source=sources["one"]))).total * 3 // 2
    config = thaw.home / "thaw.yaml"
    config.write_text(
        f"mesh:\n  port: {thaw.port}\n  nodes: {{node-0: {{cpu:0: {budget}}}, node-1: {{cpu:0: {budget}}}}}\n"
        "defaults: {keep_alive: -1}\nmodels:\n" + "".join(f"  - {{name: {n}, source: {s}}}\n" for n, s in sources.items())
    )
    try:
        thaw.json("up", "--detach", "--config", str(config))
        with openai.OpenAI(base_url=f"{thaw.url}/v1", api_key="none", timeout=120, max_retries=2) as client:
            for name in REQUESTS:
                client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
        yield thaw
    finally:
        thaw.close()


def test_the_last_hour_is_compared_with_another_policy_and_one_node_less(browser: Browser, mesh: Thaw, admin: httpx.Client) -> None:
    until(lambda: len(admin.get("/traces").json()["traces"]) == len(REQUESTS), what="the traces of all requests")
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        page.get_by_role("link", name="Simulate").click()
        page.get_by_label("Another policy").select_option("lru")
        page.get_by_label("One node less").select_option("node-1")
        assert serious_findings(page) == []
        page.get_by_role("button", name="Simulate", exact=True).click()
        comparison = page.get_by_role("region", name="Comparison", exact=True)
        expect(comparison.get_by_role("heading")).to_have_text(f"{len(REQUESTS)} requests")
        assert serious_findings(page) == []
        rows = comparison.locator("tbody tr")
        expect(rows.locator("th")).to_have_text(["measured", "thaw", "lru", "thaw, without node-1", "lru, without node-1"])
        command = comparison.get_by_role("region", name="Command line of this simulation").inner_text()
        # The command line gives what the page shows.
        status, out = mesh.inside(*command.split()[1:], "--json", "-")
        assert status == 0, out
        document = json.loads(out)
        assert document["recorded"]["requests"] == len(REQUESTS)
        for run, row in zip(document["runs"], rows.all()[1:], strict=True):
            cells = [text.split(" ")[0] for text in row.locator("td").all_inner_texts()]
            assert (run["requests"], run["lost"], run["failed"]) == (len(REQUESTS), 0, 0)
            assert cells[4:7] == [str(run["cold"]), str(sum(run["loads"].values())), str(run["stops"])]
            assert milliseconds(row.locator("td").nth(0).inner_text()) == pytest.approx(run["ttft"]["mean"] * 1e3, rel=0.01, abs=1)
        whole, less = (r for r in document["runs"] if r["policy"] == "thaw")
        # Not the numbers of starts: requests that wait together for a model share one.
        assert less["ttft"]["mean"] > whole["ttft"]["mean"], "three models wait for one device"
        assert serious_findings(page) == []
        assert faults == []


def test_read_only_keys_see_the_page_and_start_nothing(browser: Browser, mesh: Thaw, admin: httpx.Client) -> None:
    admin.post("/keys", json={"name": "viewer", "scope": "read-only", "sha256": hash_key(VIEWER)}).raise_for_status()
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, VIEWER)
        page.get_by_role("link", name="Simulate").click()
        expect(page.get_by_text("Simulations need an admin key.")).to_be_visible()
        expect(page.get_by_role("button", name="Simulate", exact=True)).to_be_disabled()
        assert faults == []


def test_a_request_migrates_and_its_node_is_drained(browser: Browser, mesh: Thaw, pace: Pace, admin: httpx.Client) -> None:
    for name in MODELS:
        admin.post(f"/models/{name}/sleep").raise_for_status()
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        details = page.get_by_role("complementary", name="Details")
        with pace.slowed(0.3):
            stream = Stream(mesh.url, body("one", max_tokens=400, ignore_eos=True)).start()
            assert stream.opened.wait(120)
            mesh.instance("one")  # it may respond before its node has reported it ready
            source = next(n["node"] for n in mesh.cluster()["nodes"] if any(i["state"] == "ready" for i in n["instances"]))
            target = next(n for n in ("node-0", "node-1") if n != source)
            moved_from, moved_to = (page.get_by_role("region", name=f"Node {n}") for n in (source, target))
            moved_from.get_by_role("button", name=re.compile("^one ready.* 1 running")).click()
            details.get_by_label("Migrate to").select_option(target)
            details.get_by_role("button", name="Migrate the requests of one").click()
            expect(moved_to.get_by_role("button", name=re.compile("^one ready.* 1 running"))).to_be_visible(timeout=120_000)
        stream.result()

        def outcomes() -> list[str]:
            (record,) = admin.get("/migrations").json()["migrations"]
            return [r["outcome"] for r in record["requests"]]

        until(lambda: outcomes() == ["moved"], what=lambda: f"the request has moved: {outcomes()}")
        moved_to.get_by_role("button", name=target, exact=True).click()
        details.get_by_role("button", name=f"Drain {target}").click()
        expect(moved_to).to_contain_text("cordoned")
        expect(moved_to.locator(".chip")).to_have_count(0)
        assert serious_findings(page) == []
        details.get_by_role("button", name=f"Uncordon {target}").click()
        expect(moved_to).not_to_contain_text("cordoned")
        assert faults == []


def milliseconds(text: str) -> float:
    """Read a duration as the console prints it; a difference may follow."""
    found = re.match(r"<?([\d.]+) (ms|s)\b", text)
    assert found is not None, text
    return float(found[1]) * {"ms": 1.0, "s": 1e3}[found[2]]
