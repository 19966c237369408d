"""Schedulers in the process of tests leave its heap alone: import the fixture in a conftest.

The process has a million objects of the tests, frozen since their collection. A scheduler's term
would unfreeze them at its end, and the next one traverse them for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.scheduler import app


@pytest.fixture(scope="session", autouse=True)
def shared_heap() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "freeze_heap", lambda: None)
        patch.setattr(app, "unfreeze_heap", lambda: None)
        yield
