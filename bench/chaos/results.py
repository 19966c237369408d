"""Print a campaign's results by victim and by kind of fault.

The figures are for docs/performance.d, the table is for docs/reliability.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaos.campaign import Findings, Struck
from bench.chaos.verdict import Exchange, Fate

COLUMNS = ("strikes", "requests", "lost", "broken", "truncated", "wrong", "near tie", "twice", "5xx", "cut", "p50", "p99", "max")


@dataclass(frozen=True)
class Row:
    """`name`: a victim, a kind of fault, or `all`. Recovery in seconds."""

    name: str
    strikes: int
    requests: int
    fates: Counter[Fate]
    server_errors: int
    cuts: int
    recoveries: tuple[float, ...]

    def cells(self) -> tuple[str, ...]:
        fates: tuple[Fate, ...] = ("lost", "broken", "truncated", "wrong", "near tie", "twice")
        numbers = [self.strikes, self.requests, *(self.fates[f] for f in fates), self.server_errors, self.cuts]
        recovery = [quantile(self.recoveries, q) for q in (0.5, 0.99, 1.0)]
        return (*map(str, numbers), *("-" if math.isnan(r) else f"{r:.1f}" for r in recovery))

    def figures(self) -> dict[str, float]:
        return {f"{self.name}.{c}": float(v) for c, v in zip(COLUMNS, self.cells(), strict=True) if v != "-"}


def quantile(values: Sequence[float], q: float) -> float:
    """By the nearest rank; NaN of nothing."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)] if values else math.nan


def rows(findings: Findings) -> list[Row]:
    """Return a row for each group of faults.

    A request counts for every fault whose time it overlaps, and so for several rows; in `all` once.
    """
    groups: dict[str, list[Struck]] = {}
    for victim in sorted({s.victim for x in findings.struck for s in x.fault.strikes}):
        groups[victim] = [x for x in findings.struck if victim in {s.victim for s in x.fault.strikes}]
    for kind in ("kill", "stop", "pair"):
        groups[f"({kind})"] = [x for x in findings.struck if x.fault.kind == kind]
    every = list(zip(findings.exchanges, findings.fates, strict=True))
    return [*(_row(name, struck, every) for name, struck in groups.items() if struck), _make_row("all", findings.struck, every)]


def _row(name: str, struck: Sequence[Struck], every: Sequence[tuple[Exchange, Fate]]) -> Row:
    return _make_row(name, struck, [(e, f) for e, f in every if any(e.sent <= x.until and e.ended >= x.at for x in struck)])


def _make_row(name: str, struck: Sequence[Struck], requests: Sequence[tuple[Exchange, Fate]]) -> Row:
    return Row(
        name=name,
        strikes=sum(len(x.fault.strikes) if name in ("all", "(pair)", "(kill)", "(stop)") else 1 for x in struck),
        requests=len(requests),
        fates=Counter(f for _, f in requests),
        server_errors=sum(e.server_errors for e, _ in requests),
        cuts=sum(e.cuts for e, _ in requests),
        recoveries=tuple(x.recovery_s for x in struck if x.recovery_s is not None),
    )


def table(findings: Findings) -> str:
    """In Markdown."""
    lines = [f"| victim | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    lines += [f"| {r.name} | {' | '.join(r.cells())} |" for r in rows(findings)]
    return "\n".join(lines)


def summary(findings: Findings) -> str:
    """What the table does not say."""
    left = {kind: len(names) for kind, names in findings.left.items()}
    kinds = Counter(e.job.kind for e in findings.exchanges)
    time = findings.device_time
    exactness = "exact" if findings.is_metered_exactly else "within the bounds of cut requests"
    return "\n".join(
        [
            f"{findings.duration_s:.0f} s; hosted engine: {findings.hosted}; requests by kind: {dict(sorted(kinds.items()))}",
            f"strikes skipped for want of a victim: {len(findings.skipped)}",
            f"looks that saw memory booked twice: {len(findings.overbooked)}; booking faults at the end: {len(findings.booking_faults)}",
            f"requests in the ledger: {findings.metered_requests}, {exactness}; metering faults: {len(findings.metering_faults)}",
            f"device-seconds in the ledger: {time.ledger_s:.2f}, {time.background_s:.2f} of them for no request; "
            f"by the engines' meters {time.metered_s:.2f}; {time.least_s:.2f} to {time.most_s:.2f} are possible",
            *(f"  {line}" for line in time.models),
            f"left behind: {left}",
        ]
    )


def figures(findings: Findings) -> dict[str, float]:
    found = {k: v for row in rows(findings) for k, v in row.figures().items()}
    found |= {f"left.{kind}": float(len(names)) for kind, names in findings.left.items()}
    return found | {
        "booked_twice": float(len(findings.overbooked)),
        "books_at_the_end": float(len(findings.booking_faults)),
        "metered_requests": float(findings.metered_requests),
        "ledger_device_s": findings.device_time.ledger_s,
        "background_device_s": findings.device_time.background_s,
        "metered_device_s": findings.device_time.metered_s,
        "least_device_s": findings.device_time.least_s,
        "most_device_s": findings.device_time.most_s,
        "metering_faults": float(len(findings.metering_faults)),
        "skipped": float(len(findings.skipped)),
        "seconds": findings.duration_s,
    }
