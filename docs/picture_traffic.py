"""Picture ten models that share a device under traffic: `python docs/picture_traffic.py`.

Writes docs/images/ten-models.png: the device's memory, as the console draws it, at some moments of
`thaw demo traffic`. Needs Debian's Chromium, and a mesh whose device has room for a few of the
models, started with this thaw.yaml:

    mesh: {nodes: {node-0: {cpu:0: 1536MiB}}}
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import time
from html import escape
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

from thaw.launcher.home import Home

IMAGE = Path(__file__).parent / "images" / "ten-models.png"
SIZE = {"width": 1000, "height": 700}
TRAFFIC = (
    "demo",
    "traffic",
    "--models",
    "10",
    "--size",
    "60m",
    "--rate",
    "1.5",
    "--seconds",
    "48",
    "--seed",
    "3",
    "--remove",
    "--json",
)
MOMENTS = (8.0, 16.0, 24.0, 32.0, 40.0)
"""Seconds after the first request."""


def _await_requests(url: str, headers: dict[str, str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        nodes = httpx.get(f"{url}/admin/v1/cluster", headers=headers, timeout=30).raise_for_status().json()["nodes"]
        if any(i["model"].startswith("demo-traffic") for node in nodes for i in node["instances"]):
            return
        time.sleep(0.1)
    raise RuntimeError("no model of the traffic has started")


def _take(page: Page, begun: float) -> str:
    """Return the present moment as HTML: a caption, and the picture of the device."""
    picture = base64.b64encode(page.locator(".device").first.screenshot()).decode()
    return f'<h3>{time.monotonic() - begun:.0f} s</h3><img src="data:image/png;base64,{picture}">'


def main() -> int:
    """Send the traffic, and picture the device meanwhile."""
    endpoints = json.loads(Home.from_environment().endpoints_file.read_text())
    url, key = endpoints["url"], endpoints["admin_key"]
    traffic = subprocess.Popen([sys.executable, "-m", "thaw.cli.app", *TRAFFIC], stdout=subprocess.PIPE, text=True)
    _await_requests(url, {"authorization": f"Bearer {key}"})
    begun = time.monotonic()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(f"{url}/ui")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Log in").click()
        page.locator(".device").first.wait_for()
        moments = []
        for at_s in MOMENTS:
            page.wait_for_timeout(max(0.0, begun + at_s - time.monotonic()) * 1e3)
            moments.append(_take(page, begun))
        out, _ = traffic.communicate(timeout=300)
        done = json.loads(out)
        title = (
            f"Ten models on one device: {done['requests']} requests, {done['failed']} failed, "
            f"{done['cold']} waited for their model to start"
        )
        style = "body {font: 15px sans-serif; margin: 16px} h2 {font-size: 18px} h3 {font-size: 14px; margin: 12px 0 4px} img {width: 960px}"
        report = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]  # the console's pages allow no such images
        report.set_content(f"<style>{style}</style><h2>{escape(title)}</h2>{''.join(moments)}")
        report.screenshot(path=IMAGE, full_page=True)
        browser.close()
    return traffic.returncode


if __name__ == "__main__":
    sys.exit(main())
