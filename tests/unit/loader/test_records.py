"""What a loader finds of its predecessor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.loader.adapters.records import Records, SegmentRecord
from services.loader.adapters.shm import SHM, segments
from services.loader.load import load_segment
from shared.contracts.segment import segment_prefix
from shared.errors import Conflict
from tests.unit.loader.checkpoints import write_checkpoint


@pytest.fixture
def prefix(tmp_path: Path) -> Iterator[str]:
    found = segment_prefix(tmp_path, "n")
    yield found
    for name in segments(found):
        (SHM / name).unlink()


@pytest.fixture
def records(tmp_path: Path, prefix: str) -> Iterator[Records]:
    records = Records(tmp_path / "loader", prefix)
    with records.sole():
        yield records


def record(tmp_path: Path, segment: str, *holders: str) -> SegmentRecord:
    write_checkpoint(tmp_path / "m")
    report = load_segment(tmp_path / "m", segment, weights_id="w")
    return SegmentRecord(
        weights_id="w", model="m", segment=segment, directory=str(tmp_path / "m"), total_bytes=report.total_bytes, holders=holders
    )


def test_whole_and_held_segments_are_adopted(tmp_path: Path, prefix: str, records: Records) -> None:
    kept = record(tmp_path, f"{prefix}a", "i1", "i2")
    records.write(kept)
    assert records.recover() == [kept]
    assert segments(prefix) == [kept.segment]


@pytest.mark.parametrize("fault", ["no record", "no holders", "size", "weights id", "header", "foreign", "garbage", "missing"])
def test_all_else_is_removed(tmp_path: Path, prefix: str, records: Records, fault: str) -> None:
    found = record(tmp_path, f"{prefix}a", *([] if fault == "no holders" else ["i1"]))
    path = SHM / found.segment
    match fault:
        case "size":
            with path.open("ab") as file:
                file.truncate(found.total_bytes + 4096)
        case "weights id":
            found = found.model_copy(update={"weights_id": "other"})
        case "header":
            with path.open("r+b") as file:
                file.write(b"x")
        case "missing":
            path.unlink()
        case "foreign":
            found = found.model_copy(update={"segment": "thaw-somebody-else"})
    if fault != "no record":
        records.write(found)
    if fault == "garbage":
        (tmp_path / "loader" / "segments" / f"{found.segment}.json").write_text("{")
    assert records.recover() == []
    assert segments(prefix) == []
    assert list((tmp_path / "loader" / "segments").iterdir()) == []


def test_another_node_s_segments_are_left_alone(tmp_path: Path, records: Records) -> None:
    other = segment_prefix(tmp_path, "other")
    found = record(tmp_path, f"{other}a", "i1")
    try:
        records.recover()
        assert segments(other) == [found.segment]
    finally:
        (SHM / found.segment).unlink()


def test_one_loader_at_a_time(tmp_path: Path, prefix: str, records: Records) -> None:
    with pytest.raises(Conflict, match="another loader runs"), Records(tmp_path / "loader", prefix).sole():
        pass


def test_a_disk_that_takes_no_record_stops_nothing(tmp_path: Path, prefix: str, records: Records) -> None:
    found = record(tmp_path, f"{prefix}a", "i1")
    directory = tmp_path / "loader" / "segments"
    (directory / f"{found.segment}.tmp").mkdir()
    records.write(found)
    (directory / f"{found.segment}.tmp").rmdir()
    assert list(directory.iterdir()) == []
    records.write(found)
    assert records.recover() == [found]
