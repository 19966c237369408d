"""A short `bench.chaos` campaign with a fixed seed.

No response is lost, wrong, generated twice or left behind, and the ledger of usage has each once.
"""

from __future__ import annotations

import os

import pytest

from bench.chaos.__main__ import campaign
from bench.chaos.bed import Bed
from bench.chaos.campaign import say
from bench.chaos.faults import plan
from tests.support.paced_zygote import slowed_by
from tests.support.sizes import size

SEED, CLIENTS = 31, 4
LONG, STEP_S = size(((16, 50, 160), 0.01), ((16, 100, 400), 0.0))
"""Tokens of a response, and the wait of each step: they last as long as those of the benchmark, of
up to 400 tokens, and cost a part of its CPU time.
"""
KILLS = int(os.environ.get("THAW_TEST_CHAOS_KILLS", "5"))
"""Processes struck. With this seed the first five are those of a pair (loader, zygote), NATS, an
engine that is stopped, and a nodeagent. `make test-long` sets 40.
"""


@pytest.mark.timeout(900 + 30 * KILLS)
def test_campaign_of_seeded_faults_has_no_failures() -> None:
    findings = campaign(plan(KILLS, SEED), SEED, CLIENTS, say, bed=Bed(LONG, **slowed_by(STEP_S)))
    assert findings.failures() == []
    assert findings.skipped == []
    assert sum(len(i.fault.strikes) for i in findings.injections) == KILLS
    assert len(findings.exchanges) > 2 * KILLS
    assert findings.metered_requests >= len(findings.exchanges)
