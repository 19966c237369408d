"""The rows of a campaign's table: which strikes and which requests count for a row."""

from __future__ import annotations

from bench.chaos.campaign import Findings, Injection
from bench.chaos.faults import Action, Fault, Strike
from bench.chaos.results import rows
from bench.chaos.verdict import Exchange, Job


def injection(at: float, until: float, *victims: str, action: Action = "kill", recovered_at: float | None = None) -> Injection:
    strikes = tuple(Strike(victim, action, 0.0) for victim in victims)
    return Injection(Fault(1, strikes), at, list(victims), recovered_at, until)


def exchange(sent: float, ended: float) -> Exchange:
    return Exchange(Job(1, "one", "Hi", 8, False), sent, ended)


def test_pair_counts_for_each_victim_and_requests_count_by_time() -> None:
    findings = Findings(
        injections=[
            injection(10.0, 12.0, "gateway", "nats", recovered_at=12.0),
            injection(20.0, 35.0, "gateway", action="stop", recovered_at=21.0),
        ],
        exchanges=[exchange(0.0, 5.0), exchange(11.0, 11.5), exchange(11.9, 20.5)],
        fates=["ok", "near tie", "ok"],
    )
    found = {r.name: (r.strikes, r.requests, r.fates["near tie"], r.recoveries) for r in rows(findings)}
    assert found == {
        "gateway": (2, 2, 1, (2.0, 1.0)),
        "nats": (1, 2, 1, (2.0,)),
        "(stop)": (1, 1, 0, (1.0,)),
        "(pair)": (2, 2, 1, (2.0,)),
        "all": (3, 3, 1, (2.0, 1.0)),
    }
