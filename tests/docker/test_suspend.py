"""compose/suspend.yaml on top of the mesh, for a user without privileges.

An engine in a container is suspended and resumed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.nodeagent.suspend import memory
from services.nodeagent.suspend.cgroups import hierarchies
from tests.docker.engine import COMPOSE_COMMANDS, Images, Project
from tests.integration.loader.fake_hub import FakeHub
from tests.support.launcher import until
from tests.support.otlp import OtlpReceiver
from tests.support.paging import skip_unless_swap
from thaw.demo.models import make_demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
USER = 10001
"""The images' user."""


@pytest.fixture(scope="module")
def group(compose: tuple[str, ...]) -> Iterator[Path]:
    """Return the parent control group for Docker.

    Compose v2 gets cgroup v2 and Compose v1 gets cgroup v1; if that one is missing, the other.
    """
    skip_unless_swap()
    roots = {freezer.version: root for freezer, root in hierarchies()}
    wanted = 2 if compose == COMPOSE_COMMANDS["v2"] else 1
    root = roots.get(wanted) or next(iter(roots.values()), None)
    if root is None or not os.access(root, os.W_OK):
        pytest.skip("no control group with a freezer can be made here")
    found = root / f"thaw-test-{uuid.uuid4().hex[:8]}"
    yield found
    for left in sorted(found.glob("**/"), reverse=True):
        left.rmdir()


@pytest.fixture(scope="module")
def suspending(
    compose: tuple[str, ...],
    images: Images,
    models: Path,
    otlp: OtlpReceiver,
    hub: FakeHub,
    group: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Project]:
    make_demo_model(models / "60m", "60m")
    for path in (models / "60m").rglob("*"):
        path.chmod(0o644)
    (models / "60m").chmod(0o755)
    project = Project(
        compose,
        images,
        models,
        otlp.grpc_port,
        hub.port,
        tmp_path_factory.mktemp("suspending"),
        ("suspend.yaml", *(("suspend-cgroup2.yaml",) if compose == COMPOSE_COMMANDS["v2"] else ())),
        THAW_CGROUP_PATH=str(group),
    )
    try:
        project.up()
        yield project
    finally:
        project.down()


def instance(project: Project) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(project.execute("gateway", "thaw", "ps", "--json"))["instances"]
    return found[-1]


def await_ready(project: Project) -> dict[str, Any]:
    """Return the instance once the scheduler knows that it is ready: it may respond before."""
    found: list[dict[str, Any]] = []

    def is_ready() -> bool:
        found[:] = [instance(project)]
        return bool(found[0]["state"] == "ready")

    until(is_ready, what=lambda: f"the instance is ready: {found}")
    return found[0]


def text(project: Project) -> str:
    body = {"model": "m", "prompt": "once", "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{project.url}/v1/completions", json=body, timeout=150, trust_env=False)
    assert answer.is_success, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_an_engine_in_a_container_is_paged_out_and_resumed(suspending: Project) -> None:
    project = suspending
    project.add_model("m", "/models/60m", "--keep-alive", "-1")
    before = text(project)
    ready = await_ready(project)
    project.execute("gateway", "thaw", "sleep", "m")
    suspended = instance(project)
    assert suspended["state"] == "suspended", "\n".join((json.dumps(suspended), json.dumps(ready), project.logs("nodeagent")))
    assert suspended["freed_by_last_suspend_bytes"] > 64 << 20
    assert suspended["reserved_bytes"] < ready["reserved_bytes"] / 2
    assert text(project) == before
    assert await_ready(project)["pids"] == ready["pids"]


def test_nodeagent_has_exactly_two_capabilities(suspending: Project) -> None:
    found = (
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q '^python -m services.nodeagent' && cat $p/status; done; true"
    )
    status = suspending.execute("nodeagent", "sh", "-c", found)
    fields = dict(line.split(":", 1) for line in status.splitlines())
    wanted = 1 << memory.CAP_SYS_NICE | 1 << memory.CAP_SYS_PTRACE
    assert fields["Uid"].split() == [str(USER)] * 4
    assert fields["NoNewPrivs"].strip() == "1"
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == wanted
