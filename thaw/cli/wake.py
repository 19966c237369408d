"""`thaw wake` and `thaw sleep`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.markup import escape

from shared.contracts.admin import ClusterView, ModelAsleep
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.units import format_duration, format_size

Model = Annotated[str, typer.Argument(help="Name or alias of a registered model.", metavar="MODEL")]


@verb
def wake(model: Model, as_json: Json = False) -> Document:
    """Start or resume a model, and wait until it is ready.

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
    """The reason why no instance of the model left: it is suspended already, or has none."""
    name = _name(cluster, model)
    parked = [i for node in cluster.nodes if node.alive for i in node.instances if i.model == name and i.state.parked]
    if not parked:
        return f"{escape(model)} has no instance on a device: nothing to do."
    left = sum(i.memory.reserved for i in parked)
    return f"{escape(model)} is suspended already: {_describe_left(left)}"


def _describe_left(nbytes: int) -> str:
    return (
        f"{format_size(nbytes)} of its device stay reserved, which suspending could not free."
        if nbytes
        else "it holds no device memory."
    )


def _name(cluster: ClusterView, model: str) -> str:
    return next((v.card.name for v in cluster.models if model in (v.card.name, *v.card.spec.aliases)), model)


@dataclass(frozen=True)
class Departure:
    """Bytes of a model's instances before and after `thaw sleep`.

    Attributes:
        suspended: Instances that are suspended now; the others were stopped.
        host_weights: Weights in host memory, which its next start finds there.
    """

    instances: int
    suspended: int
    reserved_before: int
    reserved_after: int
    freed: int
    host_weights: int

    def lines(self, model: str) -> list[str]:
        """Return what happened, and why the measured bytes are not the reserved ones."""
        way = (
            "suspended"
            if self.suspended == self.instances
            else f"stopped ({self.suspended} suspended)"
            if self.suspended
            else "stopped"
        )
        count = f"{self.instances} instance{'s' if self.instances != 1 else ''}"
        fell = f"its reservation fell from {format_size(self.reserved_before)} to {format_size(self.reserved_after)}"
        kept = (
            f", and {format_size(self.host_weights)} of weights stay in host memory for the next start" if self.host_weights else ""
        )
        freed = f"{format_size(self.freed)} of the engine's own memory were read back as free{kept}."
        return [f"[green]✓[/] {escape(model)} is {way}: {count}; {fell}", f"  [dim]{freed}[/]"]


def departure(before: ClusterView, after: ClusterView, asleep: ModelAsleep) -> Departure:
    """Compare the instances that left with what is left of them."""
    gone = set(asleep.instances)
    left = [i for n in after.nodes for i in n.instances if i.instance_id in gone and i.state.parked]
    host_weights = 0
    for node in before.nodes:
        cpus = {d.device_id for d in node.devices if d.kind == "cpu"}
        here = [i.memory.weights for i in node.instances if i.instance_id in gone and cpus >= set(i.device_ids)]
        host_weights += max(here, default=0)  # its instances share them
    return Departure(
        instances=len(gone),
        suspended=len(left),
        reserved_before=sum(i.memory.reserved for n in before.nodes for i in n.instances if i.instance_id in gone),
        reserved_after=sum(i.memory.reserved for i in left),
        freed=asleep.freed_bytes,
        host_weights=host_weights,
    )


@verb
def sleep(model: Model, as_json: Json = False) -> Document:
    """Free a model's devices after its running requests.

    It is suspended where that is possible, else stopped; the next request wakes it.

    Example: [bold]thaw sleep demo-60m[/]
    """
    out = screen(as_json)
    with out.status(escape(f"{model} finishes its requests and leaves")):
        api = Api.find()
        before = api.cluster()
        asleep = api.sleep(model)
        after = api.cluster()
    found = departure(before, after, asleep)
    for line in found.lines(model) if found.instances else [nothing_left(after, model)]:
        out.print(line)
    return {
        "model": model,
        "instances": list(asleep.instances),
        "freed_bytes": asleep.freed_bytes,
        "suspended": found.suspended,
        "reserved_before_bytes": found.reserved_before,
        "reserved_after_bytes": found.reserved_after,
    }
