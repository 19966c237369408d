"""A full disk below the whole mesh, and shared memory with room for one model."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.launcher import until
from tests.support.mesh import LOADER, Victim
from tests.support.outcomes import Asked, ask
from tests.support.sizes import size

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")]
_HOME_SIZE = "256m"
_NODES_SIZE = "4m"
_WEIGHTS = 880_640
_TOKENS = size(120, 900)
_OWN_SHM = f'mount -t tmpfs -o size={_WEIGHTS * 3 // 2} tmpfs /dev/shm && exec "$@"'


def _mount(directory: Path, size: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(directory)], check=True)


class Cramped(Victim):
    """A mesh whose state is on a small disk, with a small private /dev/shm."""

    def __init__(self, **environment: str) -> None:
        super().__init__(**environment)
        self.nodes = self.home / "nodes"
        _mount(self.home, _HOME_SIZE)
        self.nodes.mkdir()
        _mount(self.nodes, _NODES_SIZE)

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        if arguments[0] != "up":
            return super().popen(*arguments, **options)
        inside = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _OWN_SHM, "sh")
        return super().popen(*arguments, prefix=inside, **options)

    def segments(self) -> list[Path]:
        try:
            shm = Path(f"/proc/{self.pid(LOADER)}/root/dev/shm")
            return [p for p in shm.iterdir() if p.name.startswith("thaw-")]
        except (OSError, KeyError, TypeError):
            return super().segments()

    def resize_shared_memory(self, size: str) -> None:
        enter = ["nsenter", "-t", str(self.pid(LOADER)), "-m"]
        subprocess.run([*enter, "mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)

    def fill(self, directory: Path) -> Path:
        filler = directory / "filler"
        with (
            filler.open("wb", buffering=0) as file,
            Path("/dev/zero").open("rb") as zeros,
            pytest.raises(OSError, match="No space"),
        ):
            shutil.copyfileobj(zeros, file)
        return filler

    def close(self) -> None:
        try:
            super().close()
        finally:
            for directory in (self.nodes, self.home):
                subprocess.run(["umount", str(directory)], check=False)
            self.home.rmdir()


@pytest.fixture(scope="module")
def mesh() -> Iterator[Victim]:
    victim = Cramped()
    try:
        victim.begin()
        yield victim
    finally:
        victim.close()


def test_with_shared_memory_for_one_model_models_are_served_in_turn(mesh: Cramped, client: openai.OpenAI) -> None:
    """With shared memory for one model, the mesh serves one model at a time.

    The device's budget holds two, so only the loader detects the shortage. The other model is
    evicted, and the client's retry succeeds.
    """
    expected = ask(client)
    for outcome in [Asked(mesh.url, "two", stream=stream, tokens=8).outcome() for stream in (True, False)]:
        if outcome.kind != "answered":
            assert (outcome.kind, outcome.status, outcome.code) == ("error", 503, "insufficient_memory")
            assert "/dev/shm" in str(outcome.error)
    assert ask(client, "two")
    assert ask(client) == expected


def test_insufficient_shared_memory_is_a_typed_error_until_enlarged(mesh: Cramped, client: openai.OpenAI) -> None:
    for model in ("one", "two"):
        mesh.make_cold(model)
    mesh.resize_shared_memory(str(_WEIGHTS // 2))
    for outcome in [Asked(mesh.url, "one", stream=stream, tokens=8).outcome() for stream in (True, False)]:
        assert (outcome.kind, outcome.status, outcome.code) == ("error", 503, "insufficient_memory")
        assert "enlarge" in str(outcome.error)
    mesh.assert_settled()
    mesh.resize_shared_memory("64m")
    assert ask(client)
    assert ask(client, "two")


@pytest.mark.parametrize("place", ["home", "nodes"])
def test_full_disk_loses_no_response_once_there_is_room(mesh: Cramped, client: openai.OpenAI, place: str) -> None:
    """A full disk costs no response once there is room again.

    With `nodes` only the nodeagent, the loader and the engines have a full disk; the servers do
    not.
    """
    mesh.resize_shared_memory("64m")
    whole = ask(client, tokens=_TOKENS)
    mesh.make_cold("two")
    filler = mesh.fill(mesh.home if place == "home" else mesh.nodes)
    try:
        # A warm request writes nothing to the disk.
        outcomes = [a.outcome() for a in [Asked(mesh.url, "one", stream=stream, tokens=_TOKENS) for stream in (True, False)]]
        assert [(o.kind, o.text) for o in outcomes] == [("answered", whole)] * 2
        waiting = [Asked(mesh.url, "two", stream=stream, tokens=8) for stream in (True, False)]
        waiting[0].join(3)
    finally:
        filler.unlink()
    for outcome in (a.outcome() for a in waiting):
        assert outcome.kind == "answered" or (outcome.kind, outcome.code) == ("error", "no_space"), outcome
    until(mesh.ready, what="the gateway is ready")
    assert ask(client, "two")
    assert ask(client, tokens=_TOKENS) == whole
