"""`thaw keys add|list|change|rotate|revoke|log`."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, get_args
from urllib.parse import quote

import typer
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from shared.contracts.keys import (
    MAX_DEVICE_SECONDS,
    MAX_PRIORITY,
    ApiKey,
    ChangeKey,
    KeyList,
    KeyLog,
    KeySpending,
    NewKey,
    RotateKey,
    Scope,
)
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError
from thaw.units import parse_duration

app = typer.Typer(help="API keys: add, list, change, rotate, revoke, log.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the key, for example its user.", metavar="NAME")]
Models = Annotated[
    list[str] | None, typer.Option("--models", help="Model or pattern that the key may use, e.g. 'qwen*'; may be repeated.")
]
Rpm = Annotated[int | None, typer.Option("--rpm", min=0, help="Requests per minute, over all gateways; 0: no limit.")]
Tpm = Annotated[int | None, typer.Option("--tpm", min=0, help="Prompt and completion tokens per minute; 0: no limit.")]
Concurrent = Annotated[int | None, typer.Option("--concurrent", min=0, help="Requests at the same time; 0: no limit.")]
Priority = Annotated[
    int | None,
    typer.Option(
        "--priority", min=-MAX_PRIORITY, max=MAX_PRIORITY, help="Highest priority that its requests may ask for; 0 by default."
    ),
]
Weight = Annotated[
    float | None, typer.Option("--weight", min=0.001, max=1000, help="Share of a busy model relative to other keys; 1 by default.")
]
DayTokens = Annotated[
    int | None, typer.Option("--budget-day-tokens", min=0, help="Tokens per day (UTC), over all gateways; 0: no budget.")
]
MonthTokens = Annotated[int | None, typer.Option("--budget-month-tokens", min=0, help="Tokens per month (UTC); 0: no budget.")]
DayDeviceSeconds = Annotated[
    float | None,
    typer.Option(
        "--budget-day-device-seconds",
        min=0,
        max=MAX_DEVICE_SECONDS,
        help="Seconds of devices per day: computing and cold starts; 0: no budget.",
    ),
]
MonthDeviceSeconds = Annotated[
    float | None,
    typer.Option(
        "--budget-month-device-seconds", min=0, max=MAX_DEVICE_SECONDS, help="Seconds of devices per month, likewise; 0: no budget."
    ),
]
DayMoney = Annotated[
    str | None, typer.Option("--budget-day-money", help="Money per day, in the currency of the mesh's prices; 0: no budget.")
]
MonthMoney = Annotated[str | None, typer.Option("--budget-month-money", help="Money per month, likewise; 0: no budget.")]
Expires = Annotated[
    str | None, typer.Option("--expires", help="How long the key is valid, e.g. 12h or 30d, or a date YYYY-MM-DD; never: always.")
]


@app.command()
@verb
def add(
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="For the admin API instead of inference.")] = False,
    scope: Annotated[str | None, typer.Option("--scope", help="inference (default), read-only or admin.")] = None,
    models: Models = None,
    rpm: Rpm = None,
    tpm: Tpm = None,
    concurrent: Concurrent = None,
    budget_day_tokens: DayTokens = None,
    budget_month_tokens: MonthTokens = None,
    budget_day_device_seconds: DayDeviceSeconds = None,
    budget_month_device_seconds: MonthDeviceSeconds = None,
    budget_day_money: DayMoney = None,
    budget_month_money: MonthMoney = None,
    priority: Priority = None,
    weight: Weight = None,
    expires: Expires = None,
    as_json: Json = False,
) -> Document:
    """Add an API key and show it once. As soon as a key exists, inference (or the admin API) needs
    one.

    Examples:
    [bold]thaw keys add alice[/]
    [bold]thaw keys add ci --models 'qwen*' --rpm 60 --tpm 100000 --concurrent 4 --expires 30d[/]
    [bold]thaw keys add team-a --budget-day-tokens 2000000 --budget-month-money 50[/]
    [bold]thaw keys add team-b --budget-day-device-seconds 3600[/]
    [bold]thaw keys add dashboard --scope read-only[/]
    """
    if admin and scope not in (None, "admin"):
        raise typer.BadParameter("give --admin or --scope, not both")
    chosen = "admin" if admin else scope or "inference"
    if chosen not in get_args(Scope):
        raise typer.BadParameter(f"{chosen!r} is no scope; allowed: {', '.join(get_args(Scope))}")
    # Made here, so that only its hash ever reaches the mesh.
    key, digest = _generate()
    try:
        asked = NewKey.model_validate(
            {"name": name, "scope": chosen, "sha256": digest}
            | _limits(models, rpm, tpm, concurrent, expires)
            | _budgets(budget_day_tokens, budget_month_tokens, budget_day_money, budget_month_money)
            | _device_seconds(budget_day_device_seconds, budget_month_device_seconds)
            | _shares(priority, weight)
        )
    except ValidationError as e:
        if all(fault["loc"] != ("name",) for fault in e.errors()):
            raise
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
    """List the API keys of the mesh with their limits.

    Example: [bold]thaw keys list[/]
    """
    found = KeyList.model_validate(Api.find().request("GET", "/admin/v1/keys"))
    out = screen(as_json)
    table = Table(box=None, header_style="dim")
    columns: list[tuple[str, Callable[[ApiKey], str]]] = [
        ("NAME", lambda key: key.name),
        ("SCOPE", lambda key: key.scope),
        ("MODELS", lambda key: escape(", ".join(key.models)) or "all"),
        ("RPM", lambda key: _or_dash(key.requests_per_minute)),
        ("TPM", lambda key: _or_dash(key.tokens_per_minute)),
        ("CONCURRENT", lambda key: _or_dash(key.concurrent_requests)),
        ("BUDGETS", lambda key: _describe_budgets(key, found.spending.get(key.name, KeySpending()))),
        ("PRIORITY", lambda key: _or_dash(key.priority)),
        ("WEIGHT", lambda key: _or_dash(key.weight)),
        ("MADE", lambda key: _time(key.created)),
        ("EXPIRES", lambda key: "-" if key.expires is None else _time(key.expires)),
    ]
    always = ("NAME", "SCOPE", "MODELS", "MADE", "EXPIRES")
    shown = [c for c in columns if c[0] in always or any(c[1](key) != "-" for key in found.keys)]
    for column, _ in shown:
        table.add_column(column)
    for key in found.keys:
        table.add_row(*(cell(key) for _, cell in shown))
    out.print(table)
    if found.configured:
        out.print(f"[dim]and {found.configured} from the gateway's settings[/]")
    if not _has_inference_key(found):
        out.print(f"[dim]no key for inference: {_without_keys(found)}[/]")
    return found.model_dump(mode="json")


@app.command()
@verb
def change(
    name: Name,
    models: Models = None,
    rpm: Rpm = None,
    tpm: Tpm = None,
    concurrent: Concurrent = None,
    budget_day_tokens: DayTokens = None,
    budget_month_tokens: MonthTokens = None,
    budget_day_device_seconds: DayDeviceSeconds = None,
    budget_month_device_seconds: MonthDeviceSeconds = None,
    budget_day_money: DayMoney = None,
    budget_month_money: MonthMoney = None,
    priority: Priority = None,
    weight: Weight = None,
    expires: Expires = None,
    as_json: Json = False,
) -> Document:
    """Change the limits of an API key at once, on every gateway. Other limits keep their value.

    Example: [bold]thaw keys change ci --rpm 120 --expires never[/]
    """
    limits = (
        _limits(models, rpm, tpm, concurrent, expires)
        | _budgets(budget_day_tokens, budget_month_tokens, budget_day_money, budget_month_money)
        | _device_seconds(budget_day_device_seconds, budget_month_device_seconds)
        | _shares(priority, weight)
    )
    if not limits:
        raise typer.BadParameter("give at least one limit to change")
    changed = _request("PATCH", name, ChangeKey.model_validate(limits).model_dump_json(exclude_unset=True))
    screen(as_json).print(f"[green]✓[/] {changed.name} is changed on every gateway")
    return changed.model_dump(mode="json")


@app.command()
@verb
def rotate(
    name: Name,
    overlap: Annotated[str, typer.Option("--overlap", help="How long the old key stays valid, e.g. 1h; 0: not at all.")] = "1h",
    as_json: Json = False,
) -> Document:
    """Replace an API key by a new one with the same limits, and show it once.

    Example: [bold]thaw keys rotate alice --overlap 24h[/]
    """
    key, digest = _generate()
    asked = RotateKey(sha256=digest, overlap_s=_seconds(overlap, "--overlap"))
    made = _request("POST", name, asked.model_dump_json(), "/rotate")
    out = screen(as_json)
    until = f"; the old key is valid for {overlap}" if asked.overlap_s else ""
    out.print(f"[green]✓[/] {made.name} has a new key{until}. Only its hash is kept, so write it down now:")
    out.print(f"  [bold]{key}[/]", soft_wrap=True)
    return made.model_dump(mode="json") | {"key": key}


@app.command("log")
@verb
def show_log(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Entries to show at most.")] = 100,
    as_json: Json = False,
) -> Document:
    """Show who changed which API key, the latest change first.

    Example: [bold]thaw keys log --limit 20[/]
    """
    found = KeyLog.model_validate(Api.find().request("GET", "/admin/v1/key-log", limit=str(limit)))
    table = Table(box=None, header_style="dim")
    for column in ("TIME", "BY", "FROM", "ACTION", "KEY", "DETAILS"):
        table.add_column(column)
    for entry in found.entries:
        details = escape(", ".join(f"{name}={value}" for name, value in entry.details.items() if name not in ("name", "created")))
        table.add_row(_time(entry.at), entry.actor, entry.address, entry.action, entry.key, details)
    screen(as_json).print(table)
    return found.model_dump(mode="json")


@app.command()
@verb
def revoke(name: Name, as_json: Json = False) -> Document:
    """Revoke an API key at once, on every gateway. Its active requests end with an error.

    Example: [bold]thaw keys revoke alice[/]
    """
    api, out = Api.find(), screen(as_json)
    revoked = _request("DELETE", name)
    out.print(f"[green]✓[/] {revoked.name} is not valid any more")
    if revoked.scope == "inference" and not _has_inference_key(
        left := KeyList.model_validate(api.request("GET", "/admin/v1/keys"))
    ):
        out.print(f"[yellow]it was the last one for inference: {_without_keys(left)}[/]")
    return revoked.model_dump(mode="json")


def _generate() -> tuple[str, str]:
    """Make a key; return it and its hash."""
    key = f"sk-thaw-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


def _request(method: str, name: str, body: str | None = None, action: str = "") -> ApiKey:
    return ApiKey.model_validate(Api.find().request(method, f"/admin/v1/keys/{quote(name, safe='')}{action}", body))


def _limits(
    models: list[str] | None, rpm: int | None, tpm: int | None, concurrent: int | None, expires: str | None
) -> dict[str, object]:
    """Return the limits that the options give; an option that is not given has no entry."""
    limits: dict[str, object] = {"models": tuple(models)} if models else {}
    if models == ["*"]:
        limits["models"] = ()
    for field, value in (("requests_per_minute", rpm), ("tokens_per_minute", tpm), ("concurrent_requests", concurrent)):
        if value is not None:
            limits[field] = value or None
    if expires is not None:
        limits["expires"] = _expiry(expires)
    return limits


def _budgets(day_tokens: int | None, month_tokens: int | None, day_money: str | None, month_money: str | None) -> dict[str, object]:
    """Return the budgets of tokens and money that the options give; 0 removes one."""
    found: dict[str, object] = {}
    for field, tokens in (("tokens_per_day", day_tokens), ("tokens_per_month", month_tokens)):
        if tokens is not None:
            found[field] = tokens or None
    for field, option, money in (
        ("money_per_day", "--budget-day-money", day_money),
        ("money_per_month", "--budget-month-money", month_money),
    ):
        if money is not None:
            found[field] = _amount(money, option) or None
    return found


def _device_seconds(day: float | None, month: float | None) -> dict[str, object]:
    """Return the budgets of device-seconds that the options give; 0 removes one."""
    given = (("device_seconds_per_day", day), ("device_seconds_per_month", month))
    return {field: seconds or None for field, seconds in given if seconds is not None}


def _shares(priority: int | None, weight: float | None) -> dict[str, object]:
    return {name: value for name, value in (("priority", priority), ("weight", weight)) if value is not None}


def _amount(text: str, option: str) -> Decimal:
    try:
        amount = Decimal(text)
        is_amount = amount.is_finite() and amount >= 0 and amount == round(amount, 6)
    except InvalidOperation:  # no number, or too large to be rounded
        is_amount = False
    if not is_amount:
        raise CommandError(f"{option} {text!r} is no amount of money.", "Give a number with at most six decimals, e.g. 25 or 0.50.")
    return amount


def _describe_budgets(key: ApiKey, spent: KeySpending) -> str:
    """Format what a key has used of its budgets."""
    given = (
        (spent.day_tokens, key.tokens_per_day, "tokens/day"),
        (spent.month_tokens, key.tokens_per_month, "tokens/month"),
        (round(spent.day_device_s, 1), _format_number(key.device_seconds_per_day), "device-seconds/day"),
        (round(spent.month_device_s, 1), _format_number(key.device_seconds_per_month), "device-seconds/month"),
        (round(spent.day_money, 2), key.money_per_day, "money/day"),
        (round(spent.month_money, 2), key.money_per_month, "money/month"),
    )
    return ", ".join(f"{used} of {budget} {unit}" for used, budget, unit in given if budget is not None) or "-"


def _expiry(text: str) -> int | None:
    if text == "never":
        return None
    try:
        at = int(datetime.strptime(text, "%Y-%m-%d").astimezone().timestamp())
    except ValueError:
        at = int(time.time()) + _seconds(text, "--expires")
    if at <= time.time():
        raise CommandError(
            f"--expires {text} is not in the future.",
            "Give a later date, or a duration such as 30d. `thaw keys revoke NAME` ends a key now.",
        )
    return at


def _seconds(text: str, option: str) -> int:
    if text.strip() == "0":
        return 0
    try:
        return int(parse_duration(text))
    except ValueError as e:
        raise CommandError(f"{option} {text!r} is no duration.", "Give e.g. 30m, 12h or 30d.") from e


def _format_number(value: float | None) -> str | None:
    return None if value is None else f"{value:.12g}"


def _or_dash(value: float | None) -> str:
    return _format_number(value) or "-"


def _time(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    except (OSError, OverflowError, ValueError):  # outside the range of the C library
        return "far in the future"


def _has_inference_key(keys: KeyList) -> bool:
    return bool(keys.configured) or any(key.scope == "inference" for key in keys.keys)


def _without_keys(keys: KeyList) -> str:
    """Describe the treatment of requests while no key for inference exists."""
    if keys.required:
        return "every request is refused until `thaw keys add NAME` makes one (`thaw up` with THAW_REQUIRE_KEY=false opens the endpoint)"
    return "every client that reaches the endpoint may use it"
