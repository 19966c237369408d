"""Inspections in progress: a repeated request waits for the first one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from services.loader.adapters import inspection
from services.loader.adapters.inspection import Inspections
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelSpec
from shared.errors import Unavailable
from tests.support.fake_node import MIB, model_info
from weights.sources.sources import Sources

SPEC = ModelSpec(name="a", source="/models/a")


class Describing:
    """Stands in for `describe_model`: each call ends once `may_end` is set."""

    def __init__(self) -> None:
        self.calls = 0
        self.may_end = threading.Event()
        self.error: Unavailable | None = None

    def __call__(self, spec: ModelSpec, sources: Sources) -> ModelInfo:
        self.calls += 1
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        return model_info(spec.source, MIB)


@pytest.fixture
def describing(monkeypatch: pytest.MonkeyPatch) -> Describing:
    describing = Describing()
    monkeypatch.setattr(inspection, "describe_model", describing)
    return describing


@pytest.fixture
def inspections() -> Iterator[Inspections]:
    with ThreadPoolExecutor(2) as threads:
        yield Inspections(cast(Sources, None), threads)


async def test_repeated_request_waits_for_the_inspection_in_progress(describing: Describing, inspections: Inspections) -> None:
    first = asyncio.create_task(inspections.describe(SPEC))
    await asyncio.sleep(0)
    first.cancel()  # its deadline is over
    again = asyncio.create_task(inspections.describe(SPEC))
    await asyncio.wait([first])
    describing.may_end.set()
    assert await again == model_info(SPEC.source, MIB)
    assert first.cancelled()
    assert describing.calls == 1


async def test_another_model_is_inspected_by_itself(describing: Describing, inspections: Inspections) -> None:
    describing.may_end.set()
    other = ModelSpec(name="b", source="/models/b")
    found = await asyncio.gather(inspections.describe(SPEC), inspections.describe(other))
    assert [info.source for info in found] == ["/models/a", "/models/b"]


async def test_failed_inspection_is_reported_and_then_repeated(describing: Describing, inspections: Inspections) -> None:
    describing.may_end.set()
    describing.error = Unavailable("away")
    with pytest.raises(Unavailable, match="away"):
        await inspections.describe(SPEC)
    describing.error = None
    assert (await inspections.describe(SPEC)).source == SPEC.source
    assert describing.calls == 2
