"""An agent's view of its predecessor's records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.nodeagent.adapters.records import Records
from services.nodeagent.domain.state import Instance
from shared.errors import Conflict
from tests.unit.nodeagent.world import World


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "agent")


@pytest.fixture
def instance() -> Instance:
    world = World("cpu:0")
    world.ready("a", 7)
    return world["a"]


def test_the_next_agent_finds_instances_epoch_and_crashes(records: Records, instance: Instance, tmp_path: Path) -> None:
    records.save(instance, ())
    records.save_epoch(3)
    records.save_crashes({"m": 2})
    successor = Records(tmp_path / "agent")
    assert [r.instance for r in successor.load()] == [instance]
    assert (successor.load_epoch(), successor.load_crashes()) == (3, {"m": 2})
    successor.forget("a")
    assert (list(records.load()), list((tmp_path / "agent" / "instances").iterdir())) == ([], [])


def test_records_of_an_earlier_boot_are_removed(records: Records, instance: Instance, tmp_path: Path) -> None:
    records.save(instance, ())
    path = tmp_path / "agent" / "instances" / "a.json"
    (found,) = records.load()
    path.write_text(found.model_copy(update={"machine_boot": "earlier"}).model_dump_json())
    records.charges_path("a").touch()
    assert list(records.load()) == []
    assert list(path.parent.iterdir()) == []


def test_a_record_that_cannot_be_removed_is_logged(records: Records, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "agent" / "instances" / "a.json").mkdir()
    records.charges_path("a").touch()
    records.forget("a")
    assert "failed to remove a record" in caplog.text
    assert not records.charges_path("a").exists()


def test_a_second_agent_with_the_same_state_is_refused(records: Records, tmp_path: Path) -> None:
    with records.hold_lock(), pytest.raises(Conflict, match="Another nodeagent runs"), Records(tmp_path / "agent").hold_lock():
        pass
    with Records(tmp_path / "agent").hold_lock():
        pass


def test_epoch_and_crashes_are_on_the_disk_before_they_replace_earlier_ones(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name may otherwise lead to an empty file, as if no epoch were known."""
    synced: set[int] = set()
    unsynced: list[str] = []
    sync, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def replace(self: Path, target: Path) -> Path:
        unsynced.extend([target.name] if self.stat().st_ino not in synced else [])
        synced.discard(target.parent.stat().st_ino)
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    directory = (tmp_path / "agent").stat().st_ino
    records.save_epoch(4)
    assert directory in synced, "the name"
    records.save_crashes({"m": 1})
    assert directory in synced, "the name"
    assert unsynced == []
    assert (records.load_epoch(), records.load_crashes()) == (4, {"m": 1})
