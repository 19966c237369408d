"""`thaw up` stops what it has started if it fails, whatever the reason."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thaw.cli import up
from thaw.cli.output import screen
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.launcher.planning import Wanted

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "declared.json")


def replace(monkeypatch: pytest.MonkeyPatch, name: str, by: Callable[..., Any]) -> None:
    """Replace a name that `thaw.cli.up` uses."""
    monkeypatch.setattr(f"thaw.cli.up.{name}", by)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets in it."""
    with tempfile.TemporaryDirectory(prefix="thaw-") as found:
        yield Path(found)


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace everything that starts a process; return the stops."""
    found: list[str] = []
    for name in ("control.check_unused", "control.await_running", "check_room", "check_servers", "await_ready", "signal.signal"):
        replace(monkeypatch, name, lambda *_, **__: None)
    replace(monkeypatch, "control.launch", lambda *_: None)
    replace(monkeypatch, "control.has_survivors", lambda *_: False)
    replace(monkeypatch, "control.stop", lambda *_: found.append("launch"))
    replace(monkeypatch, "Api.from_home", lambda _: None)
    replace(monkeypatch, "_stop", lambda *_: found.append("furnish"))
    return found


def start(directory: Path, *, detach: bool = False) -> Any:
    home = Home(directory / "home")
    home.create()
    return up._start(home, None, Wanted(), False, screen(as_json=True), detach)


@pytest.mark.parametrize("fault", [FULL, CommandError("refused"), ValueError("wrong")])
def test_a_mesh_that_cannot_be_furnished_is_stopped_unless_it_is_detached(
    directory: Path, monkeypatch: pytest.MonkeyPatch, stops: list[str], fault: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise fault

    replace(monkeypatch, "_furnish", fail)
    for detach in (True, False):
        with pytest.raises(type(fault)):
            start(directory, detach=detach)
        assert stops == ([] if detach else ["furnish"])


@pytest.mark.parametrize("fault", [FULL, CommandError("refused"), KeyboardInterrupt()])
def test_a_start_that_fails_leaves_nothing_running(
    directory: Path, monkeypatch: pytest.MonkeyPatch, stops: list[str], fault: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise fault

    replace(monkeypatch, "control.launch", fail)
    with pytest.raises(type(fault)):
        start(directory)
    assert stops == ["launch"]
