"""`thaw ps`: models with their instances, devices with their memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.contracts.states import FINAL, InstanceState
from thaw.cli.gateway import Gateway
from thaw.cli.listing import adapters_after_bases, park_line, show_migrations, shown_name, summary
from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.plain import to_plain
from thaw.errors import CommandError
from thaw.launcher.home import Home, read_json
from thaw.launcher.identity import Identity
from thaw.units import format_duration, format_size

if TYPE_CHECKING:
    from shared.contracts.admin import ClusterView, ModelView, NodeView
    from shared.contracts.engine import LoadedAdapter
    from shared.contracts.migration import MigrationRecord
    from shared.contracts.node import InstanceStatus
    from thaw.launcher.status import ServiceStatus

_COLOURS = {
    InstanceState.READY: "green",
    InstanceState.DRAINING: "yellow",
    InstanceState.SUSPENDED: "blue",
    InstanceState.ASLEEP: "blue",
    InstanceState.FAILED: "red",
    InstanceState.STOPPED: "dim",
}
COLD = "cold"
_MORE_IN_USE = (
    "[dim]IN USE is measured. It can exceed RESERVED: it includes the weights that suspended instances keep in host memory, "
    "and on a GPU the memory of other programs.[/]"
)


@verb
def ps(
    as_json: Json = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Draw the units of weights on each device with memory of its own.")
    ] = False,
) -> Document:
    """Show models, instances, devices, memory and migrations.

    Example: [bold]thaw ps --memory[/]
    """
    gateway = Gateway.find()
    document = gateway.request("GET", "/admin/v1/cluster", brief="true")
    migrated = gateway.request("GET", "/admin/v1/migrations", limit="50")
    if not (isinstance(document, dict) and {"models", "nodes"} <= document.keys() and isinstance(migrated, dict)):
        raise CommandError(f"What answers at {gateway.url} is no gateway of Thaw.", "Set THAW_URL to one.", code="no_gateway")
    found = migrated.get("migrations", [])
    cluster: ClusterView = to_plain(document)
    migrations: list[MigrationRecord] = to_plain(found)
    out = screen(as_json)
    show_models(out, cluster, migrations)
    show_devices(out, cluster)
    if memory:
        show_memory(out, cluster)
    show_migrations(out, migrations)
    services = _services(gateway)
    show_hangs(out, to_plain(services), time.time())
    document["services"] = services
    document["migrated"] = summary(migrations)
    document["migrations"] = [m for m in found if m["state"] not in FINAL]
    document["instances"] = [facts_of(node, i) for node in cluster.nodes for i in node.instances]
    instances = _instances(cluster)
    for view, shown in zip(cluster.models, document["models"], strict=True):
        spec = view.card.spec
        if spec.base is None:
            shown["state"] = state_of(view, instances[spec.name])
        else:
            shown["state"] = "loaded" if loads_of(view, instances[spec.base]) else COLD
    return document


def _services(gateway: Gateway) -> dict[str, Any]:
    """Return the processes of a mesh on this machine.

    The result is empty if another launcher starts them (systemd, containers).
    """
    status = read_json(Home.from_environment().supervisor_file) if gateway.own else None
    try:
        if status is None or not Identity(**status["supervisor"]).is_alive():
            return {}
        return dict(status["services"])
    except (KeyError, TypeError, ValueError):  # of another version of Thaw
        return {}


def show_hangs(out: Console, services: Iterable[tuple[str, ServiceStatus]], now: float) -> None:
    """Show which services hung and were restarted. `now`: Unix seconds."""
    for name, service in services:
        if service.hangs:
            ago = f" {format_duration(max(0.0, now - service.last_hang_at))} ago" if service.last_hang_at else ""
            times = f", {service.hangs} times so far" if service.hangs > 1 else ""
            out.print(
                f"[yellow]{escape(name)} hung and was restarted{ago}{times}: {escape(service.last_hang or '')}.[/]"
                f" `thaw logs {escape(name)}` shows its stack traces."
            )


def _instances(cluster: ClusterView) -> dict[str, list[tuple[NodeView, InstanceStatus]]]:
    """Instances that are on a device, on their way to one or suspended, by model."""
    found: dict[str, list[tuple[NodeView, InstanceStatus]]] = defaultdict(list)
    for node in cluster.nodes:
        for instance in node.instances:
            state = InstanceState(instance.state)
            if node.alive and (state.holds_memory or state.parked):
                found[instance.model].append((node, instance))
    return found


def state_of(view: ModelView, instances: list[tuple[NodeView, InstanceStatus]]) -> str:
    """Return a model's state in one word: that of its best instance.

    Without an instance the state is cold, waiting (for room) or failed.
    """
    if instances:
        order = [
            InstanceState.READY,
            InstanceState.DRAINING,
            InstanceState.RESUMING,
            InstanceState.LOADING,
            InstanceState.PREPARING,
            InstanceState.ASLEEP,
            InstanceState.SUSPENDED,
        ]
        states = [InstanceState(i.state) for _, i in instances]
        return next((s.value for s in order if s in states), states[0].value)
    if view.waiting:
        return "waiting"
    return "failed" if view.error else COLD


def facts_of(node: NodeView, i: InstanceStatus) -> dict[str, object]:
    """Return the facts about one instance.

    They include the bytes that its last suspension freed, and the time and duration of its last
    start, suspension and resumption.
    """
    state = InstanceState(i.state)
    return {
        "instance_id": i.instance_id,
        "model": i.model,
        "engine": i.engine,
        "state": state.value,
        "node": node.node,
        "devices": list(i.device_ids),
        "pids": list(i.pids),
        "memory_bytes": i.memory.private + i.memory.weights if not state.parked else i.memory.private,
        "reserved_bytes": i.memory.reserved,
        "way": i.suspension.way,
        "freed_by_last_suspend_bytes": i.suspension.freed_bytes,
        "snapshot_bytes": i.suspension.snapshot_bytes,
        "can_suspend": i.suspension.possible,
        "cannot_suspend": i.suspension.reason,
        "fell_back": i.suspension.fell_back.message if i.suspension.fell_back else None,
        "last_start": dict(iter(i.started)) if i.started else None,
        "last_suspend": dict(iter(i.suspended)) if i.suspended else None,
        "last_resume": dict(iter(i.resumed)) if i.resumed else None,
    }


def show_models(out: Console, cluster: ClusterView, migrations: Sequence[MigrationRecord] = ()) -> None:
    moving = {m.source_instance: f"→ {m.node}" for m in migrations if m.state not in FINAL}
    moving |= {m.instance_id: f"← {m.source_node}" for m in migrations if m.state not in FINAL}
    table = Table(box=None, header_style="dim")
    for column in ("MODEL", "STATE", "NODE", "DEVICE", "MEMORY", "ACTIVE", "WAITING", "IDLE", "INSTANCE"):
        table.add_column(column, justify="right" if column in ("MEMORY", "ACTIVE", "WAITING", "IDLE") else "left")
    instances = _instances(cluster)
    for view in adapters_after_bases(cluster.models):
        name, own = escape(shown_name(view.card)), instances[view.card.spec.name]
        if view.card.spec.base is not None:
            for row in _adapter_rows(view, instances[view.card.spec.base]):
                table.add_row(f"[dim]{name}[/]", *row)
                name = ""
            continue
        waiting = str(view.waiting) if view.waiting else ""
        if not own:
            state = state_of(view, own)
            table.add_row(name, f"[{'red' if state == 'failed' else 'dim'}]{state}[/]", "", "", "", "", waiting, "", "")
        for node, instance in own:
            table.add_row(name, *_instance_cells(node, instance, waiting, moving.get(instance.instance_id, "")))
            name = waiting = ""
    if not cluster.models:
        out.print("No model is registered. Add one: [bold]thaw models add NAME SOURCE[/]")
    else:
        out.print(table)
    for view in cluster.models:
        if view.park is not None and view.park.state not in ("parked", "up"):
            out.print(park_line(view.card.spec.name, view.park))
        if view.error:
            failure = f"{escape(view.card.spec.name)}: {escape(view.error)}"
            is_served = any(i.state is InstanceState.READY for _, i in instances[view.card.spec.name])
            out.print(f"[yellow]{failure} (another instance serves)[/]" if is_served else f"[red]{failure}[/]")


def loads_of(
    view: ModelView, instances: list[tuple[NodeView, InstanceStatus]]
) -> list[tuple[NodeView, InstanceStatus, LoadedAdapter]]:
    """Return those of the base's `instances` that have loaded an adapter."""
    return [(n, i, a) for n, i in instances for a in i.load.adapters if a.name == view.card.spec.name]


