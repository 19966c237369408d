"""`thaw keys add|list|revoke`."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Annotated
from urllib.parse import quote

import typer
from pydantic import ValidationError
from rich.table import Table

from shared.contracts.keys import ApiKey, KeyList, NewKey
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError

app = typer.Typer(help="API keys: add, list, revoke.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the key, for example its user.", metavar="NAME")]


@app.command()
@verb
def add(
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="For the admin API instead of inference.")] = False,
    as_json: Json = False,
) -> Document:
    """Add an API key and show it once. As soon as a key exists, inference (or the admin API) needs
    one.

    Example: [bold]thaw keys add alice[/]
    """
    # Made here, so that only its hash ever reaches the mesh.
    key = f"sk-thaw-{secrets.token_urlsafe(32)}"
    try:
        asked = NewKey(name=name, scope="admin" if admin else "inference", sha256=hashlib.sha256(key.encode()).hexdigest())
    except ValidationError as e:
        raise CommandError(
            f"{name!r} cannot be the name of a key.", "Letters, digits and . _ @ - , at most 100, a letter or digit first."
        ) from e
    api = Api.find()
    before = KeyList.model_validate(api.request("GET", "/admin/v1/keys"))
    made = ApiKey.model_validate(api.request("POST", "/admin/v1/keys", asked.model_dump_json()))
    out = screen(as_json)
    out.print(f"[green]✓[/] {made.name} ({made.scope}); only its hash is kept, so write it down now:")
    out.print(f"  [bold]{key}[/]", soft_wrap=True)
    if made.scope == "inference" and not _has_inference_key(before) and not before.required:
        out.print("[yellow]every request needs a key now; `thaw chat` reads it from THAW_API_KEY[/]")
    return made.model_dump(mode="json") | {"key": key}


@app.command("list")
@verb
def list_keys(as_json: Json = False) -> Document:
    """List the API keys that were made with `thaw keys add`.

    Example: [bold]thaw keys list[/]
    """
    found = KeyList.model_validate(Api.find().request("GET", "/admin/v1/keys"))
    out = screen(as_json)
    table = Table(box=None, header_style="dim")
    for column in ("NAME", "SCOPE", "MADE"):
        table.add_column(column)
    for key in found.keys:
        table.add_row(key.name, key.scope, time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created)))
    out.print(table)
    if found.configured:
        out.print(f"[dim]and {found.configured} from the gateway's settings[/]")
    if not _has_inference_key(found):
        out.print(f"[dim]no key for inference: {_without_keys(found)}[/]")
    return found.model_dump(mode="json")


@app.command()
@verb
def revoke(name: Name, as_json: Json = False) -> Document:
    """Revoke an API key at once, on every gateway.

    Example: [bold]thaw keys revoke alice[/]
    """
    api, out = Api.find(), screen(as_json)
    revoked = ApiKey.model_validate(api.request("DELETE", f"/admin/v1/keys/{quote(name, safe='')}"))
    out.print(f"[green]✓[/] {revoked.name} is not valid any more")
    if revoked.scope == "inference" and not _has_inference_key(
        left := KeyList.model_validate(api.request("GET", "/admin/v1/keys"))
    ):
        out.print(f"[yellow]it was the last one for inference: {_without_keys(left)}[/]")
    return revoked.model_dump(mode="json")


def _has_inference_key(keys: KeyList) -> bool:
    return bool(keys.configured) or any(key.scope == "inference" for key in keys.keys)


def _without_keys(keys: KeyList) -> str:
    """Describe the treatment of requests while no key for inference exists."""
    if keys.required:
        return "every request is refused until `thaw keys add NAME` makes one (`thaw up` with THAW_REQUIRE_KEY=false opens the endpoint)"
    return "every client that reaches the endpoint may use it"
