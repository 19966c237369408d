"""The operators' view of the cluster."""

from __future__ import annotations

from typing import Any

from services.scheduler.views import view
from shared.contracts.admin import LoadView
from shared.contracts.loader import SegmentStatus
from shared.errors import NotFound
from tests.unit.scheduler.placement.zones import placed, world


def test_brief_view_leaves_out_candidates_and_measurements_alone() -> None:
    w = world()
    assert placed(w, "a")
    (full,) = view(w.state, "s", w.now, w.policy).models
    (brief,) = view(w.state, "s", w.now, w.policy, brief=True).models
    assert full.last_plan is not None
    assert full.last_plan.candidates
    shortened = full.last_plan.model_copy(update={"candidates": (), "measured": ()})
    assert brief == full.model_copy(update={"last_plan": shortened})


def segment(model: str, **fields: Any) -> SegmentStatus:
    return SegmentStatus.model_validate({"weights_id": model, "model": model, "segment": "s", "holders": ("i",)} | fields)


def test_loads_in_progress_are_shown_and_complete_or_failed_ones_are_not() -> None:
    w = world()
    segments = (
        segment("loading", total_bytes=10, loaded_bytes=4, fetched_bytes=6),
        segment("new", total_bytes=0, loaded_bytes=0),
        segment("loaded", total_bytes=10, loaded_bytes=10),
        segment("failed", total_bytes=10, loaded_bytes=4, error=NotFound("gone").body()),
        segment("partial", total_bytes=10, loaded_bytes=4, is_partial=True),
    )
    w.loader("n1", (), segments=segments)
    (loader,) = (n.loader for n in view(w.state, "s", w.now, w.policy).nodes if n.node == "n1")
    assert loader is not None
    assert loader.loads == (
        LoadView(model="loading", total_bytes=10, loaded_bytes=4, fetched_bytes=6),
        LoadView(model="new", total_bytes=0, loaded_bytes=0),
    )
