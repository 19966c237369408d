"""Progress reports for models that are parked ahead of their first request."""

from __future__ import annotations

import io

from rich.console import Console

from shared.contracts.admin import ClusterView, ModelView, ParkView
from tests.unit.cli.views import VIEW
from thaw.cli.listing import park_line
from thaw.cli.park import changes, park_cell
from thaw.cli.ps import show_models


def views(**states: str) -> tuple[ModelView, ...]:
    def view(name: str, state: str) -> ModelView:
        card = VIEW.card.model_copy(update={"spec": VIEW.card.spec.model_copy(update={"name": name, "park": True})})
        return ModelView(card=card, park=ParkView.model_validate({"state": state, "reason": f"why {name}"}))

    return (*(view(n, s) for n, s in states.items()), VIEW)


def printed(*snapshots: tuple[ModelView, ...]) -> list[tuple[str, str]]:
    return [(name, park.state) for name, park in changes(snapshots)]


def test_each_parking_change_is_printed_once() -> None:
    snapshots = (
        views(a="queued", b="queued"),
        views(a="starting", b="queued"),
        views(a="starting", b="queued"),
        views(a="suspending", b="starting"),
        views(a="parked", b="failed"),
        views(a="parked", b="starting"),
    )
    assert printed(*snapshots) == [
        ("a", "queued"), ("b", "queued"), ("a", "starting"), ("a", "suspending"), ("b", "starting"), ("a", "parked"), ("b", "failed"),
    ]  # fmt: skip


def test_models_waiting_for_room_are_not_awaited() -> None:
    assert printed(views(a="waiting", b="impossible", c="up"), views(a="starting")) == [
        ("a", "waiting"),
        ("b", "impossible"),
        ("c", "up"),
    ]


def test_model_without_park_prints_nothing() -> None:
    assert printed((VIEW,)) == []
    assert park_cell(VIEW) == ""


def test_parking_reasons_are_escaped_for_the_console() -> None:
    assert "m is not started ahead[/][dim]: no \\[swap]" in park_line("m", ParkView(state="impossible", reason="no [swap]"))


def test_ps_shows_unparked_models_with_reasons() -> None:
    out = io.StringIO()
    show_models(Console(file=out, width=140), ClusterView(scheduler="s", epoch=1, models=views(a="impossible", b="parked")))
    assert "a is not started ahead: why a" in out.getvalue()
    assert "why b" not in out.getvalue()
