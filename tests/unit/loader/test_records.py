"""A loader's view of its predecessor's records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.loader.adapters.records import Records, WeightsRecord
from shared.contracts.segment import segment_prefix
from shared.errors import Conflict
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.pools import fill, mapper
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.pool.shm import SHM, segments


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    records = Records(tmp_path / "loader", segment_prefix(tmp_path, "n"))
    with records.hold_lock():
        yield records


@pytest.fixture
def pool(records: Records) -> Iterator[PoolMemory]:
    pool = PoolMemory(records.pool_name, 8 * CHUNK_BYTES)
    yield pool
    pool.close(unlink=True)


def record(
    tmp_path: Path, pool: PoolMemory, *holders: str, weights_id: str = "w", chunks: tuple[int, ...] = (5, 2)
) -> WeightsRecord:
    directory = tmp_path / weights_id
    write_checkpoint(directory, tensors(megabytes=20))
    region = fill(pool, directory, chunks, weights_id)
    return WeightsRecord(
        weights_id=weights_id,
        model="m",
        chunks=region.chunks,
        directory=str(directory),
        total_bytes=region.nbytes,
        holders=holders,
    )


def test_held_and_cached_weights_are_adopted_and_other_memory_freed(tmp_path: Path, records: Records, pool: PoolMemory) -> None:
    held, cached = record(tmp_path, pool, "i1", "i2"), record(tmp_path, pool, weights_id="x", chunks=(0, 7))
    for found in (held, cached):
        records.write(found)
    pool.prepare(4)
    other = SHM / f"{records.pool_name}-old"
    other.write_bytes(b"x")
    assert records.recover(pool) == ([held, cached], ())
    assert pool.count_allocated() == held.total_bytes + cached.total_bytes
    assert segments(segment_prefix(tmp_path, "n")) == [records.pool_name]


@pytest.mark.parametrize(
    "fault", ["no record", "size", "weights id", "header", "range", "twice", "chunk size", "garbage", "hole", "name", "gone"]
)
def test_incomplete_weights_are_not_adopted(tmp_path: Path, records: Records, pool: PoolMemory, fault: str) -> None:
    found = record(tmp_path, pool, "i1")
    path = tmp_path / "loader" / "weights" / "w.json"
    changes: dict[str, dict[str, object]] = {
        "size": {"total_bytes": found.total_bytes + 4096},
        "weights id": {"weights_id": "other"},
        "range": {"chunks": (5, 99)},
        "twice": {"chunks": (5, 5)},
        "chunk size": {"chunk_bytes": 4096},
    }
    if fault != "no record":
        records.write(found.model_copy(update=changes.get(fault, {})))
    match fault:
        case "header":
            pool.write(5 * CHUNK_BYTES, memoryview(b"x"))
        case "garbage":
            path.write_text("{")
        case "name":
            path.rename(path.with_name("z.json"))
        case "hole":
            pool.punch([2])
        case "gone":
            pool.punch(range(pool.count))
    assert records.recover(pool) == ([], ())
    assert pool.count_allocated() == 0
    assert list(path.parent.iterdir()) == []


def test_only_one_of_two_records_of_a_chunk_is_adopted(tmp_path: Path, records: Records, pool: PoolMemory) -> None:
    first = record(tmp_path, pool, "i1", weights_id="a")
    second = record(tmp_path, pool, "i2", weights_id="b", chunks=(1, 2))
    for found in (first, second):
        records.write(found)
    assert records.recover(pool) == ([second], ()) or records.recover(pool) == ([first], ())


def test_chunks_mapped_by_an_engine_are_not_reused(tmp_path: Path, records: Records, pool: PoolMemory) -> None:
    found = record(tmp_path, pool, "i1")
    from weights.pool.region import extents

    with mapper(pool.path, extents(found.chunks, found.total_bytes)):
        assert records.recover(pool) == ([], (2, 5))
        assert pool.count_allocated() == found.total_bytes
    assert records.recover(pool) == ([], ())
    assert pool.count_allocated() == 0


def test_memory_of_another_node_is_unchanged(tmp_path: Path, records: Records, pool: PoolMemory) -> None:
    other = SHM / f"{segment_prefix(tmp_path, 'other')}pool"
    other.write_bytes(b"x")
    try:
        records.recover(pool)
        assert other.exists()
    finally:
        other.unlink()


def test_second_loader_of_a_node_is_refused(tmp_path: Path, records: Records) -> None:
    with pytest.raises(Conflict, match="Another loader runs"), Records(tmp_path / "loader", "thaw-x-").hold_lock():
        pass


def test_failed_record_write_does_not_stop_the_loader(tmp_path: Path, records: Records, pool: PoolMemory) -> None:
    found = record(tmp_path, pool, "i1")
    directory = tmp_path / "loader" / "weights"
    (directory / "w.json.new").mkdir()
    records.write(found)
    (directory / "w.json.new").rmdir()
    assert list(directory.iterdir()) == []
    records.write(found)
    assert records.recover(pool) == ([found], ())
