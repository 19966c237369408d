"""Which of the loaders' statuses are written to the database."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from services.scheduler.adapters import loader_records
from services.scheduler.adapters.loader_records import LoaderRecords
from services.scheduler.domain.state.volatile import LoaderPresence
from shared.contracts.loader import CachedModel, LoaderStatus


class Recorder:
    """A database; the write of a node in `fails` fails once."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.fails: set[str] = set()

    async def keep_loaders(self, epoch: int, loaders: Iterable[LoaderPresence]) -> None:
        assert epoch == 7
        names = [loader.node for loader in loaders]
        if self.fails & set(names):
            self.fails.clear()
            raise ConnectionError
        self.writes.append(names)


def loader(node: str, *weights: str, at: float = 0.0) -> LoaderPresence:
    cached = tuple(CachedModel(weights_id=w, tier="ssd", nbytes=1) for w in weights)
    return LoaderPresence(node, at, LoaderStatus(node=node, boot_id="b", cached=cached))


async def test_only_changes_are_written() -> None:
    database = Recorder()
    records = LoaderRecords(database, 7)
    await records.write_changes({"a": loader("a", "w"), "b": loader("b")})
    await records.write_changes({"a": loader("a", "w", at=9.0), "b": loader("b", "w")})
    assert database.writes == [["a", "b"], ["b"]]


async def test_loader_that_returns_is_written_again() -> None:
    """The database forgets what a node had that is gone, and so does the scheduler's memory."""
    database = Recorder()
    records = LoaderRecords(database, 7)
    for present in ({"a": loader("a", "w")}, {}, {"a": loader("a", "w")}):
        await records.write_changes(present)
    assert database.writes == [["a"], ["a"]]


async def test_failed_write_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_records, "AT_ONCE", 1)
    database = Recorder()
    database.fails = {"b"}
    records, present = LoaderRecords(database, 7), {name: loader(name) for name in "abc"}
    with pytest.raises(ConnectionError):
        await records.write_changes(present)
    await records.write_changes(present)
    assert database.writes == [["a"], ["b"], ["c"]]
