"""Which tests share a worker, and which a worker runs next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.by_folder import MESH_WORKERS, SHARED_MESH, next_scope, scope_of

WAITING = ("chaos", "contract/messages", "docker", "e2e", "unit/cli")


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/docker/test_locks.py::test_a", "docker"),
        ("tests/unit/loader/format/test_root.py::test_a[x::y]", "unit/loader"),
        ("tests/unit/scheduler/placement/test_queue.py::test_a", "unit/scheduler/placement/test_queue.py"),
        ("tests/integration/suspend/test_a.py::test_a", "swap"),
        ("tests/e2e/test_suspend.py::test_a", "swap"),
        ("tests/e2e/test_verbs.py::test_a", "e2e"),
        ("tests/e2e/test_soak.py::test_a", "e2e/test_soak.py"),
        ("tests/chaos/test_kills.py::test_a", "chaos"),
    ],
)
def test_tests_that_share_servers_share_a_worker(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


def test_some_workers_run_meshes_first_and_the_others_last() -> None:
    meshes, others = range(MESH_WORKERS), range(MESH_WORKERS, MESH_WORKERS + 3)
    assert {next_scope(WAITING, worker) for worker in meshes} == {"chaos"}
    assert {next_scope(WAITING, worker) for worker in others} == {"contract/messages"}
    assert {next_scope(("docker", "unit/cli"), worker) for worker in meshes} == {"docker"}
    assert {next_scope(("chaos", "e2e"), worker) for worker in others} == {"chaos"}


def test_tests_of_containers_run_last_until_the_docker_engine_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THAW_TEST_DOCKER_READY", str(tmp_path / "ready"))
    other = MESH_WORKERS
    assert next_scope(("docker", "e2e", "unit/cli"), other) == "unit/cli"
    assert next_scope(("docker", "e2e"), other) == "e2e"
    assert next_scope(("docker",), other) == "docker"  # its fixtures wait
    (tmp_path / "ready").touch()
    assert next_scope(("docker", "e2e", "unit/cli"), other) == "docker"


def test_modules_with_the_shared_mesh_run_in_one_worker_before_the_one_that_ends_it() -> None:
    modules = (Path(__file__).resolve().parents[2] / "e2e").glob("test_*.py")
    sharing = {m.stem.removeprefix("test_") for m in modules if re.search(r"^SHARED = True$", m.read_text(), re.MULTILINE)}
    assert sharing == set(SHARED_MESH)
    assert max(SHARED_MESH) == "verbs"
