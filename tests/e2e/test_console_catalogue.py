"""The console of a mesh with 500 models, to which one of the hub is added, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.integration.loader.fake_hub import COMMIT, FakeHub
from tests.support.browser import log_in, needs_chromium, opened, serious_findings
from tests.support.launcher import Thaw, running
from thaw.demo.models import make_demo_model

pytestmark = needs_chromium
MODELS = 500
MAX_ELEMENTS = 4000
"""Most elements of a page: 100 rows of a table, and the options of two lists of models."""
MAX_HEAP_BYTES = 48 * 2**20
HOLD_BYTES = 256 * 1024


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """A hub with one repository, `org/model`."""
    hub = FakeHub(make_demo_model(tmp_path_factory.mktemp("hub") / "repo", "test", seed=11))
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def mesh(hub: FakeHub) -> Iterator[Thaw]:
    """A mesh with one checkpoint under 500 names."""
    thaw = Thaw(HF_ENDPOINT=hub.url)
    thaw.keep_port("THAW_SCHEDULER_METRICS_PORT")
    thaw.environment["HF_HOME"] = str(thaw.home / "hf")
    source = str(make_demo_model(thaw.home / "models" / "one", "test", seed=1))
    models = [{"name": f"model-{i:03}", "source": source} for i in range(MODELS)]
    with running(thaw, {"node-0": {"cpu:0": "1GiB"}}, models) as mesh:
        yield mesh


@pytest.fixture
def page(browser: Browser, mesh: Thaw) -> Iterator[Page]:
    """A page that is logged in with the admin key; no script on it may fail."""
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        yield page
        assert faults == []


def check_size(page: Page) -> None:
    elements, heap_bytes = page.evaluate("[document.querySelectorAll('*').length, performance.memory.usedJSHeapSize]")
    assert elements < MAX_ELEMENTS
    assert heap_bytes < MAX_HEAP_BYTES


def test_pages_show_and_find_one_of_500_models_by_keyboard(page: Page, mesh: Thaw) -> None:
    expect(page.get_by_text(re.compile(f"^{MODELS} models, 0 ready instances"))).to_be_visible()
    check_size(page)
    page.get_by_role("link", name="Models").focus()
    page.keyboard.press("Enter")
    rows = page.locator("tbody tr")
    expect(page.get_by_text(f"the first 100 of {MODELS}")).to_be_visible()
    expect(rows).to_have_count(100)
    check_size(page)
    page.get_by_label("Find a model").focus()
    page.keyboard.type("model-49")
    expect(rows).to_have_count(10)
    page.keyboard.type("8")
    expect(rows).to_have_count(1)
    # To the table, which scrolls, to the model, and to its action.
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Wake model-498")).to_be_focused()
    page.keyboard.press("Enter")
    expect(rows).to_contain_text("ready")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="Details").get_by_role("heading", name="model-498", exact=True)).to_be_visible()
    assert serious_findings(page) == []
    page.get_by_role("link", name="Cluster").click()
    node = page.get_by_role("region", name="Node node-0")
    expect(node.get_by_role("button", name=re.compile("^model-498 ready"))).to_be_visible()
    check_size(page)


def test_playground_offers_500_models_and_asks_one(page: Page, mesh: Thaw) -> None:
    page.get_by_role("link", name="Playground").click()
    choice = page.get_by_label("Model", exact=False).first
    expect(choice.locator("option")).to_have_count(len(mesh.cluster()["models"]))
    check_size(page)
    names: list[str] = choice.locator("option").evaluate_all("options => options.map(option => option.value)")
    choice.focus()
    page.keyboard.press("End")
    # By steps: what is typed counts as one name only if less than a second passes between two keys.
    for name in reversed(names[-3:]):
        expect(choice).to_have_value(name)
        page.keyboard.press("ArrowUp")
    chosen = names[-4]
    expect(choice).to_have_value(chosen)
    page.get_by_label("Tokens at most").fill("4")
    page.get_by_label("Message", exact=True).fill("Hi")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("status", name=f"Progress of {chosen}")).to_contain_text("first token after")
    assert serious_findings(page) == []


def test_model_of_the_hub_is_followed_while_it_is_downloaded_until_it_is_ready(page: Page, mesh: Thaw, hub: FakeHub) -> None:
    hub.hold_after = HOLD_BYTES
    page.get_by_role("link", name="Models").click()
    page.get_by_text("Add a model", exact=True).click()
    form, alert = page.get_by_role("form", name="Add a model"), page.get_by_role("alert")
    progress = page.get_by_role("status", name="Progress of the model")
    form.get_by_label("Name", exact=True).fill("far")
    form.get_by_label("Source", exact=True).fill("hf://org/unknown")
    page.keyboard.press("Enter")
    expect(alert).to_contain_text("org/unknown")
    form.get_by_label("Source", exact=True).fill("hf://org/model")
    page.keyboard.press("Enter")
    expect(progress).to_contain_text("far is added. Starting it …")
    assert hub.holding.wait(60)
    expect(progress).to_contain_text(re.compile(r"node-0: .* downloaded, .* of .* in memory"))
    expect(progress.get_by_role("meter", name="Loaded on node-0")).to_be_visible()
    assert serious_findings(page) == []
    hub.unblocked.set()
    expect(progress).to_contain_text("far is added, and ready after")
    (source,) = (m["card"]["info"]["source"] for m in mesh.cluster()["models"] if m["card"]["spec"]["name"] == "far")
    assert source == f"hf://org/model@{COMMIT}"
    asked = {"model": "far", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert httpx.post(f"{mesh.url}/v1/chat/completions", json=asked, timeout=120).status_code == 200
