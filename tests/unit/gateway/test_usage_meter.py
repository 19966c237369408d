"""Reports of the spools of a gateway, and of gateways that ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from services.gateway.adapters.usage_meter import UsageMeter
from services.gateway.adapters.usage_spool import UsageSpool
from services.gateway.domain.usage_records import UsageRecord
from shared.contracts.usage import ReportUsage, UsageRecorded
from shared.errors import InvalidRequest
from shared.messaging import Mesh

RECORD = UsageRecord(1, "a", "m", "", False, 1, 0, 1)


class RefusingMesh:
    """A ledger that refuses the reports of one spool."""

    def __init__(self, refused: str) -> None:
        self.refused, self.reported = refused, list[str]()

    async def request(self, _: str, report: ReportUsage, __: Any) -> UsageRecorded:
        if report.spool == self.refused:
            raise InvalidRequest("refused")
        self.reported.append(report.spool)
        return UsageRecorded(position=report.end)


async def test_a_refused_spool_of_an_ended_gateway_keeps_no_other_records_back(tmp_path: Path) -> None:
    for name in ("ended-a", "ended-b"):
        spool = UsageSpool.open(tmp_path / f"{name}.usage")
        assert spool is not None
        spool.append(RECORD.line())
        spool.close()
    mesh = RefusingMesh("ended-a")
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()
    meter.record(RECORD)
    assert not await meter.flush()
    assert mesh.reported == ["own-0", "ended-b"]
    mesh.refused = ""
    assert await meter.flush()
    assert mesh.reported == ["own-0", "ended-b", "ended-a"]
    meter.close()
    assert list(tmp_path.iterdir()) == []


class RecordingMesh:
    """A ledger that takes every report."""

    def __init__(self) -> None:
        self.reports = list[ReportUsage]()

    async def request(self, _: str, report: ReportUsage, __: Any) -> UsageRecorded:
        self.reports.append(report)
        return UsageRecorded(position=report.end)


async def test_only_responses_whose_key_has_not_ended_are_reported_by_themselves(tmp_path: Path) -> None:
    mesh = RecordingMesh()
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()
    for answer_id in ("ended", "open"):
        meter.record(replace(RECORD, answer_id=answer_id))
    meter.settle("ended")
    assert await meter.flush()
    meter.settle("open")  # reported already
    meter.settle("unknown")
    assert await meter.flush()
    assert [([r.counts.requests for r in report.rows], [r.answer_id for r in report.responses]) for report in mesh.reports] == [
        ([1], ["open"])
    ]
    meter.close()
