"""Plans, and the waits for their starts, that are charged to keys."""

from __future__ import annotations

from typing import Any

from shared.contracts.plans import Candidate, PlanRecord
from shared.contracts.usage import ColdWait, ReportUsage

HOUR = 500_000
AT = HOUR * 3600.0


def plan(plan_id: str, model: str, victims: int = 0, cleared_s: float | None = None, **fields: Any) -> PlanRecord:
    labels = tuple(f"v ({plan_id}-{n})" for n in range(victims))
    cleared = cleared_s * 1e3 if cleared_s is not None else None
    where = {"device_ids": ("cuda:0", "cuda:1")[: fields.pop("devices", 1)], "victims": labels, "cleared_ms": cleared}
    chosen = Candidate(node="n", way="load", **where)
    given = {"created": AT, "trigger": "demand", "way": "load", "outcome": "ready", "measured_ms": 8000.0, **fields}
    return PlanRecord(plan_id=plan_id, model=model, chosen=chosen, **given)


def waited(
    spool: str, plan_id: str, model: str, key: str, requests: int = 1, start_s: float = 8.0, devices: int = 1
) -> ReportUsage:
    fields = {"requests": requests, "start_s": start_s, "device_kind": "cuda", "devices": devices}
    wait = ColdWait(plan_id=plan_id, hour=HOUR, key=key, model=model, **fields)
    return ReportUsage(spool=spool, start=0, end=1, rows=(), waits=(wait,))
