"""A loader is killed while an engine maps a half-filled segment.

The engine must not serve from that segment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.launcher import until
from tests.support.mesh import LOADER, NODEAGENT, Brake, Victim, at_rest, kill, mappings
from tests.support.outcomes import Asked, ask

SHM = Path("/dev/shm")
ATTEMPTS = 5


@pytest.fixture(scope="module")
def mesh() -> Iterator[Victim]:
    victim = Victim()
    try:
        victim.begin({"one": "60m", "two": "test", "three": "test"})
        yield victim
    finally:
        victim.close()


def stop_half_way(mesh: Victim, loader: Brake) -> int | None:
    """Let the loader run in short slices until an engine maps an incomplete segment.

    Returns:
        The engine's pid; None if the load completed first.
    """
    engine = int(mesh.await_starting("one")["pids"][0])
    while not mappings(engine):
        loader.step(0.001)
        until(lambda: bool(mappings(engine)) or at_rest(engine), what="the engine has followed")
    return None if all(whole(SHM / name, low, high) for name, low, high in mappings(engine)) else engine


def whole(path: Path, low: int, high: int) -> bool:
    with path.open("rb") as file:
        return os.lseek(file.fileno(), low, os.SEEK_HOLE) >= high


def caught_half_way(mesh: Victim) -> tuple[Brake, int, list[Asked]]:
    for _ in range(ATTEMPTS):
        mesh.make_cold("one")
        loader = Brake(mesh.pid(LOADER))
        try:
            asked = [Asked(mesh.url, "one", stream=stream, tokens=20) for stream in (True, False)]
            engine = stop_half_way(mesh, loader)
        except BaseException:
            loader.resume()
            raise
        if engine is not None:
            return loader, engine, asked
        loader.resume()
        for a in asked:
            a.outcome()
    pytest.fail(f"{ATTEMPTS} times the loader was too fast to be caught")


@pytest.mark.parametrize("victim", [LOADER, "nats", NODEAGENT, "engine"])
def test_killed_while_bytes_arrive(mesh: Victim, client: openai.OpenAI, victim: str) -> None:
    expected = ask(client, tokens=20)
    loader, engine, asked = caught_half_way(mesh)
    try:
        if victim == "engine":
            kill(engine)
        else:
            old = mesh.kill(victim)
    finally:
        loader.resume()
    for outcome in (a.outcome() for a in asked):
        assert (outcome.kind, outcome.text) == ("answered", expected)
    assert ask(client, tokens=20) == expected
    if victim != "engine":
        mesh.await_replaced(victim, old)
