"""Implement `thaw explain`: placement decisions and their reasons.

The subject is a model, a request or a plan. The command also shows hypothetical decisions.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.contracts.admin import AssumeBudget, AssumeNode, AssumeNoNode, Assumption, ExplainPlan, PlanExplained, QueuePlace
from shared.contracts.plans import Candidate, PlanRecord
from thaw.cli.api import Api
from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError
from thaw.units import format_duration, format_size, parse_size

_FORMS = "add-node=NAME[:DEVICES[:BYTES]], budget=NODE/DEVICE:BYTES or drop-node=NAME"


@verb
def explain(
    about: Annotated[
        str, typer.Argument(help="A model, a request's id (the x-request-id of its answer), or a plan.", metavar="SUBJECT")
    ],
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help=f"Explain for a changed cluster, without acting:  {_FORMS}.", metavar="CHANGE"),
    ] = None,
    as_json: Json = False,
) -> Document:
    """Explain a placement decision: the chosen device, the cost of every option, and the outcome.

    Examples:
    [bold]thaw explain demo-250m[/]
    [bold]thaw explain demo-250m --what-if add-node=big:8:80GB[/]
    """
    asked = ExplainPlan(about=about, what_if=tuple(map(assumption, what_if or ())))
    try:
        found = Api.find().explain(asked)
    except CommandError as e:
        if e.code == "not_found" and not what_if:
            e.remedy = "A model without a request has no plan yet; `thaw models list` shows those that are registered."
        raise
    out = screen(as_json)
    _show(out, found)
    extra = found.model_dump(mode="json", include={"queue", "request", "running", "assumed", "others", "runs_already"})
    return {**found.plan.model_dump(mode="json"), "took_error_ms": _error_ms(found.plan), **extra}


def assumption(text: str) -> Assumption:
    """One --what-if. Raises `CommandError` with what is wrong."""
    kind, _, value = text.partition("=")
    try:
        match kind:
            case "add-node" if value:
                name, *rest = value.split(":")
                devices, size, *_ = (*rest, "", "")
                if not name or len(rest) > 2:
                    raise ValueError("say NAME, NAME:DEVICES or NAME:DEVICES:BYTES")
                return AssumeNode(node=name, devices=int(devices) if devices else None, nbytes=parse_size(size) if size else None)
            case "budget" if "/" in value:
                node, _, rest_of = value.partition("/")
                device, colon, size = rest_of.rpartition(":")
                if not colon:
                    raise ValueError("the bytes are missing, as in node-1/cuda:0:80GB")
                return AssumeBudget(node=node, device=device, nbytes=parse_size(size))
            case "drop-node" if value:
                return AssumeNoNode(node=value)
    except ValidationError as e:
        faults = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in e.errors())
        raise CommandError(f"--what-if {text} is not understood: {faults}", f"Write {_FORMS}.", code="invalid_request") from e
    except ValueError as e:
        raise CommandError(f"--what-if {text} is not understood: {e}", f"Write {_FORMS}.", code="invalid_request") from e
    raise CommandError(f"--what-if {text} is not understood.", f"Write {_FORMS}.", code="invalid_request")


def _show(out: Console, found: PlanExplained) -> None:
    plan = found.plan
    if found.request is not None:
        r = found.request
        waited = f", first token after {format_duration(r.ttft_ms / 1e3)}" if r.ttft_ms is not None else ""
        met = "" if r.cold else "; it met an instance that was ready, started by this plan"
        out.print(f"request {escape(r.request_id)} for {escape(r.model)}: status {r.status}{waited}{met}")
    if (running := found.running) is not None:
        where = f"runs on {running.instance_id}, started by this plan" if running.instance_id else "waits for an instance"
        out.print(f"request {escape(running.request_id)} for {escape(running.model)}: {escape(where)}")
    for assumed in found.assumed:
        out.print(f"[cyan]supposing[/] {escape(assumed)}")
    if plan.created and not found.assumed:
        ago = format_duration(max(0.0, time.time() - plan.created))
        origin = f"{plan.plan_id}, asked by {plan.trigger}, {ago} ago"
    else:
        origin = "hypothetical: nothing was done"
    way = "nothing starts" if found.runs_already else plan.way.replace("_", " ")
    out.print(f"[bold]{escape(plan.model)}[/]: {way}  [dim]{origin}[/]")
    if plan.reason:
        out.print(f"  {escape(plan.reason)}")
    if not found.assumed:
        out.print(outcome(plan))
    if (queue := found.queue) is not None:
        out.print(escape(queue_line(queue)))
    _candidates(out, plan)
    for other in found.others:
        at = f" on {other.chosen.node}" if other.chosen is not None else ""
        out.print(f"  before it would start: {escape(other.model)}{escape(at)}")


def queue_line(queue: QueuePlace) -> str:
    """A model's place among the models that wait for room."""
    place = f", number {queue.position} of {queue.length} models that wait" if queue.length > 1 else ""
    before = f" (behind {', '.join(queue.before)})" if queue.before else ""
    requests = f"{queue.waiting} request{'s' if queue.waiting != 1 else ''} waiting"
    return f"  waits for room{place}{before}: {requests}, the longest for {format_duration(queue.since_ms / 1e3)}"


