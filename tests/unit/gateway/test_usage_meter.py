"""Reports of the spools of a gateway, and of gateways that ended."""

from __future__ import annotations

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
