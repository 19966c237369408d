"""Reports of the spools of a gateway, and of gateways that ended."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.adapters import usage_meter
from services.gateway.adapters.usage_meter import UsageMeter
from services.gateway.adapters.usage_spool import UsageSpool
from services.gateway.domain.open_usage import OpenUsage
from services.gateway.domain.usage_records import UsageRecord
from shared.contracts.usage import MAX_ROWS_PER_REPORT, ReportUsage, UsageRecorded
from shared.errors import InvalidRequest, Unreachable
from shared.messaging import Mesh
from tests.unit.gateway.usage_reports import RECORDS, FakeLedger

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


def write_spool(directory: Path, name: str) -> None:
    """Write the spool of a gateway that has ended, with one record."""
    spool = UsageSpool.open(directory / f"{name}.usage")
    assert spool is not None
    spool.append(RECORD.line())
    spool.close()


async def test_spool_that_cannot_be_read_now_is_reported_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spool(tmp_path, "ended")
    mesh = RefusingMesh("none")
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()
    with monkeypatch.context() as broken:

        def fail(_: UsageSpool) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        broken.setattr(UsageSpool, "read", fail)
        assert not await meter.flush()
    assert await meter.flush()
    assert mesh.reported == ["ended"]
    meter.close()


async def test_two_reports_at_once_remove_a_spool_once(tmp_path: Path) -> None:
    """The last report of a gateway that ends does not wait for the one in the background."""
    write_spool(tmp_path, "ended")
    meter = UsageMeter(cast(Mesh, RefusingMesh("none")), "own", tmp_path)
    meter.open()
    assert all(await asyncio.gather(meter.flush(), meter.flush()))
    meter.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_report_that_ends_after_the_meter_is_closed_begins_no_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClosingMesh(RefusingMesh):
        async def request(self, _: str, report: ReportUsage, __: Any) -> UsageRecorded:
            meter.close()
            return UsageRecorded(position=report.end)

    monkeypatch.setattr(usage_meter, "_ROTATE_BYTES", 0)
    meter = UsageMeter(cast(Mesh, ClosingMesh("none")), "own", tmp_path)
    meter.open()
    meter.record(RECORD)
    assert await meter.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["own-0.usage"]


async def test_reported_spool_that_cannot_be_removed_ends_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spool(tmp_path, "ended")
    meter = UsageMeter(cast(Mesh, RefusingMesh("none")), "own", tmp_path)
    meter.open()

    def fail(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", fail)
    assert await meter.flush()
    meter.close()


async def test_a_refused_spool_of_an_ended_gateway_keeps_no_other_records_back(tmp_path: Path) -> None:
    for name in ("ended-a", "ended-b"):
        write_spool(tmp_path, name)
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


class UnreliableMesh:
    """A ledger whose requests, or replies, are lost as the test says."""

    def __init__(self) -> None:
        self.ledger, self.outcomes = FakeLedger(), list[str]()

    async def request(self, _: str, report: ReportUsage, __: Any) -> UsageRecorded:
        outcome = self.outcomes.pop(0) if self.outcomes else "arrives"
        if outcome == "lost":
            raise Unreachable("no leader")
        position = self.ledger.record(report)
        if outcome == "reply lost":
            raise Unreachable("no reply")
        return UsageRecorded(position=position)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.builds(lambda record, answer: replace(record, answer_id=answer), RECORDS, st.sampled_from(["", "", "", "r1", "r2"])),
            st.sampled_from(["flush", "lost", "reply lost", "settle r1", "open", "rotate"]),
        ),
        max_size=40,
    )
)
async def test_every_record_counts_once_from_memory_or_from_the_spool(events: list[UsageRecord | str]) -> None:
    """Reports and replies are lost, and the spool of the end is reported by the next gateway."""
    with tempfile.TemporaryDirectory() as name:
        mesh, records, answers = UnreliableMesh(), list[UsageRecord](), set[str]()
        meter = UsageMeter(cast(Mesh, mesh), "own", Path(name))
        meter.open()
        for event in events:
            if isinstance(event, UsageRecord):
                if event.answer_id in answers:
                    continue  # a response ends once
                answers |= {event.answer_id} - {""}
                records.append(event)
                meter.record(event)
            elif event == "open":
                meter.note_open([OpenUsage("open", 1, "a", "m", "", 90_000, "cpu")])
                meter.end("open")
            elif event.startswith("settle"):
                meter.settle(event.removeprefix("settle "))
            elif event == "rotate":
                meter._opened_at -= 7200
            else:
                mesh.outcomes = [event] if event != "flush" else []
                await meter.flush()
        meter.close()
        mesh.outcomes = []
        next_meter = UsageMeter(cast(Mesh, mesh), "next", Path(name))
        next_meter.open()
        assert await next_meter.flush()
        next_meter.close()
        assert list(Path(name).iterdir()) == []
    ledger = mesh.ledger
    assert (ledger.requests, ledger.waits) == (len(records), sum(r.plan_id is not None for r in records))
    assert ledger.tokens == sum(r.prompt_tokens + r.completion_tokens for r in records)
    assert ledger.cpu_us == sum(r.compute_us for r in records if r.compute_kind == "cpu")
    assert ledger.cuda_us == sum(r.compute_us for r in records if r.compute_kind == "cuda")


async def test_a_gateway_does_not_read_the_records_that_it_has_just_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = RecordingMesh()
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()
    monkeypatch.setattr(UsageSpool, "read", lambda _: pytest.fail("the spool was read"))
    for _ in range(2):
        meter.record(RECORD)
        meter.record(replace(RECORD, key="b", completion_tokens=7))
        assert await meter.flush()
    assert [[(r.key, r.counts.completion_tokens) for r in report.rows] for report in mesh.reports] == [[("a", 1), ("b", 7)]] * 2
    assert [(report.start, report.end) for report in mesh.reports][1][0] == mesh.reports[0].end
    meter.close()


@pytest.mark.parametrize("what", ["rows", "waits", "responses"])
async def test_more_than_one_report_holds_is_reported_in_several(tmp_path: Path, what: str) -> None:
    count, mesh = MAX_ROWS_PER_REPORT + 5, UnreliableMesh()
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()
    for n in range(count):
        fields: dict[str, Any] = {"rows": {"key": f"k{n}"}, "waits": {"plan_id": f"p{n}"}, "responses": {"answer_id": f"r{n}"}}
        meter.record(replace(RECORD, **fields[what]))
    assert await meter.flush()
    assert mesh.ledger.requests == count
    meter.close()


async def test_a_record_that_the_ledger_would_refuse_keeps_no_others_back(tmp_path: Path) -> None:
    mesh = RecordingMesh()
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()
    meter.record(RECORD)
    for damaged in ({"model": "\0"}, {"completion_tokens": 1 << 60}, {"start_s": float("inf"), "plan_id": "p"}):
        meter.record(replace(RECORD, **damaged))
    assert await meter.flush()
    (report,) = mesh.reports
    assert ([row.counts.requests for row in report.rows], report.waits) == ([1], ())
    meter.close()


def kill_gateway(directory: Path, count: int) -> None:
    """Have another process kill itself that has records and an open request in its spool."""
    pid = os.fork()
    if pid == 0:
        meter = UsageMeter(cast(Mesh, None), "killed", directory)
        meter.open()
        for _ in range(count):
            meter.record(RECORD)
        meter.note_open([OpenUsage("lost", 1, "a", "m", "", 90_000, "cpu")])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


async def test_records_of_a_killed_gateway_are_reported_without_the_zeros_after_them(tmp_path: Path) -> None:
    count = 2_000  # of more bytes than are allocated at once
    kill_gateway(tmp_path, count)
    mesh = UnreliableMesh()
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()
    assert await meter.flush()
    assert (mesh.ledger.requests, mesh.ledger.cpu_us) == (count, 90_000)
    meter.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_record_for_which_the_disk_has_no_block_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = RecordingMesh()
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        meter.record(RECORD)
    meter.record(RECORD)
    assert await meter.flush()
    assert (meter.dropped, [r.counts.requests for r in mesh.reports[0].rows]) == (1, [1])
    meter.close()


async def test_without_a_directory_of_its_own_a_gateway_reports_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, mesh = tmp_path / "usage", UnreliableMesh()
    directory.mkdir()
    directory.chmod(0o755)  # refused: others can read it
    monkeypatch.setattr(usage_meter, "_REOPEN_S", 0.0)
    meter = UsageMeter(cast(Mesh, mesh), "own", directory)
    meter.open()
    for _ in range(2):
        meter.record(RECORD)
        mesh.outcomes = ["lost", "reply lost"]
        assert [await meter.flush() for _ in range(3)] == [False, False, True]
    assert (mesh.ledger.requests, meter.dropped, list(directory.iterdir())) == (2, 0, [])
    assert list(mesh.ledger.positions) == ["own-0"]  # not one for each attempt to make a file
    directory.chmod(0o700)
    for _ in range(2):  # the second in a file
        meter.record(RECORD)
        assert await meter.flush()
    assert mesh.ledger.requests == 4
    assert len(list(directory.iterdir())) == 1
    meter.close()
    assert list(directory.iterdir()) == []


def test_usage_that_ends_with_its_gateway_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    meter = UsageMeter(cast(Mesh, None), "own", tmp_path)
    meter.open()
    meter.record(RECORD)
    meter.close()
    assert "usage that the ledger does not have is lost" in caplog.text


def test_a_closed_spool_ends_with_its_last_record(tmp_path: Path) -> None:
    meter = UsageMeter(cast(Mesh, None), "own", tmp_path)
    meter.open()
    meter.record(RECORD)
    meter.close()
    assert (tmp_path / "own-0.usage").read_bytes() == RECORD.line()


async def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    """A power cut may leave a part of the last line; this gateway continues the file."""
    opened = OpenUsage("lost", 1, "a", "m", "", 90_000, "cpu").line()
    (tmp_path / "own-0.usage").write_bytes(RECORD.line() + opened + RECORD.line()[:-4])
    mesh = UnreliableMesh()
    meter = UsageMeter(cast(Mesh, mesh), "own", tmp_path)
    meter.open()
    meter.record(RECORD)
    assert await meter.flush()
    assert (mesh.ledger.requests, mesh.ledger.cpu_us) == (2, 90_000)
    meter.close()
