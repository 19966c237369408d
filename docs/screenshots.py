"""Take the screenshots of the console in docs/images: `python docs/screenshots.py`.

Needs a mesh with the demo models and prices, and Debian's Chromium:

    export THAW_PRICES='{"currency": "EUR", "tokens": {"prompt": 10, "completion": 40}}'
    thaw up --demo --detach
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

from thaw.launcher.home import Home

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1200, "height": 640}
COLD, WARM = "demo-60m", "demo-250m"


def _ask(url: str, model: str, max_tokens: int = 16) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": max_tokens}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    return answer.headers["x-request-id"]


def _sleep(url: str, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    httpx.post(f"{url}/admin/v1/models/{COLD}/sleep", headers=headers, timeout=120).raise_for_status()


def _ask_what_if(page: Page) -> None:
    """Photograph the decision with one more node."""
    page.get_by_text("What if the cluster were different?").click()
    page.get_by_role("button", name="Ask the scheduler").click()
    answer = page.get_by_role("region", name="Decision under the assumption")
    answer.wait_for()
    page.locator("details.card").scroll_into_view_if_needed()
    page.screenshot(path=IMAGES / "console-what-if.png")


def _compare(page: Page) -> None:
    """Photograph two models that answer the same prompt."""
    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Model", exact=False).first.select_option(COLD)
    page.get_by_label("Compare with").select_option(WARM)
    page.get_by_label("Tokens at most").fill("40")
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("link", name="waterfall").nth(1).wait_for()
    page.get_by_text(re.compile("cold start, estimated at .* it took")).wait_for()
    page.screenshot(path=IMAGES / "console-playground.png")


def _list_requests(page: Page, url: str) -> None:
    """Photograph the list of requests while some run."""
    with ThreadPoolExecutor() as requests:
        running = [requests.submit(_ask, url, WARM, 200) for _ in range(3)]
        page.get_by_role("link", name="Requests").click()
        page.get_by_role("region", name="Running and waiting requests", exact=True).get_by_text("running").nth(2).wait_for()
        page.screenshot(path=IMAGES / "console-requests.png")
        for request in running:
            request.result()


def _explain(page: Page) -> None:
    """Photograph the catalogue, and the last decision of a model."""
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name=COLD, exact=True).click()
    link = page.get_by_role("complementary", name="Details").get_by_role("link", name=re.compile(" on node-"))
    link.wait_for()
    page.get_by_text(re.compile("among the latest [1-9]")).wait_for()
    page.screenshot(path=IMAGES / "console-models.png")
    link.click()
    page.get_by_role("region", name="Placement decision").wait_for()
    page.screenshot(path=IMAGES / "console-explain.png")


def _list_keys(page: Page, url: str, key: str) -> None:
    """Photograph the keys with one that a user made."""
    page.get_by_role("link", name="Keys").click()
    page.get_by_label("Name", exact=True).fill("reports")
    page.get_by_label("Scope").select_option("read-only")
    page.get_by_role("button", name="Add the key").click()
    page.get_by_role("rowheader", name="reports").wait_for()
    page.reload()  # the key itself is shown once
    page.get_by_role("rowheader", name="reports").wait_for()
    page.screenshot(path=IMAGES / "console-keys.png")
    httpx.delete(f"{url}/admin/v1/keys/reports", headers={"authorization": f"Bearer {key}"}, timeout=60).raise_for_status()


def _diagnose(page: Page, url: str, key: str) -> None:
    """Photograph the findings while a node is cordoned."""
    headers = {"authorization": f"Bearer {key}"}
    httpx.post(f"{url}/admin/v1/nodes/node-0/cordon", headers=headers, timeout=60).raise_for_status()
    page.get_by_role("link", name="Doctor").click()
    page.get_by_text("node-0 is cordoned").wait_for()
    page.screenshot(path=IMAGES / "console-doctor.png")
    httpx.post(f"{url}/admin/v1/nodes/node-0/uncordon", headers=headers, timeout=60).raise_for_status()


def _show_log(page: Page, url: str) -> None:
    """Photograph the log of a nodeagent."""
    _ask(url, COLD)
    page.get_by_role("link", name="Logs").click()
    page.get_by_label("Log", exact=True).select_option("nodeagent.node-0")
    page.get_by_label("Lines with").fill("instance")
    page.locator(".log .line").nth(5).wait_for()
    page.screenshot(path=IMAGES / "console-logs.png")


def _fill_in_model(page: Page) -> None:
    """Photograph the form that adds a model."""
    page.get_by_role("link", name="Models").click()
    page.get_by_text("Add a model", exact=True).click()
    page.get_by_label("Name", exact=True).fill("qwen")
    page.get_by_label("Source", exact=True).fill("hf://Qwen/Qwen3-0.6B")
    page.get_by_text("More settings").click()
    page.get_by_role("button", name=COLD, exact=True).wait_for()
    page.screenshot(path=IMAGES / "console-add-model.png")


def _show_history(page: Page, url: str) -> None:
    """Photograph the last hour of a model."""
    for _ in range(5):
        _ask(url, COLD)
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name=COLD, exact=True).click()
    history = page.get_by_role("region", name=f"The last hour of {COLD}")
    history.get_by_label("A point for each").select_option("1")
    history.get_by_role("region", name="Phases of the time to the first token").wait_for()
    history.screenshot(path=IMAGES / "console-history.png")


def _simulate(page: Page) -> None:
    """Photograph the recorded requests under another policy."""
    page.get_by_role("link", name="Simulate").click()
    page.get_by_label("Another policy").select_option("lru")
    page.get_by_role("button", name="Simulate", exact=True).click()
    page.get_by_role("region", name="Comparison", exact=True).wait_for()
    page.screenshot(path=IMAGES / "console-simulate.png")


def main() -> int:
    """Wake two models, and photograph the pages of the console."""
    endpoints = json.loads(Home.from_environment().endpoints_file.read_text())
    url, key = endpoints["url"], endpoints["admin_key"]
    _sleep(url, key)
    _ask(url, WARM)
    request_id = _ask(url, COLD)
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright, ThreadPoolExecutor() as requests:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(f"{url}/ui")
        page.get_by_label("API key").wait_for()
        page.screenshot(path=IMAGES / "console-login.png")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Log in").click()
        page.locator(".chip").filter(has_text=WARM).first.click()
        running = [requests.submit(_ask, url, WARM, 200) for _ in range(4)]
        page.get_by_role("toolbar", name=re.compile(f"{WARM}: KV cache")).wait_for()
        page.screenshot(path=IMAGES / "console-cluster.png")
        for request in running:
            request.result()
        page.goto(f"{url}/ui#/requests/{request_id}")
        page.get_by_role("region", name="Placement decision").wait_for()
        page.screenshot(path=IMAGES / "console-waterfall.png")
        _ask_what_if(page)
        _sleep(url, key)
        _compare(page)
        _list_requests(page, url)
        _explain(page)
        _list_keys(page, url, key)
        _show_history(page, url)
        _simulate(page)
        page.get_by_role("link", name="Usage").click()
        page.locator("tbody tr").first.wait_for()
        page.locator("tbody tr").first.wait_for()
        page.screenshot(path=IMAGES / "console-usage.png")
        _diagnose(page, url, key)
        _show_log(page, url)
        _fill_in_model(page)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
