"""Files that commands write: complete or unchanged, and as private as what they are made from."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts.traces import RequestTrace
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
