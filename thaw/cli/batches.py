"""`thaw batches run|list|show|cancel`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thaw.cli.api import Api
from thaw.cli.batch_client import ENDED, Batch, BatchClient
from thaw.cli.output import Document, Json, screen, show_error, verb
from thaw.errors import CommandError

app = typer.Typer(help="Batches of requests for idle devices: run, list, show, cancel.", no_args_is_help=True)
BatchId = Annotated[str, typer.Argument(help="Id of the batch, as `thaw batches list` shows it.", metavar="BATCH")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended, and show its progress.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Wait, then write the responses to this file, and failed requests to one beside it (.errors)."
    ),
]
_SHOWN_ERRORS = 10


@app.command()
@verb
def run(
    file: Annotated[Path, typer.Argument(help="JSON Lines; each line has custom_id, method, url and body.", metavar="FILE")],
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="Route of the requests, e.g. /v1/chat/completions; default: url of line 1.")
    ] = None,
    window: Annotated[str, typer.Option("--window", help="The batch expires after this time: 24h or shorter, e.g. 90m.")] = "24h",
    wait: Wait = False,
    output: Output = None,
    as_json: Json = False,
) -> Document:
    """Upload a file of requests and answer them while devices are idle.

    With --wait or --output, the exit status is 1 unless every request was answered.

    Examples:
    [bold]thaw batches run requests.jsonl[/]
    [bold]thaw batches run requests.jsonl --output results.jsonl[/]
    """
    if not file.is_file():
        raise CommandError(f"{file} is not a file.", "Give a file with one request per line.", code="no_file")
    _check_output(output)
    client, out = BatchClient(Api.find()), screen(as_json)
    batch = client.create(file, endpoint or _first_url(file), window)
    out.print(f"[green]✓[/] {batch['id']} is created for {escape(batch['endpoint'])}")
    if not wait and output is None:
        out.print(f"  `thaw batches show {batch['id']} --output FILE` waits for its results")
        return batch
    return _finish(client, out, batch, output, as_json)


@app.command("list")
@verb
def list_batches(
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="Batches to show at most.")] = 20, as_json: Json = False
) -> Document:
    """List the batches of your API key (THAW_API_KEY), the latest first.

    Example: [bold]thaw batches list --limit 5[/]
    """
    page = BatchClient(Api.find()).list(limit)
    table = Table(box=None, header_style="dim")
    for column in ("BATCH", "STATUS", "ENDPOINT", "MODEL", "ANSWERED", "FAILED", "CREATED"):
        table.add_column(column)
    for batch in page["data"]:
        counts = batch["request_counts"]
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(batch["created_at"]))
        answered = f"{counts['completed']} of {counts['total']}"
        table.add_row(
            batch["id"],
            batch["status"],
            escape(batch["endpoint"]),
            escape(batch["model"] or "-"),
            answered,
            str(counts["failed"]),
            created,
        )
    screen(as_json).print(table)
    return {"batches": page["data"], "has_more": page["has_more"]}


@app.command()
@verb
def show(batch_id: BatchId, wait: Wait = False, output: Output = None, as_json: Json = False) -> Document:
    """Show a batch, wait for it, or write its results to a file.

    Example: [bold]thaw batches show batch_0123456789abcdef --output results.jsonl[/]
    """
    _check_output(output)
    client, out = BatchClient(Api.find()), screen(as_json)
    batch = client.read(batch_id)
    if wait or output is not None:
        return _finish(client, out, batch, output, as_json)
    _print(out, batch)
    return batch


@app.command()
@verb
def cancel(batch_id: BatchId, as_json: Json = False) -> Document:
    """Cancel a batch. Its running requests are stopped; the results so far are kept.

    Example: [bold]thaw batches cancel batch_0123456789abcdef[/]
    """
    batch = BatchClient(Api.find()).cancel(batch_id)
    _print(screen(as_json), batch)
    return batch


def _finish(client: BatchClient, out: Console, batch: Batch, output: Path | None, as_json: bool) -> Document:
    """Wait for the end of a batch, write its results, and return it."""
    try:
        with out.status(escape(_progress(batch))) as status:
            batch = client.wait(batch, lambda b: status.update(escape(_progress(b))))
    except KeyboardInterrupt:
        remedy = f"`thaw batches show {batch['id']} --wait` waits again; `thaw batches cancel {batch['id']}` stops it."
        show_error(CommandError("Interrupted. The batch continues.", remedy, code="interrupted"), as_json)
        raise typer.Exit(130) from None
    _print(out, batch)
    written: dict[str, str] = {}
    if output is not None:
        for name, path in (("output", output), ("error", _errors_of(output))):
            if file_id := batch[f"{name}_file_id"]:
                client.download(file_id, path)
                written[name] = str(path)
                out.print(f"  {'responses' if name == 'output' else 'failed requests'}: {escape(str(path))}", soft_wrap=True)
    is_ok = batch["status"] == "completed" and not batch["request_counts"]["failed"]
    return batch | {"ok": is_ok, "written": written}


def _errors_of(output: Path) -> Path:
    """Return the file beside `output` for failed requests: results.errors.jsonl."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def _check_output(output: Path | None) -> None:
    """Raise `CommandError` if results could not be written, before anything is generated."""
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise CommandError(f"{output} cannot be written.", "Give a file in a folder that exists.", code="no_output")


def _first_url(file: Path) -> str:
    """Return the `url` of the first request of a file."""
    try:
        with file.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
        request: Any = json.loads(first)
    except OSError as e:
        raise CommandError(f"{file} cannot be read: {e.strerror}.", "Give a file that you may read.", code="no_file") from e
    except ValueError:
        request = None
    url = request.get("url") if isinstance(request, dict) else None
    if isinstance(url, str):
        return url
    raise CommandError(
        f"The first line of {file} has no url.", "Give --endpoint, or lines as docs/batches.md shows them.", code="no_endpoint"
    )


def _progress(batch: Batch) -> str:
    counts = batch["request_counts"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{batch['status'].replace('_', ' ')}: {counts['completed']} of {counts['total']} answered{failed}"


def _print(out: Console, batch: Batch) -> None:
    mark = {"completed": "[green]✓[/] "}.get(batch["status"], "[red]✗[/] " if batch["status"] in ENDED else "")
    out.print(f"{mark}{batch['id']} {escape(_progress(batch))}")
    errors = (batch["errors"] or {}).get("data", [])
    for error in errors[:_SHOWN_ERRORS]:
        where = f"line {error['line']}: " if error.get("line") is not None else ""
        out.print(f"  {where}{escape(str(error.get('message')))}", soft_wrap=True)
    if len(errors) > _SHOWN_ERRORS:
        out.print(f"  and {len(errors) - _SHOWN_ERRORS} more; --json has all")