def _candidates(out: Console, plan: PlanRecord) -> None:
    if not plan.candidates:
        return
    table = Table(box=None, header_style="dim")
    for column in (
        "",
        "NODE",
        "DEVICE",
        "WAY",
        "FROM",
        "PREDICTED",
        "BY PHASE",
        "NEEDS",
        "FREE",
        "WOULD LEAVE",
        "NOT TAKEN BECAUSE",
    ):
        table.add_column(column, overflow="fold")
    for candidate in plan.candidates:
        is_chosen = plan.chosen is not None and _place(candidate) == _place(plan.chosen)
        table.add_row(*_cells(candidate, chosen=is_chosen))
    out.print(table)


def _place(candidate: Candidate) -> tuple[object, ...]:
    return candidate.node, candidate.device_ids, candidate.ready_by, candidate.stages


def _error_ms(plan: PlanRecord) -> float | None:
    return plan.chosen.error_ms if plan.chosen is not None else None


_MOST = 0.95
"""A prediction counts from the decision, which is reported as late if less than this share of the
time was left after it.
"""


def outcome(plan: PlanRecord) -> str:
    """Return the result of the plan, in a line or two."""
    text = f"  outcome: {plan.outcome}"
    if plan.measured_ms is not None:
        text += f" after {format_duration(plan.measured_ms / 1e3)}"
        if plan.chosen is not None and plan.chosen.took_ms is not None and plan.chosen.took_ms < _MOST * plan.measured_ms:
            text += f", {format_duration(plan.chosen.took_ms / 1e3)} from the decision"
    if plan.chosen is not None and plan.chosen.predicted_ms is not None:
        text += f" [dim](predicted {format_duration(plan.chosen.predicted_ms / 1e3)}"
        if (error := _error_ms(plan)) is not None:
            text += f", {format_duration(abs(error) / 1e3)} {'too little' if error > 0 else 'too much'}"
        text += ")[/]"
    if plan.chosen is not None and plan.chosen.cleared_ms is not None:
        count, seconds = len(plan.chosen.victims), format_duration(plan.chosen.cleared_ms / 1e3)
        text += f"\n  cleared: {count} instance{'s' if count > 1 else ''} left for it within {seconds}"
    if plan.caused_by is not None:
        text += f"\n  caused by: {escape(plan.caused_by)}, which took the memory of {escape(plan.model)}"
    measured = plan.measured_phases
    if measured:
        text += f"\n  measured: [dim]{_phases(measured)}[/]"
    return text + (f"\n  [red]{escape(plan.error.message)}[/]" if plan.error else "")


def _phases(ms: dict[str, float]) -> str:
    """Return the phases that matter, the longest first."""
    longest = sorted(((v, k) for k, v in ms.items() if v >= 1), reverse=True)[:5]
    return ", ".join(f"{name} {format_duration(value / 1e3)}" for value, name in longest)


def _way(candidate: Candidate) -> str:
    """`load`, `reuse` (only missing bytes are copied) or `peer copy`; `evict then` precedes it.

    A group of stages on several nodes is `pipeline of` their number, with that of its full workers.
    """
    if candidate.ready_by == "pipeline":
        full = f", {candidate.full_workers} full" if candidate.stages > 1 and candidate.full_workers else ""
        return f"pipeline of {candidate.stages}{full}"
    way = candidate.way.replace("_", " ")
    return way.replace("load", candidate.ready_by.replace("_", " ")) if candidate.ready_by in ("reuse", "peer_copy") else way


def _cells(candidate: Candidate, *, chosen: bool) -> tuple[str, ...]:
    predicted = candidate.predicted_ms
    return (
        "[green]✓[/]" if chosen else "",
        candidate.node,
        "\n".join((",".join(candidate.device_ids), *candidate.later_devices)),
        _way(candidate),
        "\n".join(filter(None, (candidate.source, candidate.already_there, candidate.from_peers))),
        "" if predicted is None else format_duration(predicted / 1e3),
        _phases(candidate.predicted),
        format_size(candidate.needed_bytes),
        format_size(candidate.free_bytes),
        escape(", ".join(candidate.victims)),
        escape(candidate.excluded or ""),
    )
