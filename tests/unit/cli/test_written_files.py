"""Files that commands write: complete or unchanged, and as private as what they are made from."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts.traces import RequestTrace
from tests.support.unprivileged import unprivileged
from thaw.cli.api import Api
from thaw.cli.app import main
from thaw.cli.paths import replaced_file
from thaw.errors import CommandError


def export(monkeypatch: pytest.MonkeyPatch, path: Path, *, fails: bool) -> int:
    trace = RequestTrace(request_id="r", trace_id="t", model="m", endpoint="chat", received=1.0, duration_ms=1.0)

    def traces(_: Api) -> Iterator[RequestTrace]:
        yield trace
        if fails:
            raise CommandError("The gateway did not answer.")

    monkeypatch.setenv("THAW_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(Api, "traces", traces)
    return main(["trace", "--export", str(path), "--json"])


def test_an_export_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("earlier\n")
    assert export(monkeypatch, path, fails=True) == 1
    assert path.read_text() == "earlier\n"
    assert export(monkeypatch, path, fails=False) == 0
    assert json.loads(path.read_text())["request_id"] == "r"
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


def test_links_stay_and_pipes_are_written_directly(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with replaced_file(link) as file:
        file.write(b"x")
    assert (link.is_symlink(), (tmp_path / "target").read_bytes()) == (True, b"x")
    reader, writer = os.pipe()
    try:
        with replaced_file(Path(f"/proc/self/fd/{writer}")) as file:
            file.write(b"y")
        assert os.read(reader, 2) == b"y"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_an_imported_file_is_as_private_as_its_source(tmp_path: Path, mode: int) -> None:
    source, target = tmp_path / "config.yaml", tmp_path / "thaw.yaml"
    source.write_text("apiKeys: [sk-hunter2]\nmodels:\n  a:\n    cmd: /opt/serve --port ${PORT}\n")
    source.chmod(mode)
    before = os.umask(0o022)
    try:
        assert main(["import", "llama-swap", str(source), "--output", str(target), "--json"]) == 0
    finally:
        os.umask(before)
    assert "sk-hunter2" in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == mode


@pytest.fixture
def shared() -> Iterator[Path]:
    """Create a file that every user may write."""
    with tempfile.TemporaryDirectory(prefix="thaw-test-", dir="/tmp") as directory:
        path = Path(directory) / "run.jsonl"
        path.write_text("earlier\n")
        path.chmod(0o666)
        yield path
        Path(directory).chmod(0o700)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_a_replaced_file_keeps_its_mode_and_owner(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("earlier\n")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    path.chmod(mode)
    before = path.stat()
    with replaced_file(path) as file:
        file.write(b"x")
    after = path.stat()
    assert path.read_bytes() == b"x"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with replaced_file(tmp_path / "new") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


@pytest.mark.parametrize("directory_mode", [0o555, 0o777])
def test_a_file_that_cannot_be_replaced_is_written_in_place(shared: Path, directory_mode: int) -> None:
    """Its directory is not writable, or (if root runs this) it has another owner."""
    shared.parent.chmod(directory_mode)
    before = shared.stat()
    with unprivileged(), replaced_file(shared) as file:
        file.write(b"x")
    after = shared.stat()
    assert shared.read_bytes() == b"x"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert list(shared.parent.iterdir()) == [shared]


def test_a_write_protected_file_is_unchanged(shared: Path) -> None:
    shared.parent.chmod(0o777)
    shared.chmod(0o444)
    with unprivileged(), pytest.raises(PermissionError), replaced_file(shared):
        pass
    assert shared.read_text() == "earlier\n"


def test_output_streams_keep_what_was_written_before(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom thaw.cli.paths import replaced_file\n"
        "with replaced_file(Path('/dev/stdout')) as file:\n    file.write(b'x\\n')\nprint('end')"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"x\nend\n"
    path = tmp_path / "log"
    path.write_text("earlier\n")
    with path.open("ab") as output:
        subprocess.run(command, stdout=output, check=True)
    assert path.read_text() == "earlier\nx\nend\n"
