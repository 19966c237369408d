"""The logs that a nodeagent lists and reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.nodeagent.adapters.logs import LogReader
from shared.contracts.logs import MAX_BYTES, MAX_LINES, ListLogs, LogRead, LogsListed, ReadLog
from shared.errors import NotFound
from shared.messaging.mesh import HEADROOM_BYTES

LEAST_PAYLOAD_BYTES = 1 << 20
"""`thaw doctor` wants NATS to take messages of this size."""


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    engines = tmp_path / "nodes" / "n" / "logs"
    engines.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "secret.log").write_text("secret\n")
    for path, age in ((engines / "i-1.n.engine.log", 10), (tmp_path / "logs" / "loader.n.log", 5), (engines / "zygote.log", 1)):
        path.write_text("one\ntwo\n")
        os.utime(path, (1_000 - age, 1_000 - age))
    (tmp_path / "logs" / "gateway.log").write_text("of another service\n")
    return engines


@pytest.fixture
def reader(tmp_path: Path, engines: Path) -> LogReader:
    return LogReader("n", engines, tmp_path / "logs", lambda: {"i-1.n": "alpha"})


async def listed(reader: LogReader) -> list[str]:
    found = await reader.answer(ListLogs())
    assert isinstance(found, LogsListed)
    return [log.name for log in found.logs]


async def read(reader: LogReader, name: str, **fields: int) -> LogRead:
    found = await reader.answer(ReadLog(name=name, **fields))
    assert isinstance(found, LogRead)
    return found


async def test_logs_of_the_node_are_listed_the_newest_first(reader: LogReader) -> None:
    found = await reader.answer(ListLogs())
    assert isinstance(found, LogsListed)
    names = [(log.name, log.nbytes, log.model) for log in found.logs]
    assert names == [("zygote", 8, None), ("loader.n", 8, None), ("i-1.n.engine", 8, "alpha")]


async def test_log_is_read_and_continued(reader: LogReader, engines: Path) -> None:
    first = await read(reader, "i-1.n.engine", lines=1)
    assert (first.lines, first.skipped) == (("two",), True)
    with (engines / "i-1.n.engine.log").open("a") as file:
        file.write("three\n")
    assert (await read(reader, "i-1.n.engine", after=first.position)).lines == ("three",)


async def test_log_of_an_instance_in_an_executor_is_a_link_inside_the_directory(reader: LogReader, engines: Path) -> None:
    (engines / "i-2.n.engine.log").symlink_to("zygote.log")
    assert (await read(reader, "i-2.n.engine")).lines == ("one", "two")


@pytest.mark.parametrize("name", ["../../../secret", "gateway", "logs/loader.n", "/etc/passwd", "*", "i-9.n.engine", "outside"])
async def test_other_files_are_not_found(reader: LogReader, engines: Path, tmp_path: Path, name: str) -> None:
    (engines / "outside.log").symlink_to(tmp_path / "secret.log")
    assert "outside" not in await listed(reader)
    with pytest.raises(NotFound, match="has no log"):
        await read(reader, name)


async def test_reply_of_any_content_fits_into_a_message(reader: LogReader, engines: Path) -> None:
    for line in (b"\xff" * 127, b'"' * 127, b"\\" * 127, b"\x00" * 127, b""):
        (engines / "zygote.log").write_bytes((line + b"\n") * (2 * MAX_BYTES // (len(line) + 1)))
        found = await read(reader, "zygote", lines=MAX_LINES)
        assert len(found.model_dump_json().encode()) < LEAST_PAYLOAD_BYTES - HEADROOM_BYTES
