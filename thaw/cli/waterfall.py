"""A trace as bars in the terminal: where every millisecond of the time to the first token went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shared.contracts.phases import PhaseSpan
from shared.contracts.traces import CriticalSegment, LoadTrace, RequestTrace

WAITED, OVERLAPPED, IDLE = "█", "░", " "
_MIN_WIDTH = 20


@dataclass(frozen=True)
class Row:
    phase: str
    process: str
    start_ms: float
    duration_ms: float
    waited_ms: float
    bar: str


def rows(spans: Sequence[PhaseSpan], critical: Sequence[CriticalSegment], start_ms: float, end_ms: float, width: int) -> list[Row]:
    """One row for each phase of each process, in order of their start, with the critical path solid. Phases that only the critical path
    knows (messages under way) get rows too. `width`: characters for [start_ms, end_ms]."""
    groups: dict[tuple[str, str], list[PhaseSpan]] = {}
    for span in spans:
        if span.end_ms > start_ms and span.start_ms < end_ms:
            groups.setdefault((span.phase.value, span.process), []).append(span)
    named = {phase for phase, _ in groups}
    for segment in critical:
        if segment.phase.value not in named:
            gap = PhaseSpan(phase=segment.phase, start_ms=segment.start_ms, duration_ms=segment.duration_ms)
            groups.setdefault((segment.phase.value, ""), []).append(gap)
    unclaimed = list(critical)
    result = []
    for (phase, process), members in sorted(groups.items(), key=lambda g: min(s.start_ms for s in g[1])):
        # Each stretch of the critical path is marked on one row only: the first process of that phase that covers it.
        mine = [c for c in unclaimed if c.phase.value == phase and any(_overlap(s, c) > 0 for s in members)]
        unclaimed = [c for c in unclaimed if c not in mine]
        first = max(start_ms, min(s.start_ms for s in members))
        last = min(end_ms, max(s.end_ms for s in members))
        waited = sum(c.duration_ms for c in mine)
        bar = _bar([(s.start_ms, s.end_ms) for s in members], mine, start_ms, end_ms, width)
        result.append(Row(phase, process, first - start_ms, last - first, waited, bar))
    return result


def _overlap(span: PhaseSpan, segment: CriticalSegment) -> float:
    return min(span.end_ms, segment.start_ms + segment.duration_ms) - max(span.start_ms, segment.start_ms)


def _bar(spans: list[tuple[float, float]], critical: list[CriticalSegment], start: float, end: float, width: int) -> str:
    scale = width / max(end - start, 1e-9)
    cells = [IDLE] * width
    stretches = [(s, e, OVERLAPPED) for s, e in spans] + [(c.start_ms, c.start_ms + c.duration_ms, WAITED) for c in critical]
    for begin, finish, mark in stretches:
        first = min(width - 1, max(0, int((begin - start) * scale)))
        last = min(width, max(first + 1, round((finish - start) * scale)))
        cells[first:last] = mark * (last - first)
    return "".join(cells)


def _chart(lines: list[Row], width: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for title, justify in (
        ("phase", "left"),
        ("in", "left"),
        ("", "left"),
        ("start ms", "right"),
        ("ms", "right"),
        ("waited ms", "right"),
    ):
        table.add_column(
            title, justify="right" if justify == "right" else "left", no_wrap=True, min_width=width if not title else None
        )
    for row in lines:
        bar = Text()
        for cell in row.bar:
            bar.append(cell, "bold cyan" if cell == WAITED else "blue")
        waited = f"{row.waited_ms:.0f}" if row.waited_ms >= 0.5 else ("<1" if row.waited_ms > 0 else "")
        table.add_row(row.phase, Text(row.process, "dim"), bar, f"{row.start_ms:.0f}", f"{row.duration_ms:.1f}", waited)
    return table


def _width(console: Console) -> int:
    return max(_MIN_WIDTH, min(console.width, 120) - 60)


def request_waterfall(trace: RequestTrace, console: Console) -> RenderableType:
    """The waterfall of one request up to its first token (or its end, if it never had one)."""
    end = trace.ttft_ms if trace.ttft_ms is not None else trace.duration_ms
    head = Text.assemble((trace.model, "bold"), f"  {trace.endpoint}  request {trace.request_id}")
    if trace.ttft_ms is not None:
        head.append(f"\nTTFT {_ms(trace.ttft_ms)}", "bold cyan")
        head.append("  cold start" if trace.cold else "  warm")
    else:
        head.append(f"\nno first token after {_ms(trace.duration_ms)}", "bold red")
    if trace.error:
        head.append(f"  {trace.error}", "red")
    width = _width(console)
    chart = _chart(rows(trace.spans, trace.critical_path, 0.0, end, width), width)
    legend = Text(
        f"{WAITED} waited for (the critical path; its parts sum to the TTFT)  {OVERLAPPED} overlapped by something else", "dim"
    )
    # Not every engine counts a prompt in its streams.
    prompt = f"{trace.prompt_tokens} prompt + " if trace.prompt_tokens else ""
    tail = Text(f"{prompt}{trace.completion_tokens} output tokens in {_ms(trace.duration_ms)}", "dim")
    return Group(head, chart, legend, tail)


def load_waterfall(trace: LoadTrace, console: Console) -> RenderableType:
    """The waterfall of one start of an instance."""
    head = Text.assemble(
        ("load of ", ""),
        (trace.model, "bold"),
        f" on {trace.node}  {trace.outcome} after {_ms(trace.duration_ms)}  plan {trace.plan_id}",
    )
    width = _width(console)
    return Group(head, _chart(rows(trace.spans, trace.critical_path, 0.0, trace.duration_ms, width), width))


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.0f} ms"
