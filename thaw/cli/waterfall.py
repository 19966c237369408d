"""Draw a trace as bars in the terminal: the phases of the time to first token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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
    """Return a row for each phase of each process, in order of start.

    The critical path is solid.

    Every instant of the critical path is marked on exactly one row, so the rows' `waited_ms` sum to
    its length. Instants that no span of their phase covers (the wait before the first span,
    messages under way) get a row without a process.

    Args:
        spans: measured phases; those outside [start_ms, end_ms] have no row.
        critical: the critical path, a tiling of [start_ms, end_ms].
        width: characters for [start_ms, end_ms].
    """
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in spans:
        if span.end_ms > start_ms and span.start_ms < end_ms:
            groups.setdefault((span.phase.value, span.process), []).append((span.start_ms, span.end_ms))
    waited: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for segment in critical:
        covering = {process: stretches for (phase, process), stretches in groups.items() if phase == segment.phase.value}
        for process, piece in _pieces(segment, covering):
            waited.setdefault((segment.phase.value, process), []).append(piece)
    for key, stretches in waited.items():
        groups.setdefault(key, stretches)
    result = []
    for (phase, process), members in sorted(groups.items(), key=lambda g: min(begin for begin, _ in g[1])):
        mine = waited.get((phase, process), [])
        first = max(start_ms, min(begin for begin, _ in members))
        last = min(end_ms, max(end for _, end in members))
        bar = _bar(members, mine, start_ms, end_ms, width)
        result.append(Row(phase, process, first - start_ms, last - first, sum(end - begin for begin, end in mine), bar))
    return result


def _pieces(segment: CriticalSegment, covering: dict[str, list[tuple[float, float]]]) -> Iterator[tuple[str, tuple[float, float]]]:
    """Cut the segment where a span of its phase begins or ends.

    Each piece has the first process that covers it ("" for none).
    """
    begin, end = segment.start_ms, segment.start_ms + segment.duration_ms
    edges = {edge for stretches in covering.values() for stretch in stretches for edge in stretch if begin < edge < end}
    for left, right in itertools.pairwise(sorted({begin, end} | edges)):
        owner = next((p for p, stretches in covering.items() if any(s <= left and right <= e for s, e in stretches)), "")
        yield owner, (left, right)


def _bar(spans: list[tuple[float, float]], critical: list[tuple[float, float]], start: float, end: float, width: int) -> str:
    scale = width / max(end - start, 1e-9)
    cells = [IDLE] * width
    stretches = [(s, e, OVERLAPPED) for s, e in spans] + [(s, e, WAITED) for s, e in critical]
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
    shown = whole_ms([row.waited_ms for row in lines])
    for row, rounded in zip(lines, shown, strict=True):
        bar = Text()
        for cell in row.bar:
            bar.append(cell, "bold cyan" if cell == WAITED else "blue")
        waited = str(rounded) if rounded else ("<1" if row.waited_ms > 0 else "")
        table.add_row(row.phase, Text(row.process, "dim"), bar, f"{row.start_ms:.0f}", f"{row.duration_ms:.1f}", waited)
    if lines:
        table.add_row("total", "", "", "", "", str(sum(shown)), style="dim")
    return table


def whole_ms(durations: Sequence[float]) -> list[int]:
    """Round durations to whole milliseconds that sum to their rounded sum.

    The largest remainders are rounded up.
    """
    floors = [math.floor(d) for d in durations]
    missing = round(sum(durations)) - sum(floors)
    by_remainder = sorted(range(len(floors)), key=lambda i: floors[i] - durations[i])
    for i in by_remainder[:missing]:
        floors[i] += 1
    return floors


def _width(console: Console) -> int:
    return max(_MIN_WIDTH, min(console.width, 120) - 60)


def request_waterfall(trace: RequestTrace, console: Console) -> RenderableType:
    """Draw the waterfall of a request up to its first token.

    A request without a token is drawn up to its end.
    """
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
    """Draw the waterfall of one start of an instance."""
    head = Text.assemble(
        ("load of ", ""),
        (trace.model, "bold"),
        f" on {trace.node}  {trace.outcome} after {_ms(trace.duration_ms)}  plan {trace.plan_id}",
    )
    width = _width(console)
    return Group(head, _chart(rows(trace.spans, trace.critical_path, 0.0, trace.duration_ms, width), width))


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.0f} ms"
