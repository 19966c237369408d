"""Distribute tests to pytest-xdist's workers by folder, and some by module.

The tests of a folder share servers, and some share a cgroup, the swap or the Docker Engine: one
worker runs them in sequence. Tests of whole meshes compute, most others wait for processes and
time-outs: they run at the same time, on workers of their own.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SHARED_MESH = (
    "batches", "console", "console_answers", "console_doctor", "console_logs", "console_models", "console_playground",
    "documents", "ollama", "openai", "pulls", "tools", "traffic", "translated_apis", "verbs",
)  # fmt: skip
"""Modules of tests/e2e that share a mesh (`SHARED`); the last one ends it."""
GROUPS = (
    dict.fromkeys(("integration/suspend", "unit/suspend", "e2e/test_suspend.py", "e2e/test_engines.py"), "swap")
    | dict.fromkeys((f"chaos/test_{name}.py" for name in ("clients", "crowds", "kills", "servers")), "chaos")
    | dict.fromkeys((f"e2e/test_{name}.py" for name in SHARED_MESH), "e2e")
)
"""Folders and files that one worker runs in sequence.

Those of "swap" page out and measure freed memory; the others share a mesh.
"""
BY_MODULE = ("unit/papers", "unit/scheduler", "unit/simulator")
"""Folders whose modules share nothing, and which are near the end of the order: as one piece each
they would keep one worker busy while the others have nothing left.
"""
MESH_WORKERS = int(os.environ.get("THAW_TEST_MESH_WORKERS", "2"))
"""Workers that run tests of whole meshes first; the other workers run them last."""


def scope_of(nodeid: str) -> str:
    """Return the folder or group of a test."""
    parts = nodeid.split("::")[0].split("/")[1:]
    if "/".join(parts[:2]) in BY_MODULE:
        return "/".join(parts)
    folder = "docker" if parts[0] == "docker" else "/".join(parts[:2])
    return GROUPS.get(folder, folder)


def has_mesh(scope: str) -> bool:
    return scope == "swap" or scope.startswith(("chaos", "e2e"))


def has_docker_setup_ended() -> bool:
    """Return whether `.ci/run` has set up the Docker Engine, beside the first tests.

    It makes the file that `THAW_TEST_DOCKER_READY` names at the end. Other runs set up none.
    """
    file = os.environ.get("THAW_TEST_DOCKER_READY")
    return file is None or Path(file).exists()


def next_scope(waiting: Collection[str], worker: int) -> str:
    """Return the scope that a worker runs next.

    Args:
        waiting: In order of collection.
        worker: Its index.
    """
    ready = [s for s in waiting if s != "docker" or has_docker_setup_ended()]
    wanted = [s for s in ready if has_mesh(s) == (worker < MESH_WORKERS)]
    return next(iter(wanted or ready or waiting))


class ByFolder(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """pytest-xdist's own groups have no effect with this pytest version."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(next_scope(self.workqueue, self.nodes.index(node)), last=False)
        super()._assign_work_unit(node)