def _adapter_rows(view: ModelView, instances: list[tuple[NodeView, InstanceStatus]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "[green]loaded[/]",
            node.node,
            ",".join(instance.device_ids),
            format_size(adapter.nbytes),
            str(adapter.active) if adapter.active else "",
            "",
            "",
            f"[dim]{instance.instance_id}[/]",
        )
        for node, instance, adapter in loads_of(view, instances)
    ]
    return rows or [(f"[dim]{COLD}[/]", "", "", "", "", "", "", "")]


def _instance_cells(node: NodeView, instance: InstanceStatus, waiting: str, moving: str) -> tuple[str, ...]:
    """Return the cells of one instance.

    Args:
        moving: The instance that its requests move to, or from.
    """
    now = InstanceState(instance.state)
    state = f"{now.value} {moving}".rstrip()
    if now.starting:
        state += f" {instance.phase or ''} {instance.progress:.0%}"
    if now.parked and instance.suspension.snapshot_bytes:
        state += f" {format_size(instance.suspension.snapshot_bytes)}"
    load = instance.load
    idle = format_duration(load.idle_ms / 1e3) if now is InstanceState.READY and not load.active else ""
    return (
        f"[{_COLOURS.get(now, 'cyan')}]{state}[/]",
        node.node,
        ",".join(instance.device_ids),
        format_size(instance.memory.reserved),
        str(load.active) if load.active else "",
        waiting,
        idle,
        f"[dim]{instance.instance_id}[/]",
    )


