"""`thaw wake` and `thaw sleep`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from shared.contracts.admin import ClusterView
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.units import format_duration, format_size

Model = Annotated[str, typer.Argument(help="Name or alias of a registered model.", metavar="MODEL")]


@verb
def wake(model: Model, as_json: Json = False) -> Document:
    """Make a model ready on a device, and wait until it is.

    Example: [bold]thaw wake demo-60m[/]
    """
    out = screen(as_json)
    try:
        with out.status(escape(f"waking {model}")):
            awake = Api.find().wake(model)
    except KeyboardInterrupt:
        out.print(f"{escape(model)} is being woken all the same; `thaw sleep {escape(model)}` calls it off.")
        raise
    out.print(f"[green]✓[/] {model} is ready after {format_duration(awake.took_ms / 1e3)} ({awake.instance_id})")
    return {"model": model, "instance_id": awake.instance_id, "plan_id": awake.plan_id, "took_ms": awake.took_ms}


def nothing_left(cluster: ClusterView, model: str) -> str:
    """Why no instance of the model left: it is suspended already, or has none."""
    name = next((v.card.name for v in cluster.models if model in (v.card.name, *v.card.spec.aliases)), model)
    parked = [i for node in cluster.nodes if node.alive for i in node.instances if i.model == name and i.state.parked]
    if parked:
        return f"{escape(model)} is suspended already and holds no device memory."
    return f"{escape(model)} was on no device."


@verb
def sleep(model: Model, as_json: Json = False) -> Document:
    """Have a model leave its devices; running requests finish first.

    It is suspended where that is possible, else stopped; the next request wakes it.

    Example: [bold]thaw sleep demo-60m[/]
    """
    out = screen(as_json)
    with out.status(escape(f"{model} finishes its requests and leaves")):
        api = Api.find()
        asleep = api.sleep(model)
    gone = len(asleep.instances)
    out.print(
        f"[green]✓[/] {model} has left: {gone} instance{'s' if gone != 1 else ''}, {format_size(asleep.freed_bytes)} free again"
        if gone
        else nothing_left(api.cluster(), model)
    )
    return {"model": model, "instances": list(asleep.instances), "freed_bytes": asleep.freed_bytes}
