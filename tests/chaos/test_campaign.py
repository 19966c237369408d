"""A short `bench.chaos` campaign with a fixed seed.

No response is lost, wrong, generated twice or left behind.
"""

from __future__ import annotations

from bench.chaos.__main__ import campaign
from bench.chaos.campaign import say
from bench.chaos.faults import plan

SEED, KILLS, CLIENTS = 3, 8, 4


def test_campaign_of_seeded_faults_has_no_failures() -> None:
    findings = campaign(plan(KILLS, SEED), SEED, CLIENTS, say)
    assert findings.failures() == []
    assert findings.skipped == []
    assert sum(len(s.fault.strikes) for s in findings.struck) == KILLS
    assert len(findings.exchanges) > 2 * KILLS
