"""`thaw pull`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from shared.contracts.admin import ClusterView, LoadView, PullOptions
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.wake import Model
from thaw.errors import CommandError
from thaw.units import format_duration, format_size

_REFRESH_S = 1.0
_PLACES = {"ssd": "in the disk cache", "dram": "in host memory"}


class Tier(StrEnum):
    """Where a pull brings weights."""

    SSD = "ssd"
    DRAM = "dram"


@verb
def pull(
    model: Model,
    node: Annotated[
        str | None, typer.Option(help="Node that gets the weights. Default: the scheduler chooses.", metavar="NODE")
    ] = None,
    to: Annotated[Tier, typer.Option(help="ssd: the node's disk cache; dram: its host memory.")] = Tier.SSD,
    as_json: Json = False,
) -> Document:
    """Download a model's weights to a node's disk, or load them into its host memory.

    No instance is started.

    The download continues if the command is interrupted; the same command waits for it again.

    Example: [bold]thaw pull qwen --node node-0 --to dram[/]
    """
    out, api = screen(as_json), Api.find()
    try:
        with _progress(out, api, model, node):
            pulled = api.pull(model, PullOptions(node=node, tier=to.value))
    except KeyboardInterrupt:
        out.print(f"{escape(model)} is being pulled all the same; the same command waits for it again.")
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


def find_load(cluster: ClusterView, model: str, node: str | None) -> LoadView | None:
    """Return the load of a model on a node, or on the first node that has one."""
    name = next((v.card.name for v in cluster.models if model in (v.card.name, *v.card.spec.aliases)), model)
    views = [n for n in cluster.nodes if node in (None, n.node) and n.loader is not None]
    return next((load for n in views if n.loader is not None for load in n.loader.loads if load.model == name), None)


@contextlib.contextmanager
def _progress(out: Console, api: Api, model: str, node: str | None) -> Iterator[None]:
    """Draw the progress of the load inside the block, on a terminal."""
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
                    if (load := find_load(api.brief_cluster(), model, node)) is not None:
                        bar.update(task, completed=load.loaded_bytes, total=load.total_bytes or None)

        thread = threading.Thread(target=follow, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_REFRESH_S)
