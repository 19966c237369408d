"""`thaw pull`: order, list and cancel pulls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from shared.contracts.admin import ClusterView, PullOptions, PullView
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError
from thaw.units import format_duration, format_size

_REFRESH_S = 1.0
_PLACES = {"ssd": "in the disk cache", "dram": "in host memory"}
_TARGETS = {"ssd": "the disk cache", "dram": "the host memory"}


class Tier(StrEnum):
    """Where a pull brings weights."""

    SSD = "ssd"
    DRAM = "dram"


@verb
def pull(
    model: Annotated[
        str | None, typer.Argument(help="Name or alias of a registered model; --list needs none.", metavar="MODEL")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            help="Node that gets the weights. Default: the scheduler chooses; with --list and --cancel: all nodes.", metavar="NODE"
        ),
    ] = None,
    to: Annotated[
        Tier | None,
        typer.Option(
            help="ssd: the node's disk cache; dram: its host memory. Default: ssd; with --list and --cancel: both.",
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the pulls in progress, and end.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the pulls of the model that are in progress.")] = False,
    as_json: Json = False,
) -> Document:
    """Download a model's weights to a node's disk, or load them into its host memory.

    No instance is started.

    The download continues if the command is interrupted; the same command waits for it again. A
    cancelled download leaves the files that were fetched, and a repeated one continues.

    Examples:
    [bold]thaw pull qwen --node node-0 --to dram[/]
    [bold]thaw pull --list[/]
    [bold]thaw pull qwen --cancel[/]
    """
    if list_ and cancel:
        raise typer.BadParameter("--list and --cancel exclude each other")
    tier = to.value if to is not None else None
    if list_:
        return _list(screen(as_json), model, node, tier)
    if model is None:
        raise typer.BadParameter("Name a model, or list the pulls in progress with --list")
    if cancel:
        return _cancel(screen(as_json), model, node, tier)
    return _pull(screen(as_json), model, PullOptions(node=node, tier=(to or Tier.SSD).value))


def _pull(out: Console, model: str, options: PullOptions) -> Document:
    api = Api.find()
    try:
        with _progress(out, api, model, options):
            pulled = api.pull(model, options)
    except KeyboardInterrupt:
        name = escape(model)
        out.print(
            f"{name} is being pulled all the same; the same command waits for it again, and `thaw pull {name} --cancel` cancels it."
        )
        raise
    where = " and ".join(_PLACES[tier] for tier in pulled.tiers or (pulled.tier,))
    took = "was there already" if pulled.was_there else f"after {format_duration(pulled.took_ms / 1e3)}"
    out.print(f"[green]✓[/] {escape(pulled.name)} is {where} of {escape(pulled.node)}: {format_size(pulled.nbytes)}, {took}")
    return {
        "model": pulled.name,
        "node": pulled.node,
        "tier": pulled.tier,
        "tiers": list(pulled.tiers),
        "bytes": pulled.nbytes,
        "seconds": pulled.took_ms / 1e3,
        "was_there": pulled.was_there,
    }


def _cancel(out: Console, model: str, node: str | None, tier: str | None) -> Document:
    answer = Api.find().cancel_pulls(model, node, tier)
    for p in answer.cancelled:
        out.print(f"[green]✓[/] the pull of {escape(answer.name)} to {_TARGETS[p.tier]} of {escape(p.node)} is cancelled")
    if not answer.cancelled:
        out.print(f"No such pull of {escape(answer.name)} is in progress: nothing to do.")
    return {"model": answer.name, "cancelled": [p.model_dump(mode="json") for p in answer.cancelled]}


def _list(out: Console, model: str | None, node: str | None, tier: str | None) -> Document:
    pulls = find_pulls(Api.find().brief_cluster(), model, node, tier)
    table = Table(box=None, header_style="dim")
    for column in ("MODEL", "NODE", "TO", "SINCE", "LOADED", "RATE", "STATE"):
        table.add_column(column)
    now = time.time()
    for p in pulls:
        table.add_row(
            escape(p.model),
            escape(p.node),
            p.tier,
            f"{format_duration(max(0.0, now - p.since))} ago",
            f"{format_size(p.loaded_bytes)} of {format_size(p.total_bytes)}",
            f"{format_size(p.bytes_per_second)}/s" if p.bytes_per_second is not None else "",
            f"{p.state}: {escape(p.reason)}" if p.reason else p.state,
        )
    out.print(table if pulls else "No pull is in progress.")
    return {"pulls": [p.model_dump(mode="json") for p in pulls]}


def find_pulls(cluster: ClusterView, model: str | None, node: str | None, tier: str | None) -> list[PullView]:
    """Return the pulls in progress, those of one model (or alias), node or tier if it is given."""
    name = next((v.card.name for v in cluster.models if model in (v.card.name, *v.card.spec.aliases)), model)
    wanted = ((name, "model"), (node, "node"), (tier, "tier"))
    return [p for p in cluster.pulls if all(value in (None, getattr(p, field)) for value, field in wanted)]


@contextlib.contextmanager
def _progress(out: Console, api: Api, model: str, options: PullOptions) -> Iterator[None]:
    """Draw the progress of the pull inside the block, on a terminal."""
    if out.quiet or not out.is_terminal:
        yield
        return
    over = threading.Event()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(escape(f"pulling {model}"), total=None)

        def follow() -> None:
            while not over.wait(_REFRESH_S):
                with contextlib.suppress(CommandError):
                    for p in find_pulls(api.brief_cluster(), model, options.node, options.tier)[:1]:
                        wait = f" (waits: {p.reason})" if p.reason else ""
                        description = escape(f"pulling {model}{wait}")
                        bar.update(task, completed=p.loaded_bytes, total=p.total_bytes or None, description=description)

        thread = threading.Thread(target=follow, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_REFRESH_S)
