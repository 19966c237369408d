"""Take the screenshots of the console in docs/images: `python docs/screenshots.py`.

Needs a mesh with the demo models (`thaw up --demo --detach`) and Debian's Chromium.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from thaw.launcher.home import Home

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1200, "height": 640}
COLD, WARM = "demo-60m", "demo-250m"


def _ask(url: str, model: str, max_tokens: int = 16) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": max_tokens}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    return answer.headers["x-request-id"]


def main() -> int:
    """Wake two models, and photograph the cluster and the waterfall of a cold start."""
    endpoints = json.loads(Home.from_environment().endpoints_file.read_text())
    url, key = endpoints["url"], endpoints["admin_key"]
    httpx.post(f"{url}/admin/v1/models/{COLD}/sleep", headers={"authorization": f"Bearer {key}"}, timeout=120).raise_for_status()
    _ask(url, WARM)
    request_id = _ask(url, COLD)
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright, ThreadPoolExecutor() as requests:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(f"{url}/ui")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Log in").click()
        page.locator(".chip").filter(has_text=WARM).first.click()
        running = [requests.submit(_ask, url, WARM, 200) for _ in range(4)]
        page.get_by_role("img", name=re.compile(f"{WARM}: KV cache")).wait_for()
        page.screenshot(path=IMAGES / "console-cluster.png")
        for request in running:
            request.result()
        page.goto(f"{url}/ui#/requests/{request_id}")
        page.get_by_role("region", name="Placement decision").wait_for()
        page.screenshot(path=IMAGES / "console-waterfall.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
