"""`thaw doctor`: what this machine and this mesh lack, and what to do about each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import chain
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shared.contracts.findings import Diagnosis, Finding
from thaw.cli import exposure
from thaw.cli.api import Api
from thaw.cli.mesh_checks import examine_mesh, examine_remote
from thaw.cli.output import Document, Json, screen, verb
from thaw.launcher import swap
from thaw.launcher.checks import examine
from thaw.launcher.home import Home
from thaw.launcher.memory_checks import NodeAudit, audit_nodes, findings_of
from thaw.launcher.status import running_status
from thaw.units import format_size

_MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[bold red]✗[/]"}


@verb
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Set up swap, which suspending engines on cpu needs (as root).")] = False,
    as_json: Json = False,
) -> Document:
    """Check ports, disk, memory, swap, shared memory, GPUs, NATS, PostgreSQL, versions, who may use
    the endpoint, what dead meshes left behind, and the conservation of device memory.

    Example: [bold]thaw doctor[/]
    """
    out = screen(as_json)
    home = Home.from_environment()
    fixed = _set_up_swap(home, out) if fix else None
    findings: list[Finding] = []
    audits: list[NodeAudit] = []
    with out.status("looking"):
        audits += audit_nodes(home) if running_status(home) is not None else ()
        for finding in chain(_findings(home), findings_of(audits)):
            findings.append(finding)
            out.print(f"{_MARKS[finding.level]} [bold]{finding.subject}[/]  {escape(finding.text)}")
            for line in filter(None, (finding.meaning, finding.remedy)):
                out.print(f"    {escape(line)}")
    return {
        **Diagnosis.from_findings(findings).model_dump(mode="json"),
        "audits": {a.node: [d.model_dump(mode="json") for d in a.devices] for a in audits},
        "fixed": fixed,
    }


def _findings(home: Home) -> Iterable[Finding]:
    """Return the findings about this machine, or about the mesh behind a gateway.

    The latter applies if THAW_URL names a gateway and no mesh of `thaw up` runs here.
    """
    is_running = running_status(home) is not None
    if os.environ.get("THAW_URL") and not is_running:
        return examine_remote(Api.find(home))
    own = chain(examine(home), (exposure.of_home(home),))
    return chain(own, examine_mesh(Api.from_home(home))) if is_running else own


def _set_up_swap(home: Home, out: Console) -> list[str]:
    """Set up swap if there is none, and return the descriptions of the changes."""
    if swap.swap().total >= swap.LEAST:
        out.print("Nothing to fix: there is swap already.")
        return []
    path, size = swap.swap_file(home.root), swap.wanted_bytes(home.existing)
    with out.status(f"making a swap file of {format_size(size)}"):
        swap.set_up(path, size)
    done = f"{format_size(size)} of swap in {path}, until the next boot (`swapoff {path}` takes it away)"
    out.print(f"[green]✓[/] {escape(done)}")
    return [done]
