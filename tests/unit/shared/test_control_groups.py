"""The memory limits of control groups, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.nodeagent.devices import cpu
from tests.support.memory_limits import MB, Groups
from thaw.launcher import preflight
from weights.pool import shm


@pytest.fixture(params=[1, 2])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Groups:
    return Groups(tmp_path, request.param)


def test_page_cache_counts_as_available_memory(groups: Groups) -> None:
    groups.enter("/a")
    groups.make("a", str(1000 * MB), used=700 * MB, files=200 * MB)
    assert groups.limits() == (1000 * MB, 500 * MB)


def test_narrowest_enclosing_control_group_limits_memory(groups: Groups) -> None:
    groups.enter("/a/b/c")
    groups.make("a", str(1000 * MB), used=900 * MB, files=1)
    groups.make("a/b", str(500 * MB), used=100 * MB, files=1)
    groups.make("a/b/c", "max" if groups.root == groups.sys else str(2**63 - 4096))
    assert groups.limits() == (500 * MB, 100 * MB + 1)


def test_container_sees_its_own_control_group_as_the_root(groups: Groups) -> None:
    groups.enter("/docker/0123")
    groups.make("", str(1000 * MB), used=1200 * MB, files=1)
    assert groups.limits() == (1000 * MB, 0)


def test_memory_is_unlimited_without_a_control_group_limit(groups: Groups) -> None:
    assert groups.limits() == (None, None)
    groups.enter("/a")
    assert groups.limits() == (None, None)


def test_every_reader_of_available_memory_respects_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, available in (
        (shm, shm.available_memory),
        (cpu, cpu.available_bytes),
        (preflight, preflight.available_memory),
    ):
        monkeypatch.setattr(module, "memory_room", lambda: 5 * MB)
        assert available() == 5 * MB
        monkeypatch.setattr(module, "memory_room", lambda: None)
        assert available() > 5 * MB
