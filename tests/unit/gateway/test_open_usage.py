"""Device time of requests that are open when their gateway is killed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.domain.open_usage import OpenUsage, ended_line, find_lost, parse_lost
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.used import open_usage
from tests.unit.gateway.usage_ledger import RECORD, SECOND, Ledger, begin, kill


def open_for(request_id: str, us: int, key: str = "a") -> OpenUsage:
    return OpenUsage(request_id, 1, key, "m", "", us, "cpu")


async def test_next_gateway_charges_what_was_open_without_a_request_or_tokens(tmp_path: Path) -> None:
    ledger = Ledger()
    killed = begin(ledger, "killed", tmp_path)
    killed.note_open([open_for("r1", SECOND), open_for("r2", 2 * SECOND)])
    killed.note_open([open_for("r1", 3 * SECOND), open_for("r2", 2 * SECOND)])
    assert await killed.flush()
    assert ledger.sums() == (0, 0, 0), "they are open"
    kill(killed)
    later = begin(ledger, "later", tmp_path)
    assert await later.flush()
    assert ledger.sums() == (0, 0, 5 * SECOND)
    later.close()
    assert list(tmp_path.iterdir()) == []


async def test_ended_request_counts_once_with_its_record(tmp_path: Path) -> None:
    ledger = Ledger()
    killed = begin(ledger, "killed", tmp_path)
    killed.note_open([open_for("recorded", SECOND), open_for("elsewhere", SECOND)])
    killed.record(RECORD, "recorded")
    killed.end("elsewhere")
    killed.end("never written")
    kill(killed)
    assert await begin(ledger, "later", tmp_path).flush()
    assert ledger.sums() == (1, 5, 5 * SECOND)


async def test_gateway_that_is_killed_while_it_adopts_charges_nothing_twice(tmp_path: Path) -> None:
    ledger = Ledger()
    killed = begin(ledger, "killed", tmp_path)
    killed.note_open([open_for("r", SECOND)])
    kill(killed)
    for name in ("second", "third"):
        kill(begin(ledger, name, tmp_path))  # it has written what was lost
    assert await begin(ledger, "last", tmp_path).flush()
    assert ledger.sums() == (0, 0, SECOND)


async def test_small_steps_are_not_written(tmp_path: Path) -> None:
    meter = begin(Ledger(), "own", tmp_path)
    meter.note_open([open_for("r", 100_000)])
    assert meter._own is not None
    size = meter._own.size
    meter.note_open([open_for("r", 120_000)])
    assert meter._own.size == size
    meter.note_open([open_for("r", 150_000)])
    assert meter._own.size > size


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["open", "record", "end", "flush", "kill"]), st.integers(1, 5)),
        max_size=30,
    )
)
async def test_every_order_of_events_charges_each_request_once(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str, int]]
) -> None:
    directory, ledger = tmp_path_factory.mktemp("usage"), Ledger()
    number, us = 0, Counter[str]()
    meter = begin(ledger, "gateway-0", directory)
    expected = 0
    for name, what, seconds in events:
        request_id = f"{number}-{name}"
        if what == "open":
            us[request_id] += seconds * SECOND
            meter.note_open([open_for(request_id, us[request_id])])
        elif what == "record":
            used = us.pop(request_id, 0) + SECOND
            expected += used
            meter.record(replace(RECORD, compute_us=used), request_id)
        elif what == "end":
            us.pop(request_id, None)
            meter.end(request_id)
        elif what == "flush":
            await meter.flush()
        else:
            expected += sum(us.values())
            us.clear()
            kill(meter)
            number += 1
            meter = begin(ledger, f"gateway-{number}", directory)
    expected += sum(us.values())
    kill(meter)
    assert await begin(ledger, "last", directory).flush()
    assert ledger.sums()[2] == expected


@given(st.binary(max_size=200))
def test_damaged_lines_are_no_requests(noise: bytes) -> None:
    line = open_for("r", SECOND).line()
    assert [u.request_id for u in find_lost(line + noise.replace(b"\n", b" ") + b"\n")] == ["r"]
    assert find_lost(line + ended_line("r")) == []
    assert parse_lost(b"{" + noise) is None
    assert parse_lost(line) is None, "it may be recorded later"


@pytest.mark.parametrize("fields", ['[1,"a","m","",1]', '["x","a","m","",1,"cpu"]', '[1,"a\\u0000","m","",1,"cpu"]', "null"])
def test_line_that_the_ledger_would_refuse_is_skipped(fields: str) -> None:
    assert parse_lost(b'{"lost":"r","usage":' + fields.encode() + b"}\n") is None


@pytest.mark.parametrize("is_keyed", [False, True])
def test_requests_that_another_gateway_takes_over_are_not_charged_by_the_next_one(is_keyed: bool) -> None:
    """Their new owner reads the whole response, and records all of it."""
    served = SimpleNamespace(device_ids=("cpu:0",), device_count=2)
    request = SimpleNamespace(
        stats=SimpleNamespace(instance=served, earlier_device_s=0.5),
        attempt=SimpleNamespace(device_s=1.0),
        engine_request=SimpleNamespace(lora_adapter=None),
        completion=SimpleNamespace(is_done=False),
        idempotency=object() if is_keyed else None,
        ticket=SimpleNamespace(id="r", model="m"),
    )
    found = open_usage(cast(ActiveRequest, request), "a")
    assert (found.compute_us if found is not None else None) == (None if is_keyed else 3_000_000)
