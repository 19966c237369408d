"""Show the progress of models that are suspended before their first request.

`thaw up`, `thaw ps` and `thaw models list` use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console

from shared.contracts.admin import ModelView, ParkView
from thaw.cli.api import Api
from thaw.cli.listing import PARK_COLOURS, park_line
from thaw.errors import CommandError

_POLL_S = 0.5


def park_cell(view: ModelView) -> str:
    return f"[{PARK_COLOURS.get(view.park.state, 'cyan')}]{view.park.state}[/]" if view.park is not None else ""


def changes(looks: Iterable[tuple[ModelView, ...]]) -> Iterator[tuple[str, ParkView]]:
    """Yield each model's state when it changes, until no model is in progress.

    Each model is then parked, up, failed, impossible, or waiting for room.
    """
    shown: dict[str, str] = {}
    for models in looks:
        parks = {m.card.name: m.park for m in models if m.park is not None}
        for name, park in parks.items():
            if shown.get(name) != park.state:
                shown[name] = park.state
                yield name, park
        if not any(p.moving for p in parks.values()):
            return


def follow_parking(api: Api, out: Console, pause: Callable[[float], None] = time.sleep) -> None:
    """Show the progress of the models that are to be parked, until none changes any more."""

    def looks() -> Iterator[tuple[ModelView, ...]]:
        yield api.cluster().models
        while True:
            pause(_POLL_S)
            yield api.cluster().models

    try:
        for name, park in changes(looks()):
            out.print("  " + park_line(name, park))
    except CommandError:
        out.print("[dim]The mesh does not answer; `thaw ps` shows their progress later.[/]")
