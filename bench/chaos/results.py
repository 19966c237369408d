"""Results of a campaign by victim and by kind of fault.

The figures are for docs/performance.d, the table is for docs/reliability.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaos.campaign import Findings, Injection
from bench.chaos.verdict import Exchange, Fate
from shared.percentiles import percentile

COLUMNS = ("strikes", "requests", "lost", "broken", "truncated", "wrong", "near tie", "twice", "5xx", "cut", "p50", "p99", "max")


@dataclass(frozen=True)
class Row:
    """The results of a group of faults.

    Attributes:
        name: A victim, a kind of fault in parentheses, or `all`.
        strikes: Processes that were struck; in the row of a victim, those of its kind.
        recoveries: Seconds of each fault from which the mesh recovered.
    """

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
        recovery = [percentile(self.recoveries, p) for p in (50, 99, 100)]
        return (*map(str, numbers), *("-" if math.isnan(r) else f"{r:.1f}" for r in recovery))

    def figures(self) -> dict[str, float]:
        return {f"{self.name}.{c}": float(v) for c, v in zip(COLUMNS, self.cells(), strict=True) if v != "-"}


def rows(findings: Findings) -> list[Row]:
    """Return a row for each victim and each kind of fault, and one for all.

    A request counts once in each row with a fault whose time it overlaps, and once in `all`.
    """
    injections = findings.injections
    victims = sorted({s.victim for i in injections for s in i.fault.strikes})
    groups = [(v, [i for i in injections if any(s.victim == v for s in i.fault.strikes)]) for v in victims]
    kinds = [(f"({kind})", [i for i in injections if i.fault.kind == kind]) for kind in ("kill", "stop", "pair")]
    judged = list(zip(findings.exchanges, findings.fates, strict=True))
    found = [_row(name, group, _overlapping(group, judged), victim=name) for name, group in groups]
    found += [_row(name, group, _overlapping(group, judged)) for name, group in kinds if group]
    return [*found, _row("all", injections, judged)]


def _overlapping(group: Sequence[Injection], judged: Sequence[tuple[Exchange, Fate]]) -> list[tuple[Exchange, Fate]]:
    return [(e, f) for e, f in judged if any(e.sent <= i.until and e.ended >= i.at for i in group)]


def _row(name: str, group: Sequence[Injection], judged: Sequence[tuple[Exchange, Fate]], victim: str | None = None) -> Row:
    """Return the row of a group; only strikes of `victim` count if that is given."""
    return Row(
        name=name,
        strikes=sum(victim in (None, s.victim) for i in group for s in i.fault.strikes),
        requests=len(judged),
        fates=Counter(f for _, f in judged),
        server_errors=sum(e.server_errors for e, _ in judged),
        cuts=sum(e.cuts for e, _ in judged),
        recoveries=tuple(i.recovery_s for i in group if i.recovery_s is not None),
    )


def table(findings: Findings) -> str:
    """Return the rows as a table in Markdown."""
    lines = [f"| victim | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    lines += [f"| {r.name} | {' | '.join(r.cells())} |" for r in rows(findings)]
    return "\n".join(lines)


def summary(findings: Findings) -> str:
    """Return the results that are not in the table, a line for each."""
    left = {kind: len(names) for kind, names in findings.left.items()}
    kinds = Counter(e.job.kind for e in findings.exchanges)
    time = findings.device_time
    exactness = "exact" if findings.is_metered_exactly else "within the bounds of cut requests"
    return "\n".join(
        [
            f"{findings.duration_s:.0f} s; hosted engine: {findings.hosted}; requests by kind: {dict(sorted(kinds.items()))}",
            f"strikes skipped for want of a victim: {len(findings.skipped)}",
            f"checks that found memory booked twice: {len(findings.overbooked)}; booking faults at the end: {len(findings.booking_faults)}",
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
