"""`thaw node list|cordon|uncordon|drain`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.config.units import format_size

app = typer.Typer(help="Nodes: list them, keep new instances off one, empty one.", no_args_is_help=True)
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
    """Start no new instance on a node; those on it go on.

    Example: [bold]thaw node cordon node-1[/]
    """
    return _change(node, "cordon", "takes no new instances", as_json)


@app.command()
@verb
def uncordon(node: Node, as_json: Json = False) -> Document:
    """Let a node take instances again.

    Example: [bold]thaw node uncordon node-1[/]
    """
    return _change(node, "uncordon", "takes instances again", as_json)


@app.command()
@verb
def drain(node: Node, as_json: Json = False) -> Document:
    """Cordon a node and have every instance leave it as soon as it is idle.

    Example: [bold]thaw node drain node-1[/]
    """
    return _change(node, "drain", "is being emptied; `thaw ps` shows what is left", as_json)


def _change(node: str, action: str, done: str, as_json: bool) -> Document:
    Api.find().change_node(node, action)
    screen(as_json).print(f"[green]✓[/] {node} {done}")
    return {"node": node, "action": action}
