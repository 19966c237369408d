"""Directories for state and secrets: any that another user could own is refused."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.gateway.adapters.key_marker import KeyMarker
from services.loader.adapters.peer_sharing import Sharing
from services.loader.settings import LoaderSettings
from shared.private import UntrustedDirectory, make_private, require_private
from thaw.errors import CommandError
from thaw.launcher.home import Home

OTHER_UID = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


@pytest.fixture
def place() -> Iterator[Path]:
    """Create a directory that other users can enter, unlike pytest's own."""
    place = Path(tempfile.mkdtemp(prefix="thaw-private-", dir="/tmp"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def linked(directory: Path) -> None:
    real = directory.with_name("real")
    directory.rename(real)
    directory.symlink_to(real)


def given_away(directory: Path) -> None:
    os.chown(directory, OTHER_UID, OTHER_UID)


def writable(directory: Path) -> None:
    directory.chmod(0o777)


def a_file(directory: Path) -> None:
    directory.rmdir()
    directory.write_text("")


def below_another_user(directory: Path) -> None:
    os.chown(directory.parent, OTHER_UID, OTHER_UID)


def below_a_writable_directory(directory: Path) -> None:
    directory.parent.chmod(0o777)


FAULTS = [
    pytest.param(linked, "symbolic link"),
    pytest.param(given_away, f"belongs to user {OTHER_UID}", marks=as_root),
    pytest.param(writable, "too much access"),
    pytest.param(a_file, "is not a directory"),
    pytest.param(below_another_user, f"belongs to user {OTHER_UID}", marks=as_root),
    pytest.param(below_a_writable_directory, "can be written by others"),
]


@pytest.mark.parametrize(("spoil", "says"), FAULTS)
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_directory_that_another_user_could_own_is_refused(place: Path, spoil: Callable[[Path], None], says: str, mode: int) -> None:
    directory = place / "state"
    make_private(directory, mode)
    require_private(directory, mode)
    spoil(directory)
    with pytest.raises(UntrustedDirectory, match=says):
        require_private(directory, mode)


@pytest.mark.parametrize(("spoil", "says"), [f for f in FAULTS if f.values[0] is not a_file])
def test_untrusted_state_directory_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], says: str
) -> None:
    monkeypatch.setenv("THAW_HOME", str(place / "state"))
    Home.from_environment().create()
    spoil(place / "state")
    with pytest.raises(CommandError, match=says) as refused:
        Home.from_environment().create()
    assert refused.value.code == "state_directory"


def test_secrets_directory_readable_by_others_is_refused(place: Path) -> None:
    home = Home(place / "state")
    home.create()
    home.root.chmod(0o755)
    home.create()
    home.run.chmod(0o755)
    with pytest.raises(CommandError, match="too much access"):
        home.create()


def test_looser_mode_is_accepted_below_a_private_directory(place: Path) -> None:
    (place / "private").mkdir(mode=0o700)
    loose = place / "private" / "loose"
    loose.mkdir()
    loose.chmod(0o775)
    require_private(loose, 0o755)
    place.chmod(0o777)
    with pytest.raises(UntrustedDirectory):
        require_private(loose, 0o755)


def test_a_marker_in_another_users_directory_requires_keys(place: Path) -> None:
    marker = KeyMarker(place / "gateway")
    marker.write(frozenset({"inference"}))
    assert marker.read() == {"inference"}
    (place / "gateway").chmod(0o777)
    assert marker.read() == {"inference", "admin"}


def test_small_files_are_not_stored_under_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
    sharing = Sharing(LoaderSettings(home=tmp_path / "home", peer_host=""))
    assert all((tmp_path / "home") in p.parents for p in sharing.sources._small)
    sharing.close()
