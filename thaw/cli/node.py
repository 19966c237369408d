"""`thaw node list|cordon|uncordon|drain|rm`."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from shared.contracts.migration import MigrationRecord
from shared.contracts.node import InstanceStatus
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.units import format_size

app = typer.Typer(help="Nodes: list, cordon, uncordon, drain, rm.", no_args_is_help=True)
_LOOK_S = 0.25
Node = Annotated[str, typer.Argument(help="Name of a node, as `thaw node list` shows it.", metavar="NODE")]


@app.command("list")
@verb
def list_nodes(as_json: Json = False) -> Document:
    """List the nodes with their devices.

    Example: [bold]thaw node list[/]
    """
    cluster = Api.find().cluster()
    out = screen(as_json)
    table = Table(box=None, header_style="dim")
    for column in ("NODE", "STATE", "LOADER", "DEVICES", "INSTANCES"):
        table.add_column(column)
    for node in cluster.nodes:
        state = "[green]alive[/]" if node.alive else "[red]lost[/]"
        devices = ", ".join(f"{d.device_id} {format_size(d.reserved_bytes)} of {format_size(d.budget_bytes)}" for d in node.devices)
        held = sum(1 for i in node.instances if i.state.holds_memory)
        table.add_row(
            node.node,
            state + (" cordoned" if node.cordoned else ""),
            "yes" if node.loader_alive else "[red]no[/]",
            devices,
            str(held),
        )
    out.print(table)
    return {"nodes": [n.model_dump(mode="json") for n in cluster.nodes]}


@app.command()
@verb
def cordon(node: Node, as_json: Json = False) -> Document:
    """Start no new instance on a node; running ones continue.

    Example: [bold]thaw node cordon node-1[/]
    """
    return _change(node, "cordon", "takes no new instances", as_json)


@app.command()
@verb
def uncordon(node: Node, as_json: Json = False) -> Document:
    """Allow new instances on a node again.

    Example: [bold]thaw node uncordon node-1[/]
    """
    return _change(node, "uncordon", "takes instances again", as_json)


@app.command()
@verb
def drain(
    node: Node,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for the node to be empty.")] = 120.0,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait.")] = False,
    as_json: Json = False,
) -> Document:
    """Empty a node: its requests move to other nodes, or finish within drain_timeout.

    Example: [bold]thaw node drain node-1[/]
    """
    api, out = Api.find(), screen(as_json)
    known = {r.migration_id for r in api.migrations(limit=1000)}
    groups = {i.group.first for i in _find_instances(api, node) if i.group is not None}
    api.change_node(node, "drain")
    if detach:
        out.print(f"[green]✓[/] {node} is being emptied; `thaw ps` shows what is left")
        return {"node": node, "action": "drain"}
    left, records = _until_empty(api, node, timeout, known, groups)
    is_lost = any(n.node == node and not n.alive for n in api.cluster().nodes)
    moved = [m for r in records for m in r.requests if m.outcome == "moved"]
    stuck = [f"{m.request_id}: {m.reason}" for r in records for m in r.requests if m.outcome in ("failed", "fixed") and m.reason]
    if left:
        out.print(f"[yellow]{node} is not empty after {timeout:g} s[/] and is still being drained:")
        for i in left:
            out.print(
                f"  {escape(i.model)} ({i.instance_id}) is {i.state.value} and serves {i.load.active + i.load.waiting} requests"
            )
    elif is_lost:
        out.print(
            f"[red]{node} is lost[/]: it does not report its instances. `thaw node rm {node}` forgets it if its machine is gone for good."
        )
    else:
        out.print(f"[green]✓[/] {node} is empty; {len(moved)} requests moved elsewhere")
    for line in stuck:
        out.print(f"  could not move: {escape(line)}")
    return {
        "ok": not left and not is_lost,
        "node": node,
        "action": "drain",
        "lost": is_lost,
        "left": [i.model_dump(mode="json") for i in left],
        "moved": len(moved),
        "stuck": stuck,
        "migrations": [r.model_dump(mode="json") for r in records],
    }


@app.command("rm")
@verb
def remove(node: Node, as_json: Json = False) -> Document:
    """Forget a lost node whose machine is gone for good. A node that reports again is added again.

    Lost nodes are forgotten after a day without this command.

    Example: [bold]thaw node rm node-1[/]
    """
    Api.find().remove_node(node)
    screen(as_json).print(f"[green]✓[/] {node} is forgotten")
    return {"node": node, "action": "remove"}


def _find_instances(api: Api, name: str) -> list[InstanceStatus]:
    """Return the instances on a node, stages of groups included, that hold memory."""
    return [i for n in api.cluster().nodes if n.node == name and n.alive for i in n.instances if i.state.holds_memory]


def _until_empty(
    api: Api, name: str, within: float, known: set[str], groups: set[str]
) -> tuple[list[InstanceStatus], list[MigrationRecord]]:
    """Wait until a node is empty and the migrations off it are over.

    An instance may stop before the record of its migration is complete.

    Args:
        api: The mesh.
        name: The node.
        within: Seconds to wait.
        known: Ids of earlier migrations.
        groups: Groups with a stage on the node, by the instance id of their first stage, from where
            a group's requests move.

    Returns:
        The instances that are left, and the migrations.
    """
    deadline = time.monotonic() + within
    while True:
        left = _find_instances(api, name)
        records = [
            r
            for r in api.migrations(limit=1000)
            if r.reason == "drain" and r.migration_id not in known and (r.source_node == name or r.source_instance in groups)
        ]
        if (not left and all(r.over for r in records)) or time.monotonic() >= deadline:
            return left, records
        time.sleep(_LOOK_S)


def _change(node: str, action: str, done: str, as_json: bool) -> Document:
    Api.find().change_node(node, action)
    screen(as_json).print(f"[green]✓[/] {node} {done}")
    return {"node": node, "action": action}
