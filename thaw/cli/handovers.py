"""Show a request's way from engine to engine, over the request's whole time.

There is a lane for each instance that served it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shared.contracts.migration import MigrationRecord, MigrationRound
from shared.contracts.traces import HandoverTrace, RequestTrace
from thaw.units import format_size

SERVED, PAUSED, IDLE = "█", "░", " "
_COLOURS = {"done": "green", "given_up": "yellow", "failed": "red", "cancelled": "yellow"}
_MIN_WIDTH = 20


@dataclass(frozen=True)
class Lane:
    """A stretch of a request on one instance, in ms since the request arrived.

    Attributes:
        from_ms: Time at which the client began to wait for this instance.
        began_ms: First token; None: there was none.
        handover: The hand-off to this instance; None: the request started here.
    """

    instance_id: str
    from_ms: float
    began_ms: float | None
    end_ms: float
    handover: HandoverTrace | None = None


def lanes(trace: RequestTrace) -> list[Lane]:
    """Return the lanes of a request in their order; none for a request that was not moved."""
    if not trace.handovers:
        return []
    first = trace.handovers[0]
    found = [Lane(first.source_instance, 0.0, trace.ttft_ms if first.since_ms is not None else None, _find_last_token_ms(first))]
    for number, handover in enumerate(trace.handovers):
        left = _find_last_token_ms(handover)
        began = left + handover.pause_ms if handover.pause_ms is not None else None
        later = trace.handovers[number + 1 :]
        found.append(
            Lane(handover.instance_id, left, began, _find_last_token_ms(later[0]) if later else trace.duration_ms, handover)
        )
    return found


def _find_last_token_ms(handover: HandoverTrace) -> float:
    """Return the time at which the last token of the previous instance arrived."""
    return handover.since_ms if handover.since_ms is not None else handover.at_ms


def _bar(lane: Lane, whole_ms: float, width: int) -> Text:
    bar, scale = [IDLE] * width, width / max(whole_ms, 1e-9)

    def mark(start: float, end: float, with_: str) -> None:
        first = min(width - 1, max(0, int(start * scale)))
        last = min(width, max(first + 1, round(end * scale)))
        bar[first:last] = with_ * (last - first)

    began = lane.end_ms if lane.began_ms is None else lane.began_ms
    mark(lane.from_ms, began, PAUSED)
    if lane.began_ms is not None:
        mark(began, lane.end_ms, SERVED)
    text = Text()
    for cell in bar:
        text.append(cell, "bold green" if cell == SERVED else "yellow")
    return text


def _describe_handover(lane: Lane) -> str:
    handover = lane.handover
    if handover is None:
        return ""
    text = (
        f"{handover.kind} at {_seconds(lane.from_ms)}, {handover.tokens} tokens"
        if handover.tokens
        else f"{handover.kind}, restarted"
    )
    text += f", pause {handover.pause_ms:.0f} ms" if handover.pause_ms is not None else ", no token arrived"
    return text + (f"  {handover.migration_id}" if handover.migration_id else "")


def handovers_chart(trace: RequestTrace, console: Console) -> RenderableType | None:
    """The lanes of a request that more than one instance served."""
    found = lanes(trace)
    if not found:
        return None
    width = max(_MIN_WIDTH, min(console.width, 140) - 80)
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    table.add_column("instance", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=width)
    table.add_column("reached by")
    for lane in found:
        table.add_row(lane.instance_id, _bar(lane, trace.duration_ms, width), Text(_describe_handover(lane), "dim"))
    legend = Text(f"{SERVED} answered by it  {PAUSED} the client waited; {_seconds(trace.duration_ms)} in all", "dim")
    return Group(Text("continued on another instance", "bold"), table, legend)


def migration_lines(record: MigrationRecord, request_id: str) -> list[str]:
    """Describe a migration as far as it concerns a request: its outcome and rounds."""
    moved = next(m for m in record.requests if is_attempt_of(m.request_id, request_id))
    colour = _COLOURS.get(record.state, "cyan")
    pause = f", pause {moved.pause_ms:.0f} ms" if moved.pause_ms is not None else ""
    took = f", {_seconds(moved.took_ms)} in all" if moved.took_ms is not None else ""
    lines = [
        f"[bold]migration {record.migration_id}[/] {record.source_node} → {record.node}: [{colour}]{moved.outcome}[/]{pause}{took}"
    ]
    if record.traceparent:
        lines.append(f"  [dim]trace {record.traceparent.split('-')[1]}[/]")
    if moved.reason:
        lines.append(f"  {escape(moved.reason)}")
    rounds = [x for x in record.rounds if is_attempt_of(x.request_id, request_id)]
    return lines + [_round(x, rounds) for x in rounds]


def _round(x: MigrationRound, among: Sequence[MigrationRound]) -> str:
    longest = max(r.took_ms for r in among)
    bar = SERVED * max(1, round(10 * x.took_ms / longest)) if longest else ""
    received = f"KV of {x.kv_tokens} received ({format_size(x.kv_bytes)}), " if x.kv_tokens else ""
    why = f" [dim](KV not received: {escape(x.kv_reason)})[/]" if x.kv_reason else ""
    return f"  round {x.number}: {received}{x.tokens} tokens in {x.took_ms:.0f} ms, {x.gap} more meanwhile{why} [cyan]{bar}[/]"


def is_attempt_of(attempt: str, request_id: str) -> bool:
    """True if the engine's name of a request is one of this request's attempts.

    Attempts have a number appended.
    """
    base, _, number = attempt.rpartition("-")
    return attempt == request_id or (base == request_id and number.isdigit())


def _seconds(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1000 else f"{ms:.0f} ms"
