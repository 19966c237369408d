"""Debian's Chromium, driven by Playwright.

Playwright's own browsers are downloads of its vendor and are not used.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright import async_api
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
TIMEOUT_MS = 90_000
expect.set_options(timeout=TIMEOUT_MS)
_SERIOUS = {"serious", "critical"}
_ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]
"""Root may not use a sandbox; the browser opens pages of the test only."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS, timeout=TIMEOUT_MS)
        yield browser
        browser.close()


async def open_page(playwright: async_api.Playwright) -> tuple[async_api.Browser, async_api.Page]:
    """Start a browser with an empty page, for tests with an event loop."""
    browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS, timeout=TIMEOUT_MS)
    page = await browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    return browser, page


@contextlib.contextmanager
def opened(browser: Browser, *, dark: bool = False) -> Iterator[tuple[Page, list[str]]]:
    """Open an empty page in a new profile.

    Yields:
        The page, and what its scripts reported as errors or were refused.
    """
    faults: list[str] = []
    context = browser.new_context(color_scheme="dark" if dark else "light", viewport={"width": 1280, "height": 900})
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda m: faults.append(m.text) if "Content Security Policy" in m.text else None)
    page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}") if dialog.type != "confirm" else None)
    yield page, faults
    context.close()


def serious_findings(page: Page) -> list[str]:
    """Return axe's findings of accessibility that are serious or critical."""
    found = Axe().run(page).response["violations"]
    return [f"{f['id']}: {f['help']}: {node['html'][:200]}" for f in found if f["impact"] in _SERIOUS for node in f["nodes"]]


def log_in(page: Page, url: str, key: str) -> None:
    """Log in to the console of a gateway."""
    page.goto(f"{url}/ui")
    field = page.get_by_label("API key")
    try:
        field.fill(key)
    except PlaywrightTimeout as e:
        raise AssertionError(f"the page asks for no key: {page.locator('body').inner_text()!r}") from e
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("navigation", name="Pages").wait_for()
