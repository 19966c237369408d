"""Answers that fail, arrive late, or are longer than a page draws at first."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.browser import log_in, needs_chromium, opened
from tests.support.launcher import Thaw

SHARED = True
pytestmark = needs_chromium


@pytest.fixture
def page(browser: Browser, mesh: Thaw) -> Iterator[Page]:
    """A page that is logged in with the admin key; no script on it may fail."""
    with opened(browser) as (page, faults):
        log_in(page, mesh.url, mesh.endpoints["admin_key"])
        yield page
        assert faults == []


def refuse(route: Route, message: str) -> None:
    route.fulfill(status=404, json={"error": {"message": message}})


def test_failed_check_is_not_shown_as_one_in_progress(page: Page) -> None:
    page.route("**/admin/v1/doctor", lambda route: refuse(route, "No scheduler answers."))
    page.get_by_role("link", name="Doctor").click()
    expect(page.get_by_role("alert")).to_contain_text("No scheduler answers.")
    expect(page.get_by_text("Checking …")).to_have_count(0)
    page.unroute("**/admin/v1/doctor")
    page.get_by_role("button", name="Check again").click()
    expect(page.get_by_text(", checked at ")).to_be_visible()


def test_all_rows_of_the_usage_can_be_shown(page: Page) -> None:
    def answer(route: Route) -> None:
        """Answer with 150 rows of an hour without requests."""
        counts = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cold_requests", "cold_start_s")
        held = ("held_cpu_byte_s", "held_cuda_byte_s", "held_host_byte_s")
        row = {"model": "one", "hour": None, "cost": None, "counts": dict.fromkeys((*counts, *held), 0)}
        rows = [copy.deepcopy(row) | {"key": f"key-{i}"} for i in range(150)]
        found = rows if "by=key,model" in route.request.url else []
        route.fulfill(json={"rows": found, "complete": True, "currency": None})

    page.route("**/admin/v1/usage?*", answer)
    page.get_by_role("link", name="Usage").click()
    rows = page.get_by_role("region", name="Table of usage").locator("tbody tr")
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Show 50 more rows").click()
    expect(rows).to_have_count(150)


def test_late_answer_does_not_replace_that_of_the_present_address(page: Page) -> None:
    late: list[Route] = []
    page.route("**/admin/v1/explain?about=one", lambda route: late.append(route))
    page.route("**/admin/v1/explain?about=two", lambda route: refuse(route, "two has no plan"))
    with page.expect_request("**/admin/v1/explain?about=one"):
        page.evaluate("window.location.hash = '#/explain/one'")
    page.evaluate("window.location.hash = '#/explain/two'")
    expect(page.get_by_role("alert")).to_contain_text("two has no plan")
    with page.expect_response("**/admin/v1/explain?about=one") as received:
        refuse(late[0], "one has no plan")
    received.value.finished()
    page.evaluate("() => fetch('/ui/session').then(() => null)")  # the page has the late answer when it has this one
    expect(page.get_by_role("alert")).to_contain_text("two has no plan")
