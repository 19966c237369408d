"""`thaw doctor`: what this machine and this mesh lack, and what to do about each."""

from __future__ import annotations

from rich.markup import escape

from thaw.cli.output import Document, Json, screen, verb
from thaw.launcher.checks import Finding, examine
from thaw.launcher.home import Home

_MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[bold red]✗[/]"}


@verb
def doctor(as_json: Json = False) -> Document:
    """Check ports, disk, memory, shared memory, GPUs, NATS, PostgreSQL, versions, and what dead meshes left behind.

    Example: [bold]thaw doctor[/]
    """
    out = screen(as_json)
    findings: list[Finding] = []
    with out.status("looking"):
        for finding in examine(Home.from_environment()):
            findings.append(finding)
            out.print(f"{_MARKS[finding.level]} [bold]{finding.subject}[/]  {escape(finding.text)}")
            if finding.remedy:
                out.print(f"    {escape(finding.remedy)}")
    return {"ok": all(f.level != "fail" for f in findings), "findings": [vars(f) for f in findings]}
