"""`thaw up` and `thaw down`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from shared.contracts.admin import ModelsAdded
from shared.contracts.models import ModelSpec
from thaw.cli import demo as demos
from thaw.cli import exposure
from thaw.cli.api import Api
from thaw.cli.apply import apply_keys, apply_models, await_ready, differences
from thaw.cli.output import Document, Json, screen, verb
from thaw.cli.park import follow_parking
from thaw.cli.paths import program
from thaw.config import ThawFile, load_config
from thaw.errors import CommandError
from thaw.launcher import control
from thaw.launcher.home import Home
from thaw.launcher.leftovers import describe
from thaw.launcher.plan import MeshPlan, NodePlan, read_plan
from thaw.launcher.planning import Wanted, make_plan
from thaw.launcher.preflight import SERVICES_BYTES, available_memory, check_room
from thaw.launcher.processes import Identity
from thaw.launcher.server_checks import check_servers
from thaw.launcher.status import MeshStatus, running_status


@verb
def up(
    demo: Annotated[bool, typer.Option("--demo", help="Create three demo models and send each a request.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave the mesh running in the background.")] = False,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=64, help="Nodes to run on this machine (1, or those of mesh.nodes).")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A thaw.yaml: its mesh section and its models.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the endpoint (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the endpoint (8080).")] = None,
    as_json: Json = False,
) -> Document | None:
    """Start the mesh on this machine: NATS, PostgreSQL, gateway, scheduler, and a nodeagent with a
    loader for each node.

    Stays until Ctrl-C, which stops everything, or leaves it running with --detach. Run again while
    it runs, it applies --config.

    Examples:
    [bold]thaw up --demo --detach[/]
    [bold]thaw up --config thaw.yaml --nodes 2[/]
    """
    # A shell starts a script's background processes with SIGINT ignored; here Ctrl-C must always
    # work.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out, home = screen(as_json), Home.from_environment()
    file = load_config(config) if config is not None else None
    asked = file or ThawFile()
    wanted = Wanted(host=host, port=port, nodes=nodes, mesh=asked.mesh, scheduler=asked.scheduler, prices=asked.prices)
    home.create(wanted.node_names)
    with control.starting(home, lambda: out.print("waiting for another `thaw up`, which starts the mesh or applies its file")):
        if (status := running_status(home)) is not None and status.stopping:
            with out.status("waiting for the mesh that is just stopping"):
                control.await_stopped(status)
            status = None
        # Also for a running mesh: files that are applied at once would leave models of both.
        supervisor: Identity | None = None
        if status is None:
            supervisor, document = _start(home, file, wanted, demo, out, detach)
        else:
            document = _apply_to_running(home, file, wanted, demo, out)
    if detach or supervisor is None:
        if not as_json:
            _follow(Api.from_home(home), out)
        return document
    try:
        if as_json:
            print(json.dumps(document), flush=True)
        out.print("\n[dim]Ctrl-C stops the mesh.[/]")
        if not as_json:
            follow_parking(Api.from_home(home), out)
        _stay(home, supervisor)
        out.print("The mesh was stopped.")
    except KeyboardInterrupt:
        _stop(home, out)
    return None


def _follow(api: Api, out: Console) -> None:
    """Report the running mesh, which stays up when the command is interrupted."""
    try:
        follow_parking(api, out)
    except KeyboardInterrupt:
        out.print(f"[dim]Models are still being parked; `{program()} ps` shows their progress.[/]")


def _apply_to_running(home: Home, file: ThawFile | None, wanted: Wanted, demo: bool, out: Console) -> Document:
    api = Api.from_home(home)
    out.print(f"The mesh is running already: [bold]{api.url}/v1[/]  [dim](`{program()} down` stops it)[/]")
    out.print(f"Its console is at [bold]{api.url}/ui[/]")
    waiting = differences(home, wanted)
    for key in waiting:
        out.print(f"[yellow]{key} differs from what is running; `{program()} down` and `{program()} up` again apply it.[/]")
    document: Document = {
        "endpoint": f"{api.url}/v1",
        "console": f"{api.url}/ui",
        "already_running": True,
        "restart_needed": waiting,
    }
    await_ready(api, home, out)
    document["models"] = _apply_file(api, home, file, out)
    document["warnings"] = _warn(api, read_plan(home), out)
    if demo:
        specs = demos.make_models(home, out)
        apply_models(api, home, specs, out, declared=False)
        with demos.usable_key(api):
            document["demo"] = demos.ask_each(api, specs, out)
    return document


def _start(home: Home, file: ThawFile | None, wanted: Wanted, demo: bool, out: Console, detach: bool) -> tuple[Identity, Document]:
    """Start the mesh; on an error stop every process that was not running before.

    With `detach`, a mesh that is ready keeps running if a model cannot be registered.
    """
    control.check_unused(home, wanted.host_or_default, wanted.port_or_default)
    specs: tuple[ModelSpec, ...] = ()
    budget = 0
    if demo:
        check_room(home.root, memory=SERVICES_BYTES, shared=0, disk=demos.DISK_BYTES, purpose="The demo")
        specs = demos.make_models(home, out)
        budget = demos.budget_for_two(specs)
        check_room(home.root, memory=SERVICES_BYTES + budget, shared=budget, disk=0, purpose="The demo")
    else:
        check_room(home.root, memory=SERVICES_BYTES, shared=0, disk=64 * 1024 * 1024, purpose="A mesh")
    plan = make_plan(home, wanted, available_memory(), demo_budget=budget or None)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    survives = control.has_survivors(home, plan)
    if not survives:
        check_servers(plan)
    supervisor = _launch(home, plan, out, survives=survives)
    try:
        return supervisor, _furnish(home, file, plan, specs, budget, out)
    except KeyboardInterrupt:
        _stop(home, out)
        raise
    except Exception:
        if not (detach or survives):
            _stop(home, out)
        raise


def _furnish(
    home: Home, file: ThawFile | None, plan: MeshPlan, specs: tuple[ModelSpec, ...], budget: int, out: Console
) -> Document:
    """Register the models in a new mesh, and run the demo if there are demo `specs`."""
    api = Api.from_home(home)
    document: Document = {
        "endpoint": f"{plan.gateway_url}/v1",
        "console": f"{plan.gateway_url}/ui",
        "already_running": False,
        "nodes": _dump_nodes(plan.nodes),
    }
    document["models"] = _apply_file(api, home, file, out)
    if specs:
        apply_models(api, home, specs, out, declared=False)
        with demos.usable_key(api):
            document["demo"] = demos.ask_each(api, specs, out)
        demos.show_what_next(api, home, specs, budget, out)
    else:
        out.print(f"\n  endpoint  [bold]{plan.gateway_url}/v1[/]")
        out.print(f"  console   [bold]{plan.gateway_url}/ui[/]   (its admin key is in {home.endpoints_file})")
        if file is None or not file.models:
            out.print(
                f"  next      {program()} models add NAME SOURCE   (a directory in Hugging Face layout, hf://org/name, https://…, s3://…)"
            )
    document["warnings"] = _warn(api, plan, out)
    return document


def _warn(api: Api, plan: MeshPlan, out: Console) -> list[str]:
    """Say loudly, and last, if strangers can use the endpoint."""
    finding = exposure.of_running(api, plan)
    if finding.level == "ok":
        return []
    out.print(f"\n[bold red]![/] [bold]{finding.text}[/]\n  {finding.remedy}")
    return [finding.text]


def _apply_file(api: Api, home: Home, file: ThawFile | None, out: Console) -> Document:
    """Apply the file's models and API keys to the mesh.

    Without a file they are unchanged, also those of an earlier start's file.
    """
    if file is None:
        return ModelsAdded().model_dump(mode="json", exclude={"v", "kind"})
    # Keys first: until one exists, the endpoint may be open.
    apply_keys(api, home, file.keys, out)
    return apply_models(api, home, file.models, out)


def _dump_nodes(nodes: tuple[NodePlan, ...]) -> list[dict[str, Any]]:
    return [n.model_dump(mode="json") for n in nodes]


def _launch(home: Home, plan: MeshPlan, out: Console, *, survives: bool) -> Identity:
    """Start and wait until the mesh is ready.

    Whatever goes wrong before that, nothing is left running; but a mesh that survived its
    supervisor and is taken over continues to serve.
    """
    supervisor: Identity | None = None
    shown: dict[str, str] = {}
    try:
        with out.status("starting") as status:
            if not out.is_terminal:
                own = (("NATS", plan.nats_url), ("PostgreSQL", plan.database_url))
                started = [name for name, external in own if external is None]
                out.print(f"starting {', '.join(started)}{' and ' if started else ''}the services")

            def report(now: MeshStatus) -> None:
                for name, service in now.services.items():
                    if service.status == "ready" and shown.get(name) != "ready":
                        shown[name] = "ready"
                left = [n for n, s in now.services.items() if s.status != "ready"]
                status.update(f"starting {', '.join(left)}" if left else "waiting for the services to find each other")

            supervisor = control.launch(home, plan)
            control.await_running(home, supervisor, report)
            await_ready(Api.from_home(home), home, out, plan)
        names = ", ".join(n.name for n in plan.nodes)
        out.print(
            f"[green]✓[/] the mesh is up: {len(shown)} processes, {len(plan.nodes)} node{'s' if len(plan.nodes) > 1 else ''} ({names})"
        )
    except BaseException:  # an interrupt, or a full disk, too
        if not survives:
            control.stop(home, lambda _: None)
        raise
    return supervisor


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _stay(home: Home, supervisor: Identity) -> None:
    """Wait until the mesh ends by itself.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM, or the terminal is gone.
    """
    try:
        process = psutil.Process(supervisor.pid)
        while supervisor.is_alive():
            try:
                process.wait(timeout=1.0)
            except psutil.TimeoutExpired:
                continue
    except psutil.NoSuchProcess:
        pass
    if home.endpoints_file.exists():
        raise CommandError(
            "The supervisor was killed; its services still run.",
            "`thaw up` takes them over, `thaw down` stops them.",
            code="supervisor_gone",
        )


@verb
def down(as_json: Json = False) -> Document:
    """Stop the mesh of this machine, and remove what a crash has left of it.

    Example: [bold]thaw down[/]
    """
    home, out = Home.from_environment(), screen(as_json)
    was_running = running_status(home) is not None
    return {"was_running": was_running, "left_behind": _stop(home, out)}


def _stop(home: Home, out: Console) -> dict[str, Any]:
    was_running = running_status(home) is not None
    with out.status("stopping") as status:

        def report(now: MeshStatus) -> None:
            left = [n for n, s in now.services.items() if s.status != "stopped"]
            status.update(f"stopping {', '.join(left)}")

        left = control.stop(home, report)
    if left:
        out.print(f"[yellow]cleaned up {len(left.processes)} processes and {len(left.segments)} shared-memory segments[/]")
    out.print("[green]✓[/] the mesh is down" if was_running or left else "No mesh was running.")
    return describe(left)
