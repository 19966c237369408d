"""`thaw models add|list|show|rm`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.contracts.admin import ModelsAdded, ModelView, ObjectiveView
from shared.contracts.models import ModelSpec
from shared.sizing import need_of
from thaw.cli.api import Api
from thaw.cli.listing import adapters_after_bases, shown_name
from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.park import park_cell
from thaw.cli.paths import local_path, model_directory
from thaw.config import load_config
from thaw.config.faults import format_path, message_of
from thaw.errors import CommandError
from thaw.units import format_size, parse_duration, parse_size, written_duration

app = typer.Typer(help="Models: register, list, show, remove.", no_args_is_help=True)
_FIRST = ("name", "source", "aliases", "base")
"""Options that `thaw models show` shows before the others."""
Name = Annotated[str, typer.Argument(help="Name or alias of a model.", metavar="MODEL")]


@app.command()
@verb
def add(
    name: Annotated[str | None, typer.Argument(help="Name of the model in requests.", metavar="NAME")] = None,
    source: Annotated[
        str | None,
        typer.Argument(
            help=r"A directory in Hugging Face layout, hf://org/name\[@revision], https://…, s3://…, gs://…, az://….",
            metavar="SOURCE",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Register the models of a thaw.yaml instead.")] = None,
    keep_alive: Annotated[
        str | None, typer.Option(help="How long it stays on its device when idle: 30s, 5m, -1 (until evicted).")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it.")] = False,
    alias: Annotated[list[str] | None, typer.Option(help="Another name for it; may be repeated.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context in tokens (the model's own by default).")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Sequences at once.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline stages of an instance, each on a device of its own.")] = None,
    priority: Annotated[int | None, typer.Option(help="-100 to 100; higher is served first.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own Python code.")] = False,
    engine: Annotated[str | None, typer.Option(help="Served by vllm, llamacpp, … instead of the built-in engine.")] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="An argument of the engine, as enable_lora=true; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Device memory of one instance, e.g. 6GiB (computed by default).")] = None,
    base: Annotated[str | None, typer.Option(help="It is a LoRA adapter of this model (SOURCE in PEFT's layout).")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Change the source of a registered model.")] = False,
    as_json: Json = False,
) -> Document:
    """Register a model (or change how it is registered). Nothing is loaded until a request asks for
    it.

    Examples:
    [bold]thaw models add llama ~/models/Llama-3.2-1B-Instruct[/]
    [bold]thaw models add qwen hf://Qwen/Qwen3-0.6B --keep-alive 10m[/]
    [bold]thaw models add sql ~/adapters/sql --base llama[/]
    [bold]thaw models add small ~/models/small.gguf --engine llamacpp[/]
    [bold]thaw models add big ~/models/big --engine vllm --engine-arg tensor_parallel_size=2[/]
    """
    out = screen(as_json)
    if config is not None:
        if name is not None or source is not None:
            raise typer.BadParameter("give NAME and SOURCE, or --config, not both")
        specs = load_config(config).models
    else:
        if name is None or source is None:
            raise typer.BadParameter("give NAME and SOURCE, or --config")
        options: dict[str, Any] = {
            "keep_alive": _keep_alive(keep_alive),
            "pin": pin or None,
            "aliases": tuple(alias) if alias else None,
            "max_model_len": max_model_len,
            "max_concurrency": max_concurrency,
            "stages": stages,
            "priority": priority,
            "trust_remote_code": trust_remote_code or None,
            "base": base,
            "engine": engine,
            "engine_args": _engine_args(engine_arg),
            "memory": _size(memory),
        }
        specs = (_spec(name, source, {k: v for k, v in options.items() if v is not None}),)
    api = Api.find()
    registered = {view.card.name: view.card.spec for view in api.cluster().models}
    changes = changes_of(registered, specs)
    if config is None and not replace:
        _refuse_other_source(registered, specs)
    with out.status("reading the model's files"):
        result = api.add_models(specs, reread=True, replace=replace or config is not None)
    show_difference(out, result, changes)
    shown = {name: changes.get(name, []) for name in result.changed}
    return {**result.model_dump(mode="json", include={"added", "changed", "unchanged", "removed"}), "changes": shown}


def _refuse_other_source(registered: dict[str, ModelSpec], specs: tuple[ModelSpec, ...]) -> None:
    for spec in specs:
        old = registered.get(spec.name)
        if old is not None and old.public_source != spec.public_source:
            raise CommandError(
                f"{spec.name} is registered with another source ({old.public_source}).",
                f"Pass --replace to change it to {spec.public_source}, or take another name.",
                code="conflict",
            )


def changes_of(registered: Mapping[str, ModelSpec], specs: tuple[ModelSpec, ...]) -> dict[str, list[str]]:
    """Return the options that differ from the registered ones, by model."""
    return {spec.name: changed_options(registered[spec.name], spec) for spec in specs if spec.name in registered}


def changed_options(old: ModelSpec, new: ModelSpec) -> list[str]:
    """Return the options that differ, one line each, without possible secrets."""
    lines = []
    for name in ModelSpec.model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if name == "source":
            lines.append(f"source: {old.public_source} → {new.public_source}")
        elif name in ("env", "command", "container", "engine_args"):
            lines.append(f"{name}: changed")
        else:
            lines.append(f"{name}: {option_text(before, name)} → {option_text(after, name)}")
    return lines


_DURATIONS = {"keep_alive", "init_timeout", "ready_timeout", "response_timeout", "timeout", "ttft", "tpot"}
_SIZES = {"memory", "weights_bytes", "kv_bytes_per_token"}


def option_text(value: object, name: str = "") -> str:
    """An option's value as it is written in a thaw.yaml; `name`: of the option."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name == "keep_alive" and value < 0:
            return "-1 (until evicted)"
        if name in _DURATIONS:
            return written_duration(value)
        if name in _SIZES:
            return format_size(value)
    if value is None or value == "" or value == () or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(option_text(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {option_text(v, key)}" for key, v in value.items())
    return str(value)


def _keep_alive(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_duration(text)
    except ValueError as e:
        raise typer.BadParameter(f"--keep-alive: {e}") from e


def _engine_args(texts: list[str] | None) -> dict[str, Any] | None:
    """Return the arguments by name, with values as in a thaw.yaml."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        try:
            if not name or not equals:
                raise ValueError("give NAME=VALUE, as enable_lora=true")
            found[name] = yaml.safe_load(value)
        except (ValueError, yaml.YAMLError) as e:
            raise typer.BadParameter(f"--engine-arg {text}: {str(e).splitlines()[0]}") from e
    return found or None


def _size(text: str | None) -> int | None:
    try:
        return None if text is None else int(parse_size(text))
    except ValueError as e:
        raise typer.BadParameter(f"--memory: {e}") from e


def _spec(name: str, source: str, options: dict[str, Any]) -> ModelSpec:
    if "://" not in source:
        directory = model_directory(source)
        if directory is None:
            path = local_path(source)
            is_file = path.is_file()
            raise CommandError(
                f"{path} is a file, and neither a directory nor a .gguf file." if is_file else f"There is no directory {path}.",
                "SOURCE is a directory in Hugging Face layout (config.json, *.safetensors, tokenizer), hf://org/name, https://…, s3://…, "
                "gs://… or az://….",
                code="invalid_model",
            )
        source = str(directory)
    try:
        return ModelSpec(name=name, source=source, **options)
    except ValidationError as e:
        faults = [(format_path(d["loc"]), message_of(d, ModelSpec)) for d in e.errors()]
        raise typer.BadParameter("; ".join(f"{where}: {what}" if where else what for where, what in faults)) from e


def show_difference(out: Console, result: ModelsAdded, changes: Mapping[str, list[str]] | None = None) -> None:
    """Print the changes of a registration: a line per model and per changed option."""
    for mark, what, names in (
        ("[green]+[/]", "added", result.added),
        ("[yellow]~[/]", "changed", result.changed),
        ("[dim]=[/]", "unchanged", result.unchanged),
        ("[red]-[/]", "removed", result.removed),
    ):
        for name in names:
            out.print(f"{mark} {name} [dim]{what}[/]")
            if what == "changed" and changes is not None:
                for line in changes.get(name) or ["the model's files"]:
                    out.print(f"    {escape(line)}")


@app.command("list")
@verb
def list_models(as_json: Json = False) -> Document:
    """List the registered models.

    Example: [bold]thaw models list[/]
    """
    cluster = Api.find().cluster()
    out = screen(as_json)
    table = Table(box=None, header_style="dim")
    for column in ("MODEL", "ALIASES", "ARCHITECTURE", "WEIGHTS", "NEEDS", "CONTEXT", "PARKED", "SOURCE"):
        table.add_column(column, overflow="fold")
    for view in adapters_after_bases(cluster.models):
        card = view.card
        table.add_row(
            shown_name(card),
            ", ".join(card.spec.aliases),
            escape(card.info.architecture) if card.info.adapter is None else f"LoRA, rank {card.info.adapter.rank}",
            format_size(card.info.weights_bytes),
            format_size(need_of(card).total) if card.spec.base is None else "",
            f"{card.context_length}",
            park_cell(view),
            escape(card.spec.public_source),
        )
    if cluster.models:
        out.print(table)
    else:
        out.print("No model is registered. Add one: [bold]thaw models add NAME SOURCE[/]")
    return {"models": [v.card.model_dump(mode="json") for v in cluster.models]}


@app.command()
@verb
def show(model: Name, as_json: Json = False) -> Document:
    """Show a model's options, its files and the memory that it needs.

    Example: [bold]thaw models show demo-60m[/]
    """
    views = Api.find().cluster().models
    view = find_model(views, model)
    card, out = view.card, screen(as_json)
    need = need_of(card)
    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    spec = card.spec.model_dump(mode="json") | {"source": card.spec.public_source}
    info = card.info.model_dump(mode="json", exclude={"source", "modules"})
    for title, group in (("options", {k: spec[k] for k in _FIRST} | spec), ("from its files", info)):
        table.add_row(f"[bold]{title}[/]")
        for key, value in group.items():
            table.add_row(f"  {key}", escape(option_text(value, key)))
    table.add_row("[bold]in the mesh[/]")
    if adapters := [v.card.name for v in views if v.card.spec.base == card.name]:
        table.add_row("  adapters", ", ".join(adapters))
    table.add_row(
        "  needs",
        f"its base's memory, {format_size(card.info.weights_bytes)} of it"
        if card.spec.base is not None
        else f"{format_size(need.total)}: weights {format_size(need.weights)}, KV {format_size(need.kv)}, "
        f"runtime {format_size(need.runtime)}, converted {format_size(need.converted)}"
        + (f"; its executor {format_size(need.executor)}, once for each device" if need.executor else ""),
    )
    table.add_row("  generation", str(card.generation))
    if view.objective is not None:
        table.add_row("  objective", _objective_text(view.objective))
    if view.error:
        table.add_row("  last error", f"[red]{escape(view.error)}[/]")
    out.print(table)
    return {**view.model_dump(mode="json"), "needs": {**vars(need), "total": need.total}}


def _objective_text(objective: ObjectiveView) -> str:
    share = f"met by {objective.met} of {objective.total} requests of the last day ({objective.percentile:.1%} should)"
    if objective.required <= 0:
        return f"[green]{share}[/]"
    return f"[yellow]{share}; {math.ceil(objective.required)} more in a row until it complies[/]"


def find_model(views: tuple[ModelView, ...], name: str) -> ModelView:
    """The model of that name or alias; raises `CommandError`."""
    for view in views:
        if name == view.card.name or name in view.card.spec.aliases:
            return view
    known = ", ".join(v.card.name for v in views) or "none"
    raise CommandError(f"No model {name!r} is registered.", f"Registered: {known}.", code="model_not_found")


@app.command("rm")
@verb
def remove(
    model: Name,
    with_adapters: Annotated[bool, typer.Option("--with-adapters", help="And its LoRA adapters.")] = False,
    as_json: Json = False,
) -> Document:
    """Remove a model from the mesh; its files stay. Running requests finish first.

    Example: [bold]thaw models rm demo-60m[/]
    """
    Api.find().remove_model(model, with_adapters=with_adapters)
    screen(as_json).print(f"[green]✓[/] {model} is removed")
    return {"removed": model}
