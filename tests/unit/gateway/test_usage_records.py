"""Spools and their reports: every record is counted once, wherever processes end."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.adapters.usage_spool import UsageSpool, open_spools
from services.gateway.domain.usage_records import UsageRecord
from services.gateway.domain.usage_reports import next_report, settled_line
from shared.contracts.usage import MAX_NAME_CHARACTERS, MAX_ROWS_PER_REPORT
from tests.support.examples import examples
from tests.unit.gateway.usage_reports import RECORDS, FakeLedger


class Spool:
    """A spool whose reports may be lost, and the replies as well."""

    def __init__(self, name: str, ledger: FakeLedger) -> None:
        self.name, self.ledger, self.data, self.position = name, ledger, b"", 0

    def report(self, event: str = "report") -> bool:
        """Report once; return False if there is nothing to report."""
        report = next_report(self.name, self.position, self.data[self.position :])
        if report is not None and event != "lost report":
            reply = self.ledger.record(report)
            self.position = self.position if event == "lost reply" else reply
        if event == "killed":
            self.position = 0  # the next gateway does not know what was recorded
        return report is not None


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(RECORDS, st.sampled_from(["", "", "report", "lost reply", "lost report", "killed"])), max_size=60))
def test_every_record_counts_once_whatever_is_lost(events: list[tuple[UsageRecord, str]]) -> None:
    ledger = FakeLedger()
    spool = Spool("s", ledger)
    for record, event in events:
        spool.data += record.line()
        if event:
            spool.report(event)
    while spool.report():
        pass
    records = [record for record, _ in events]
    assert ledger.requests == len(records)
    assert ledger.tokens == sum(r.prompt_tokens + r.completion_tokens for r in records)
    assert ledger.waits == sum(r.plan_id is not None for r in records)
    assert ledger.cpu_us == sum(r.compute_us for r in records if r.compute_kind == "cpu")
    assert ledger.cuda_us == sum(r.compute_us for r in records if r.compute_kind == "cuda")


LOSSES = st.sampled_from(["", "", "report", "lost reply", "lost report", "killed"])


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.tuples(RECORDS, st.sampled_from(["settled", "lost", "taken over before", "taken over after"]), LOSSES, LOSSES, LOSSES),
        max_size=30,
    )
)
def test_a_response_that_two_gateways_record_counts_once(events: list[tuple[UsageRecord, str, str, str, str]]) -> None:
    """The first gateway settles, or it is lost at some point and the second one takes over."""
    ledger = FakeLedger()
    first, second = Spool("first", ledger), Spool("second", ledger)
    for number, (record, fate, *losses) in enumerate(events):
        line = replace(record, answer_id=f"r{number}").line()
        steps = {
            "settled": [(first, line), (first, settled_line(f"r{number}"))],
            "lost": [(second, line)],
            "taken over before": [(second, line), (first, line)],  # it stood still, and has not noticed
            "taken over after": [(first, line), (second, line)],
        }[fate]
        for (spool, more), event in zip(steps, losses, strict=False):
            spool.data += more
            if event:
                spool.report(event)
    while first.report() or second.report():
        pass
    records = [record for record, *_ in events]
    assert ledger.requests == len(records)
    assert ledger.waits == sum(r.plan_id is not None for r in records)
    assert ledger.cpu_us == sum(r.compute_us for r in records if r.compute_kind == "cpu")


def test_settled_responses_are_summed_up_with_the_others() -> None:
    lines = [UsageRecord(1, "a", "m", "", False, 1, 0, 1, answer_id=f"r{n}").line() for n in range(3)]
    report = next_report("s", 0, lines[0] + lines[1] + settled_line("r0") + lines[2] + settled_line("r2") + b'{"settled"\n{}\n')
    assert report is not None
    assert [row.counts.requests for row in report.rows] == [2]
    assert [response.answer_id for response in report.responses] == ["r1"]


def test_a_report_has_a_bounded_number_of_responses() -> None:
    data = b"".join(UsageRecord(1, "a", "m", "", False, 1, 0, 1, answer_id=f"r{n}").line() for n in range(MAX_ROWS_PER_REPORT + 5))
    first = next_report("s", 0, data)
    assert first is not None
    second = next_report("s", first.end, data[first.end :])
    assert second is not None
    assert (len(first.responses), len(second.responses), second.end) == (MAX_ROWS_PER_REPORT, 5, len(data))


@given(RECORDS, st.sampled_from(["", "chatcmpl-1"]))
def test_a_record_is_read_as_it_was_written(record: UsageRecord, answer_id: str) -> None:
    record = replace(record, answer_id=answer_id)
    read = UsageRecord.parse(record.line())
    assert read is not None
    assert (read.plan_id, read.compute_us, read.completion_tokens) == (record.plan_id, record.compute_us, record.completion_tokens)
    if answer_id or (record.plan_id is not None and record.compute_us):
        assert read == record
    assert record.line().count(b"\n") == 1


def test_a_report_is_bounded_and_the_next_one_continues() -> None:
    records = [UsageRecord(1, f"key-{n}", "m", "", False, 1, 0, 1) for n in range(MAX_ROWS_PER_REPORT + 5)]
    data = b"".join(record.line() for record in records)
    first = next_report("s", 0, data)
    assert first is not None
    assert len(first.rows) == MAX_ROWS_PER_REPORT
    second = next_report("s", first.end, data[first.end :])
    assert second is not None
    assert (len(second.rows), second.end) == (5, len(data))


def test_lines_of_earlier_gateways_are_read() -> None:
    for line in (b'[1,"a","m","",0,1,0,1]', b'[1,"a","m","",0,1,0,1,"p",2.5]', b'[1,"a","m","",0,1,0,1,"p",2.5,"cuda",2]'):
        read = UsageRecord.parse(line)
        assert read is not None
        assert (read.compute_us, read.compute_kind) == (0, "")


def test_damaged_lines_are_skipped() -> None:
    good = UsageRecord(1, "a", "m", "", False, 1, 0, 1).line()
    report = next_report("s", 0, good + b"\0\0\n" + b'[1,"a"]\n' + good + good[:-4])
    assert report is not None
    assert report.rows[0].counts.requests == 2
    assert report.end == 2 * len(good) + 3 + len(b'[1,"a"]\n')
    assert next_report("s", report.end, good[:-4]) is None


@pytest.mark.parametrize(
    "line",
    [
        b'[1e999,"a","m","",0,1,0,1]',
        b'[99999999,"a","m","",0,1,0,1]',
        b'[1,"a","m","",0,9007199254740993,0,1]',
        b'[1,"a\\u0000","m","",0,1,0,1]',
        b'[1,"\\ud800","m","",0,1,0,1]',
        b'[1,"a","m","",0,1,0,1,"p",Infinity]',
        b'[1,"a","m","",0,1,0,1,null,0.0,"",1,9007199254740993,"cpu"]',
        b'[1,"a","%s","",0,1,0,1]' % (b"m" * (MAX_NAME_CHARACTERS + 1)),
    ],
)
def test_lines_that_the_ledger_would_refuse_are_damaged(line: bytes) -> None:
    good = UsageRecord(1, "a", "m", "", False, 1, 0, 1).line()
    report = next_report("s", 0, line + b"\n" + good)
    assert report is not None
    assert [(r.hour, r.key, r.counts.requests) for r in report.rows] == [(1, "a", 1)]
    assert report.end == len(line) + 1 + len(good)


def test_spools_of_ended_gateways_are_adopted_once(tmp_path: Path) -> None:
    line = UsageRecord(1, "a", "m", "", False, 1, 0, 1).line()
    ended, _ = open_spools(tmp_path / "usage", "ended-0")
    ended.append(line)
    running, adopted = open_spools(tmp_path / "usage", "running-0")
    assert adopted == []
    ended.close()
    third, adopted = open_spools(tmp_path / "usage", "third-0")
    assert [(s.name, s.read()) for s in adopted] == [("ended-0", line)]
    _, again = open_spools(tmp_path / "usage", "fourth-0")
    assert again == []
    assert {running.name, third.name} == {"running-0", "third-0"}


def test_a_spool_older_than_the_ledgers_memory_is_ignored(tmp_path: Path) -> None:
    old, _ = open_spools(tmp_path / "usage", "old-0")
    old.append(b"x\n")
    old.close()
    month = time.time() - 31 * 24 * 3600
    os.utime(tmp_path / "usage" / "old-0.usage", (month, month))
    assert open_spools(tmp_path / "usage", "new-0")[1] == []


def test_a_locked_spool_is_not_opened(tmp_path: Path) -> None:
    first = UsageSpool.open(tmp_path / "a.usage")
    assert first is not None
    assert UsageSpool.open(tmp_path / "a.usage") is None
