"""The console in a real browser, against a real mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from rich.console import Console

from services.gateway.authorization import hash_key
from shared.contracts.traces import RequestTrace
from tests.e2e.conftest import JAEGER_URL
from tests.support.browser import log_in, needs_chromium, opened, serious_findings
from tests.support.launcher import Thaw, until
from tests.support.mesh import held, kill
from thaw.cli.waterfall import rows

SHARED = True
pytestmark = needs_chromium
CONSOLE = {"x-thaw-console": "1"}


@pytest.fixture
def page(browser: Browser, mesh: Thaw) -> Iterator[Page]:
    """A page that is logged in with the admin key; no script on it may fail."""
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        yield page
        assert faults == []


def ask(client: openai.OpenAI, model: str) -> str:
    raw = client.chat.completions.with_raw_response.create(model=model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    return raw.headers["x-request-id"]


def test_cluster_shows_memory_by_model_and_follows_actions(page: Page, client: openai.OpenAI) -> None:
    ask(client, "one")
    node = page.get_by_role("region", name="Node node-0")
    chip = node.get_by_role("button", name=re.compile("^one ready"))
    chip.click()
    bar = node.get_by_role("toolbar", name=re.compile("^Memory of cpu:0"))
    expect(bar).to_have_attribute("aria-label", re.compile("one: weights .* free "))
    details = page.get_by_role("complementary", name="Details")
    expect(details).to_contain_text("node-0 cpu:0")
    assert serious_findings(page) == []
    details.get_by_role("button", name="Put one to sleep").click()
    expect(chip).to_be_hidden()
    expect(bar).not_to_have_attribute("aria-label", re.compile("one: weights"))
    node.get_by_role("button", name="node-0", exact=True).click()
    details.get_by_role("button", name="Cordon node-0").click()
    expect(node).to_contain_text("cordoned")
    details.get_by_role("button", name="Uncordon node-0").click()
    expect(node).not_to_contain_text("cordoned")


def test_details_pin_a_model_and_lead_to_its_links_its_decision_and_the_model(
    page: Page, client: openai.OpenAI, admin: httpx.Client
) -> None:
    ask(client, "one")
    node = page.get_by_role("region", name="Node node-0")
    chip = node.get_by_role("button", name=re.compile("^one ready"))
    details = page.get_by_role("complementary", name="Details")
    chip.click()
    details.get_by_role("button", name="Pin one").click()
    unpin = details.get_by_role("button", name="Unpin one")
    expect(unpin).to_be_visible()
    assert admin.get("/models/one/settings").json()["settings"]["pin"]
    unpin.click()
    expect(details.get_by_role("button", name="Pin one", exact=False).and_(page.locator("[aria-label^=Pin]"))).to_be_visible()
    node.get_by_role("button", name="node-0", exact=True).click()
    details.locator("td button.link").first.click()
    expect(details).to_contain_text(re.compile(r"Moved\s*[\d.]+ [KMG]iB since the loader's start"))
    assert serious_findings(page) == []
    chip.click()
    details.get_by_role("link", name="Why it is there").click()
    expect(page.get_by_role("heading", name="Placement decision", level=1)).to_be_visible()
    expect(page.get_by_role("region", name="Candidates")).to_contain_text("node-0")
    assert serious_findings(page) == []
    page.go_back()
    chip.click()
    details.get_by_role("link", name="one", exact=True).click()
    expect(details.get_by_role("heading", name="one", exact=True)).to_be_visible()
    expect(details.get_by_text("Change settings")).to_be_visible()


def test_models_wake_and_show_the_latencies_of_their_requests(page: Page, client: openai.OpenAI) -> None:
    ask(client, "two")
    page.get_by_role("link", name="Models").click()
    row = page.get_by_role("row").filter(has=page.get_by_role("button", name="two", exact=True))
    expect(row).to_contain_text(re.compile(r"ready.*builtin.*\d m?s"))
    assert serious_findings(page) == []
    row.get_by_role("button", name="Put two to sleep").click()
    row.get_by_role("button", name="Wake two").click()
    expect(row).to_contain_text("ready")
    page.get_by_label("Find a model").fill("thr")
    expect(page.locator("tbody tr")).to_have_count(1)


def test_waterfall_is_that_of_the_command_line(page: Page, client: openai.OpenAI, admin: httpx.Client) -> None:
    admin.post("/models/three/sleep").raise_for_status()
    request_id = ask(client, "three")
    page.get_by_role("link", name="Requests").click()
    page.get_by_role("link", name=request_id[:16]).click()
    table = page.get_by_role("table", name=re.compile("^Phases of the request"))
    table.wait_for()
    trace = RequestTrace.model_validate(admin.get(f"/traces/{request_id}").json())
    assert trace.cold
    link = page.get_by_role("link", name=trace.trace_id)
    expect(link).to_have_attribute("href", f"{JAEGER_URL}/trace/{trace.trace_id}")
    assert trace.ttft_ms is not None
    expected = [
        (r.phase, r.process, f"{r.start_ms:.0f}", f"{r.duration_ms:.1f}", f"{r.waited_ms:.1f}" if r.waited_ms > 0 else "")
        for r in rows(trace.spans, trace.critical_path, 0.0, trace.ttft_ms, Console().width)
    ]
    cells = [tuple(row.locator("th, td").all_inner_texts()) for row in table.locator("tbody tr").all()]
    assert [(c[0], c[1], *c[3:]) for c in cells] == expected
    expect(page.get_by_role("region", name="Load", exact=True)).to_contain_text("ready after")
    candidates = page.get_by_role("region", name="Candidates")
    expect(candidates.get_by_role("row").filter(has_text="chosen").nth(1)).to_contain_text("node-0")
    assert serious_findings(page) == []


def test_what_if_is_decided_beside_what_happened_and_read_only_keys_may_ask(
    browser: Browser, mesh: Thaw, client: openai.OpenAI, admin: httpx.Client
) -> None:
    admin.post("/models/three/sleep").raise_for_status()
    for model in ("one", "two"):
        ask(client, model)
    request_id = ask(client, "three")
    admin.post("/models/three/sleep").raise_for_status()
    for model in ("one", "two"):
        ask(client, model)
    key = "sk-thaw-what-if"
    admin.post("/keys", json={"name": "asker", "scope": "read-only", "sha256": hash_key(key)}).raise_for_status()
    try:
        with opened(browser) as (page, faults):
            log_in(page, mesh.url, key)
            page.goto(f"{mesh.url}/ui#/requests/{request_id}")
            page.get_by_text("What if the cluster were different?").click()
            answer = page.get_by_role("region", name="Decision under the assumption")
            name = "<b>big</b>"
            page.get_by_label("Name of the node").fill(name)
            page.get_by_role("button", name="Ask the scheduler").click()
            expect(answer.get_by_role("heading")).to_contain_text(f"node {name} is there, with 1 x cpu")
            row = answer.get_by_role("row", name=re.compile("^Device"))
            expect(row.get_by_role("cell").nth(0)).to_have_text("node-0 cpu:0")
            expect(row.get_by_role("cell").nth(1)).to_have_text(f"{name} cpu:0")
            expect(answer.get_by_role("row", name=re.compile("^Decision"))).to_contain_text("evict then load")
            candidates = answer.get_by_role("region", name="Candidates under the assumption")
            expect(candidates.get_by_role("row").filter(has_text="✓ chosen")).to_contain_text(name)
            assert serious_findings(page) == []
            # By keyboard: no room at all on the only device.
            page.get_by_label("Suppose").select_option("another memory budget of a device")
            page.get_by_label("Budget in GiB").fill("0.001")
            page.keyboard.press("Enter")
            expect(answer.get_by_role("heading")).to_contain_text("node-0/cpu:0 has a budget of")
            expect(answer.get_by_role("row", name=re.compile("^Decision"))).to_contain_text("impossible")
            # Two assumptions at once: the new node has room for what the lost one had.
            page.get_by_label("Suppose").select_option("one more node")
            page.get_by_label("Name of the node").fill("spare")
            page.get_by_role("button", name="Add another").click()
            expect(page.get_by_role("list", name="Assumptions").get_by_role("listitem")).to_have_count(1)
            page.get_by_label("suppose").select_option("one node less")
            page.get_by_role("button", name="Ask the scheduler").click()
            expect(answer.get_by_role("heading")).to_contain_text(re.compile("node spare is there.*and node node-0 is gone"))
            expect(answer.get_by_role("row", name=re.compile("^Device")).get_by_role("cell").nth(1)).to_have_text("spare cpu:0")
            page.get_by_role("button", name=re.compile("^Remove: node spare")).click()
            page.get_by_role("button", name="Ask the scheduler").click()
            expect(answer.get_by_role("heading")).to_contain_text("Supposing that node node-0 is gone")
            page.get_by_role("link", name="Models").click()
            page.get_by_role("button", name="three", exact=True).wait_for()
            assert page.get_by_role("button", name=re.compile("^(Wake|Put) ")).count() == 0
            assert faults == []
    finally:
        admin.delete("/keys/asker").raise_for_status()
    assert {n["node"] for n in admin.get("/cluster").json()["nodes"]} == {"node-0"}


def test_up_of_a_running_mesh_prints_where_the_console_is(mesh: Thaw) -> None:
    done = mesh.run("up", "--detach")
    assert done.returncode == 0, done.stderr
    assert f"{mesh.url}/ui" in done.stdout


def test_playground_streams_and_shows_the_request_as_code(page: Page, mesh: Thaw, admin: httpx.Client) -> None:
    admin.post("/models/one/sleep").raise_for_status()
    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Model", exact=False).first.select_option("one")
    page.get_by_label("Tokens at most").fill("8")
    page.get_by_label("Message", exact=True).fill("It's <b>you</b>?")
    page.get_by_text("This request as curl").click()
    expect(page.get_by_label("The request as curl")).to_contain_text(f"curl -N {mesh.url}/v1/chat/completions")
    code = page.get_by_label("The request as Python").inner_text()
    compile(code, "playground", "exec")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status", name="Progress")).to_contain_text("first token after")
    expect(page.get_by_role("log")).to_contain_text("It's <b>you</b>?")
    assert page.get_by_role("log").locator("p").nth(0).locator("b").count() == 1  # the speaker's name alone
    expect(page.get_by_role("link", name="waterfall")).to_be_visible()
    assert len(page.locator(".turn.assistant").inner_text()) > len("one ")
    assert serious_findings(page) == []


def test_playground_compares_two_models_with_the_same_prompt(page: Page, admin: httpx.Client) -> None:
    for model in ("one", "two"):
        admin.post(f"/models/{model}/sleep").raise_for_status()
    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Model", exact=False).first.select_option("one")
    page.get_by_label("Compare with").select_option("two")
    page.get_by_label("Tokens at most").fill("200")
    page.get_by_label("Message", exact=True).fill("<img src=x onerror=alert(1)>")
    page.keyboard.press("Control+Enter")
    for model in ("one", "two"):
        column = page.get_by_role("region", name=f"Conversation with {model}")
        progress = column.get_by_role("status", name=f"Progress of {model}")
        for text in ("done", "cold start, estimated at", "it took", "first token after", "tokens/s", "waterfall"):
            expect(progress).to_contain_text(text)
        expect(column.get_by_role("log")).to_contain_text("<img src=x onerror=alert(1)>")
        assert len(column.locator(".turn.assistant").inner_text()) > len(f"{model} ")
    assert serious_findings(page) == []
    page.get_by_text("This request as curl").click()
    for model in ("one", "two"):
        expect(page.get_by_label(f"The request as curl, to {model}")).to_contain_text(f'"model":"{model}"')
        compile(page.get_by_label(f"The request as Python, to {model}").inner_text(), "playground", "exec")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    assert serious_findings(page) == []


def test_keys_are_added_shown_once_and_revoked(page: Page, mesh: Thaw, admin: httpx.Client) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("link", name="Keys").click()
    page.get_by_label("Name", exact=True).fill("viewer")
    page.get_by_label("Scope").select_option("read-only")
    page.get_by_role("button", name="Add the key").click()
    key = page.get_by_role("status").locator("code").inner_text()
    authorization = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{mesh.url}/admin/v1/cluster", headers=authorization, timeout=120).status_code == 200
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="viewer"))
    expect(row).to_contain_text("read-only")
    assert serious_findings(page) == []
    row.get_by_role("button", name="Revoke the key viewer").click()
    expect(row).to_be_hidden()
    assert "viewer" not in {k["name"] for k in admin.get("/keys").json()["keys"]}
    expect(page.get_by_role("region", name="Changes of keys")).to_contain_text("revoke")


def test_usage_is_that_of_the_ledger(page: Page, client: openai.OpenAI, admin: httpx.Client) -> None:
    ask(client, "one")

    def recorded() -> dict[str, Any] | None:
        rows = admin.get("/usage", params={"since": 0, "by": "key,model"}).json()["rows"]
        found: dict[str, Any] | None = next((r for r in rows if r["model"] == "one"), None)
        return found

    until(lambda: recorded() is not None, what="the request is in the ledger")
    page.get_by_role("link", name="Usage").click()
    row = page.locator("tbody tr").filter(has=page.get_by_role("cell", name="one", exact=True))
    expect(row).to_contain_text("no key")
    counts = (recorded() or {})["counts"]
    assert int(row.locator("td").nth(1).inner_text()) <= counts["requests"]
    assert int(row.locator("td").nth(5).inner_text()) > 0
    expect(page.get_by_role("img", name="Tokens per hour")).to_be_visible()
    assert serious_findings(page) == []


def test_page_reconnects_after_its_gateway_was_killed(page: Page, mesh: Thaw, client: openai.OpenAI) -> None:
    expect(page.get_by_role("region", name="Node node-0")).to_be_visible()
    with held(mesh.pid("supervisor")):  # no gateway until the page shows that
        old = mesh.pid("gateway")
        kill(old)
        expect(page.get_by_role("status")).to_contain_text("No connection to the gateway")
    mesh.await_replaced("gateway", old)
    expect(page.get_by_role("status")).to_be_hidden()
    ask(client, "one")
    expect(page.get_by_role("button", name=re.compile("^one ready"))).to_be_visible()


def test_address_that_changes_while_the_page_starts_is_shown(browser: Browser, mesh: Thaw) -> None:
    with opened(browser) as (page, faults):
        # After the first render, and before the page listens to changes of the address.
        page.add_init_script(
            "new MutationObserver((_, observer) => {"
            " if (document.querySelector('nav')) { observer.disconnect(); location.hash = '#/models'; }"
            "}).observe(document, {childList: true, subtree: true})"
        )
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        expect(page.get_by_role("heading", name="Models", level=1)).to_be_visible()
        assert faults == []


def test_first_request_that_gets_no_answer_is_sent_again(browser: Browser, mesh: Thaw) -> None:
    unanswered: list[Route] = []
    alerted = False

    def answer_after_the_alert(route: Route) -> None:
        if alerted:
            route.continue_()
        else:
            unanswered.append(route)

    with opened(browser) as (page, _):
        page.clock.install()
        page.route("**/ui/session", answer_after_the_alert)
        page.goto(f"{mesh.url}/ui")
        expect(page.get_by_text("Connecting")).to_be_visible()
        until(lambda: bool(page.evaluate("true") and unanswered), what="the first request")  # handlers run in calls of the page
        page.clock.fast_forward(10_000)
        expect(page.get_by_role("alert")).to_contain_text("does not answer")
        alerted = True
        page.clock.fast_forward(2_000)
        expect(page.get_by_label("API key")).to_be_visible()


def test_pages_fit_a_narrow_window_with_all_their_parts_open(page: Page, client: openai.OpenAI) -> None:
    def check(part: str) -> None:
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, part
        assert serious_findings(page) == [], part

    request_id = ask(client, "one")
    page.set_viewport_size({"width": 360, "height": 800})
    details = page.get_by_role("complementary", name="Details")
    page.get_by_role("button", name="node-0", exact=True).click()
    check("node")
    page.get_by_role("button", name=re.compile("^one ready")).click()
    expect(details).to_contain_text("node-0 cpu:0")
    check("instance")
    page.get_by_role("link", name="Models").click()
    page.get_by_text("Add a model", exact=True).click()
    page.get_by_text("More settings").click()
    page.get_by_role("button", name="one", exact=True).click()
    details.get_by_text("Settings as YAML").click()
    details.get_by_text("Change settings").click()
    expect(details.get_by_label("Seconds it stays when idle")).to_be_visible()
    check("model")
    page.goto(f"{page.url.partition('#')[0]}#/requests/{request_id}")
    page.get_by_text("What if the cluster were different?").click()
    page.get_by_role("button", name="Ask the scheduler").click()
    page.get_by_role("region", name="Decision under the assumption").wait_for()
    check("request")
    page.get_by_role("link", name="Logs").click()
    page.get_by_label("Log", exact=True).select_option(index=1)
    page.get_by_text(re.compile(r"^\d+ of \d+ lines")).wait_for()
    check("logs")
    for name in ("Requests", "Playground", "Usage", "Keys", "Doctor", "Simulate"):
        page.get_by_role("link", name=name).click()
        page.get_by_role("heading", name=name, exact=True).wait_for()
        check(name)


def test_wrong_names_get_a_clear_error(page: Page, mesh: Thaw) -> None:
    alert = page.get_by_role("alert")
    page.goto(f"{mesh.url}/ui#/models/%3Cb%3Enone%3C%2Fb%3E")
    page.get_by_text("No model is called <b>none</b>.").wait_for()
    page.goto(f"{mesh.url}/ui#/explain/none")
    expect(alert.locator("code")).to_have_text("thaw models list")
    page.goto(f"{mesh.url}/ui#/logs/node-0/none")
    expect(alert).to_contain_text("node-0 has no log none")
    expect(page.get_by_text("Reading …")).to_have_count(0)
    page.get_by_role("link", name="Keys").click()
    page.get_by_label("Name", exact=True).fill("two words")
    page.get_by_role("button", name="Add the key").click()
    expect(alert).to_contain_text("letters, digits")
    assert serious_findings(page) == []


def test_read_only_keys_may_not_ask_models_and_leave_inference_open(browser: Browser, mesh: Thaw, admin: httpx.Client) -> None:
    key = "sk-thaw-reader"
    admin.post("/keys", json={"name": "reader", "scope": "read-only", "sha256": hash_key(key)}).raise_for_status()
    try:
        with opened(browser) as (page, faults):
            log_in(page, mesh.url, key)
            page.get_by_role("link", name="Playground").click()
            page.get_by_text("The key of this session may not ask models.").wait_for()
            page.get_by_label("Message", exact=True).fill("Hi")
            expect(page.get_by_role("button", name="Send")).to_be_disabled()
            page.keyboard.press("Control+Enter")
            expect(page.locator(".turn")).to_have_count(0)
            page.get_by_role("link", name="Keys").click()
            page.get_by_text("Inference needs a key as soon as an inference key exists.").wait_for()
            assert serious_findings(page) == []
            assert faults == []
    finally:
        admin.delete("/keys/reader").raise_for_status()


def test_login_follows_a_key_that_is_revoked_while_a_page_without_a_live_view_is_open(
    browser: Browser, mesh: Thaw, admin: httpx.Client
) -> None:
    key = "sk-thaw-leaver"
    admin.post("/keys", json={"name": "leaver", "scope": "read-only", "sha256": hash_key(key)}).raise_for_status()
    with opened(browser) as (page, _):
        log_in(page, mesh.url, key)
        page.get_by_role("link", name="Doctor").click()
        page.get_by_role("heading", name="Doctor").wait_for()
        admin.delete("/keys/leaver").raise_for_status()
        page.get_by_role("link", name="Usage").click()
        page.get_by_label("API key").wait_for()


def test_logout_that_fails_is_shown(page: Page) -> None:
    page.route("**/ui/logout", lambda route: route.abort())
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("alert").first).to_contain_text("You are still logged in.")
    page.unroute("**/ui/logout")


def test_pages_have_no_serious_finding_in_dark_and_work_by_keyboard(browser: Browser, mesh: Thaw) -> None:
    with opened(browser, dark=True) as (page, faults):
        page.goto(f"{mesh.url}/ui")
        page.get_by_label("API key").wait_for()
        assert serious_findings(page) == []
        page.keyboard.type(mesh.endpoints["admin_key"])
        page.keyboard.press("Enter")
        for name in ("Cluster", "Models", "Requests", "Playground", "Usage", "Keys", "Doctor", "Logs", "Simulate"):
            link = page.get_by_role("link", name=name)
            link.focus()
            page.keyboard.press("Enter")
            page.get_by_role("heading", name=name).wait_for()
            assert serious_findings(page) == [], name
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("API key").wait_for()
        assert faults == []
