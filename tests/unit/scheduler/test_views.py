"""The operators' view of the cluster."""

from __future__ import annotations

from services.scheduler.views import view
from tests.unit.scheduler.placement.test_constraints import placed, world


def test_brief_view_leaves_out_candidates_and_measurements_alone() -> None:
    w = world()
    assert placed(w, "a")
    (full,) = view(w.state, "s", w.now, w.policy).models
    (brief,) = view(w.state, "s", w.now, w.policy, brief=True).models
    assert full.last_plan is not None
    assert full.last_plan.candidates
    shortened = full.last_plan.model_copy(update={"candidates": (), "measured": ()})
    assert brief == full.model_copy(update={"last_plan": shortened})
