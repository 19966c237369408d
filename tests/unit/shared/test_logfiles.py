"""Parts of log files: bounded, without control characters, continued after rotation."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from shared.logfiles import bound_log, bound_logs, read_part

LIMIT = 1 << 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.log"
    path.write_text("one\ntwo\nthree\nfo")
    return path


def test_first_part_has_the_last_complete_lines_and_the_rest(path: Path) -> None:
    part = read_part(path, 2, LIMIT)
    assert (part.lines, part.rest, part.position, part.skipped) == (("two", "three"), "fo", 14, True)
    assert not read_part(path, 3, LIMIT).skipped


def test_next_part_begins_where_the_last_one_ended(path: Path) -> None:
    position = read_part(path, 10, LIMIT).position
    with path.open("a") as file:
        file.write("ur\nfive\nsix")
    part = read_part(path, 10, LIMIT, position)
    assert (part.lines, part.rest, part.skipped) == (("four", "five"), "six", False)
    again = read_part(path, 10, LIMIT, part.position)
    assert (again.lines, again.rest, again.position) == ((), "six", part.position)


def test_empty_file_is_followed_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "new.log"
    path.touch()
    part = read_part(path, 10, LIMIT)
    assert (part.lines, part.position, part.skipped) == ((), 0, False)
    path.write_text("one\n")
    assert read_part(path, 10, LIMIT, part.position).lines == ("one",)


@pytest.mark.parametrize("after", ["a\n", "a much longer line than those before\nlast\n"])
def test_rotated_log_begins_again(path: Path, after: str) -> None:
    position = read_part(path, 10, LIMIT).position
    bound_log(path, 1)
    path.write_text(after)
    part = read_part(path, 10, LIMIT, position)
    assert ("\n".join(part.lines) + "\n", part.skipped) == (after, True)


def test_log_that_cannot_be_copied_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: Path, destination: Path) -> None:
        destination.write_text("on")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fill)
    bound_log(path, 1)
    assert path.read_text() == ""
    assert [p.name for p in path.parent.iterdir()] == [path.name], "a part of the copy takes no room"


def test_part_is_bounded_in_bytes_and_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "big.log"
    path.write_text("".join(f"line {n:04}\n" for n in range(1000)))
    part = read_part(path, 1000, 105)
    assert part.lines == tuple(f"line {n:04}" for n in range(990, 1000))
    assert part.skipped
    path.write_bytes(b"x" * 1000)
    assert read_part(path, 10, 100).rest == "x" * 100


def test_control_characters_and_invalid_bytes_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"\x1b[31mred\x1b[0m\x00\t\xff\n")
    assert read_part(path, 10, LIMIT).lines == ("red\t\N{REPLACEMENT CHARACTER}",)


def test_log_with_several_names_is_rotated_by_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of instances in an executor are removed with the instances."""
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda directory, pattern: iter(sorted(glob(directory, pattern))))
    elsewhere = path.parent / "elsewhere" / "y"
    elsewhere.parent.mkdir()
    elsewhere.write_text("four\n")
    for name, target in (("a.log", Path(path.name)), ("z.log", Path(path.name)), ("y.log", elsewhere)):
        (path.parent / name).symlink_to(target)
    bound_logs(path.parent, 1)
    assert (path.read_text(), elsewhere.read_text()) == ("", "")
    assert {p.name: p.read_text() for p in path.parent.glob("*.1")} == {"x.log.1": "one\ntwo\nthree\nfo", "y.log.1": "four\n"}
