"""Followed responses in the spools of gateways that are killed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.domain.followed_usage import FollowedUsage, find_followed
from services.gateway.domain.open_usage import ended_line, find_lost
from services.gateway.domain.usage_records import UsageRecord
from services.gateway.domain.usage_reports import next_report
from tests.unit.gateway.usage_ledger import RECORD, Ledger, begin, kill
from tests.unit.gateway.usage_reports import RECORDS


def followed(request_id: str) -> FollowedUsage:
    return FollowedUsage(request_id, "key", "reply", 3, replace(RECORD, answer_id=f"answer-{request_id}"))


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["follow", "record", "end", "flush", "rotate", "kill", "stop"])),
        max_size=30,
    )
)
async def test_each_response_is_left_to_the_next_gateway_until_it_has_ended(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str]]
) -> None:
    directory, ledger = tmp_path_factory.mktemp("usage"), Ledger()
    meter = begin(ledger, "gateway-0", directory)
    open_ids, all_ids, number = set[str](), set[str](), 0
    for name, what in events:
        if what == "follow" and name not in all_ids:
            open_ids.add(name)
            all_ids.add(name)
            meter.note_followed(followed(name))
        elif what == "record":
            meter.record(replace(RECORD, answer_id=f"answer-{name}"), name)
            open_ids.discard(name)
        elif what == "end":
            meter.end(name)
            open_ids.discard(name)
        elif what == "flush":
            await meter.flush()
        elif what == "rotate":
            meter._opened_at -= 7200
            await meter.flush()
        elif what in ("kill", "stop"):
            if what == "kill":
                kill(meter)
            else:
                meter.close()
            number += 1
            meter = begin(ledger, f"gateway-{number}", directory)
            assert {usage.request_id for usage in meter.unresolved} == open_ids
    for name in open_ids:
        meter.end(name)
    await meter.flush()
    meter.close()
    assert list(directory.iterdir()) == []


@given(RECORDS, st.binary(max_size=100))
def test_record_is_read_as_it_was_written_and_noise_is_no_response(record: UsageRecord, noise: bytes) -> None:
    usage = replace(followed("r"), record=replace(record, answer_id="id"))
    line, other = usage.line(), b'{"followed"' + noise.replace(b"\n", b" ") + b"\n"
    (found,) = find_followed([line, other])
    assert (found.key, found.reply, found.messages) == ("key", "reply", 3)
    assert replace(found.record, start_s=0.0) == replace(usage.record, start_s=0.0)
    assert find_followed([line + other, ended_line("r")]) == []
    assert find_lost(line + other) == []
    report = next_report("spool", 0, line + other)
    assert report is not None
    assert (report.rows, report.responses, report.end) == ((), (), len(line + other)), "the ledger gets nothing of it"
