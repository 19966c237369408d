"""Migrations between devices of different speed, by hand.

The source computes 1,000 tokens of a prompt in a second, and serves from 2 s on. At 10 s another
model needs its device, and at 20 s the destination has loaded.
"""

from __future__ import annotations

import pytest

from simulator.config import Batching, ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup
from simulator.policies import serverlessllm
from simulator.report import Served
from simulator.simulate import simulate
from simulator.workloads.request import Request

FAST = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=2)
SLOW = FAST.model_copy(update={"prefill_tokens_per_second": 100})
BOUND = ModelGroup(name="bound", weights_gb=10, service=Fixed(seconds=1), slo_ttft=10, kinds=frozenset({"source"}))
LOADED_AT = 20.0


def migrate(free: ModelGroup, *others: Request) -> list[Served]:
    """Return the results of a request that is migrated, of others, and of the other model's."""
    node = {"devices": 1, "device_gb": 12, "dram_gb": 100, "ssd_gb": 0}
    speeds = {"source": LinkSpeeds(remote=5, ssd=1, device=20), "destination": LinkSpeeds(remote=1, ssd=1, device=20)}
    groups = tuple(NodeGroup.model_validate({"name": name, "kind": name, "links": links, **node}) for name, links in speeds.items())
    requests = [Request(0, "free", 100, 401), *others, Request(10, "bound", 1, 1)]
    outcome = simulate(ClusterFile(nodes=groups), [free, BOUND], requests, serverlessllm.PROFILE)
    assert outcome.migrations == 1 + len(others)
    return sorted(outcome.served, key=lambda s: s.number)


def test_rounds_of_a_migration_take_as_long_as_the_destination_computes() -> None:
    """280 tokens take 2.8 s there, the next 28 ones 0.28 s, and the next 2 or 3 a round more."""
    free = ModelGroup(name="free", weights_gb=10, service=FAST, services={"destination": SLOW}, slo_ttft=60)
    *_, bound = migrate(free)
    assert bound.queued == pytest.approx(LOADED_AT + 2.8 + 0.28 + 0.03 - 10 + 2, abs=0.02)


def test_prompt_that_a_migration_has_prepared_is_not_computed_again() -> None:
    """The source would need 20 s for it; rounds of the migration need 0.2 s."""
    free = ModelGroup(name="free", weights_gb=10, service=FAST, resume_s_per_token=1e-5, slo_ttft=60)
    _, long, _ = migrate(free, Request(9.5, "free", 20_000, 2))
    assert long.ttft == pytest.approx(LOADED_AT + 0.2 - 9.5, abs=0.02)
