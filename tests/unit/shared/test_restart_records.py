"""A successor finds the last record or the one before, wherever its predecessor was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.restart_records import recover_records, write_record


class Killed(BaseException):
    """The process ends here."""


def read(directory: Path) -> dict[str, object]:
    recover_records(directory)
    assert [p for p in directory.iterdir() if p.suffix != ".json"] == []
    return {p.name: json.loads(p.read_text()) for p in directory.iterdir()}


@pytest.mark.parametrize("step", ["unlink", "rename"])
@pytest.mark.parametrize("earlier", [None, "old"])
def test_kill_between_two_steps_leaves_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, earlier: str | None
) -> None:
    path = tmp_path / "i-1.n1.json"
    if earlier is not None:
        write_record(path, json.dumps(earlier))

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, step, kill)
        with pytest.raises(Killed):
            write_record(path, json.dumps("new"))
    is_replaced = step == "rename" or earlier is None
    assert read(tmp_path) == {path.name: "new" if is_replaced else earlier}


@pytest.mark.parametrize("earlier", [None, "old"])
def test_half_written_record_is_dropped(tmp_path: Path, earlier: str | None) -> None:
    path = tmp_path / "i-1.json"
    if earlier is not None:
        write_record(path, json.dumps(earlier))
    (tmp_path / "i-1.json.new").write_text('{"a": {"b": 1}')
    assert read(tmp_path) == ({path.name: earlier} if earlier is not None else {})


def test_failed_write_keeps_the_earlier_record(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    write_record(path, json.dumps("old"))
    (tmp_path / "w.json.new").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_record(path, json.dumps("new"))
    (tmp_path / "w.json.new").rmdir()
    assert read(tmp_path) == {path.name: "old"}


def test_shorter_record_replaces_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    write_record(path, json.dumps("long" * 100))
    write_record(path, json.dumps("s"))
    assert read(tmp_path) == {path.name: "s"}