def show_devices(out: Console, cluster: ClusterView) -> None:
    table = Table(box=None, header_style="dim")
    for column in ("NODE", "DEVICE", "RESERVED", "OF", "", "IN USE"):
        table.add_column(column, justify="right" if column in ("RESERVED", "OF", "IN USE") else "left")
    for node in cluster.nodes:
        note = "" if node.alive else " [red]lost[/]"
        note += " [yellow]cordoned[/]" if node.cordoned else ""
        for device in node.devices:
            part = device.reserved_bytes / device.budget_bytes if device.budget_bytes else 0.0
            filled = round(20 * min(1.0, part))
            bar = f"[cyan]{'█' * filled}[/][dim]{'░' * (20 - filled)}[/]"
            table.add_row(
                node.node + note,
                device.device_id,
                format_size(device.reserved_bytes),
                format_size(device.budget_bytes),
                bar,
                format_size(device.used_bytes),
            )
    if cluster.nodes:
        out.print()
        out.print(table)
        if any(d.used_bytes > d.reserved_bytes for n in cluster.nodes for d in n.devices):
            out.print(_MORE_IN_USE)
    else:
        out.print("\n[yellow]No node has reported yet.[/] `thaw logs nodeagent` says why.")


_DRAWN = 40


def _peer_links(node: NodeView, device_id: str) -> str:
    """Return the bandwidths of copies from other devices of the node, a line each."""
    lines = []
    for link in node.loader.links if node.loader is not None else ():
        source, _, target = link.link.removeprefix("p2p:").partition(">")
        if target == device_id and link.bytes_per_second:
            pace = " (paced)" if link.is_paced else ""
            lines.append(f"\nfrom {source} {format_size(int(link.bytes_per_second))}/s{pace}")
    return "".join(lines)


def show_memory(out: Console, cluster: ClusterView) -> None:
    """Draw each device with memory of its own: units by model, shared, reusable, KV and free."""
    drawn = False
    for node in cluster.nodes:
        for device in node.loader.memory if node.loader is not None else ():
            drawn = True
            kv_bytes = sum(k.lent_bytes for k in device.kv)
            earlier_bytes = device.lent_bytes - kv_bytes
            parts = (
                (device.mapped_bytes, "cyan", "█"),
                (device.reusable_bytes, "blue", "▒"),
                (kv_bytes, "magenta", "▚"),
                (earlier_bytes, "yellow", "▓"),
            )
            bar, rest = "", _DRAWN
            for nbytes, colour, character in parts:
                width = min(rest, max(1, round(_DRAWN * nbytes / device.total_bytes))) if nbytes else 0
                bar, rest = bar + f"[{colour}]{character * width}[/]", rest - width
            lent = f", {format_size(kv_bytes)} KV" if kv_bytes else ""
            lent += f", {format_size(earlier_bytes)} of an earlier loader" if earlier_bytes else ""
            pace = device.paced_bytes_per_second
            paced = f"; paced to {format_size(int(pace))}/s from host memory" if pace else ""
            out.print(
                f"\n{escape(node.node)} {device.device_id} {format_size(device.total_bytes)} {bar}[dim]{'░' * rest}[/]\n"
                f"{format_size(device.mapped_bytes)} mapped, {format_size(device.reusable_bytes)} reusable{lent}, "
                f"{format_size(device.free_bytes)} free; copied {format_size(device.copied_bytes)}, "
                f"reused {format_size(device.reused_bytes)} so far{paced}{_peer_links(node, device.device_id)}",
                soft_wrap=True,
            )
            table = Table(box=None, header_style="dim")
            for column in ("MODEL", "MAPPED", "REUSABLE", "SHARED", "KV", "KV FLOOR", "KV WANTED"):
                table.add_column(column, justify="left" if column == "MODEL" else "right")
            units, caches = {m.model: m for m in device.models}, defaultdict(list)
            for k in device.kv:
                caches[k.model].append(k)
            for model in dict.fromkeys((*units, *caches)):
                u, kv = units.get(model), caches[model]
                of_units = (u.mapped_bytes, u.reusable_bytes, u.shared_bytes) if u is not None else (0, 0, 0)
                of_kv = (sum(part) for part in zip(*((k.lent_bytes, k.floor_bytes, k.wanted_bytes) for k in kv), strict=True))
                table.add_row(escape(model), *map(format_size, (*of_units, *(of_kv if kv else (0, 0, 0)))))
            if table.row_count:
                out.print(table)
    if not drawn:
        out.print("\nNo device has memory of its own: `memory: separate` of a cpu device in thaw.yaml (docs/device-memory.md).")
