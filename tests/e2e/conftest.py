"""A mesh for all e2e tests of a module or of several, started by `thaw up --detach`.

The device has room for two of its three models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from shared.contracts.models import ModelSpec
from tests.support.forking import executed
from tests.support.launcher import Thaw
from tests.support.paced_zygote import Pace
from thaw.cli.demo import budget_for_two
from thaw.demo.models import make_demo_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser

JAEGER_URL = "http://127.0.0.1:16686"
MODELS = ("one", "two", "three")


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Pace:
    """Return the pace of the engines of a mesh that has its environment."""
    return Pace(tmp_path_factory.mktemp("pace"))


@pytest.fixture(scope="module")
def mesh(request: pytest.FixtureRequest) -> Iterator[Thaw]:
    """Start the mesh.

    The test module may set `DRAM` (bytes for unused weights, instead of the loader's default),
    `POLICY` (of the scheduler), `PRICES` (as JSON), `PACED` (true: the fixture `pace` slows the
    engines down), `SHARED` (true: the mesh of all modules that set it), or `EXECUTED` (true: every
    process is executed, as by users, none forked from the tests' server).
    """
    if getattr(request.module, "SHARED", False):
        yield request.getfixturevalue("shared_mesh")
        return
    start = executed() if getattr(request.module, "EXECUTED", False) else contextlib.nullcontext()
    options = {name.lower(): getattr(request.module, name, None) for name in ("DRAM", "POLICY", "PRICES")}
    if getattr(request.module, "PACED", False):
        options["pace"] = request.getfixturevalue("pace")
    with start, started(**options) as thaw:
        yield thaw


@pytest.fixture(scope="package")
def shared_mesh() -> Iterator[Thaw]:
    with started() as thaw:
        yield thaw


@contextlib.contextmanager
def started(
    dram: int | None = None, policy: str | None = None, prices: str | None = None, pace: Pace | None = None
) -> Iterator[Thaw]:
    # Tests that run at the same time keep the device of a shared mesh busy.
    batches = {"THAW_BATCH_START_AFTER_IDLE": "0"}
    jaeger = {"THAW_JAEGER_URL": JAEGER_URL}
    given = {"THAW_POLICY": policy, "THAW_PRICES": prices}
    paced = {} if pace is None else pace.environment
    thaw = Thaw(**batches, **jaeger, **paced, **{name: value for name, value in given.items() if value is not None})
    thaw.keep_port("THAW_SCHEDULER_METRICS_PORT")
    memory = "" if dram is None else f", dram: {dram}"
    models = thaw.home / "models"
    specs = tuple(ModelSpec(name=name, source=str(make_demo_model(models / name, "test", seed=i))) for i, name in enumerate(MODELS))
    config = thaw.home / "thaw.yaml"
    config.write_text(
        f"mesh:\n  port: {thaw.port}\n  nodes:\n    node-0: {{cpu:0: {budget_for_two(specs)}{memory}}}\n"
        "defaults: {keep_alive: -1}\nmodels:\n" + "".join(f"  - {{name: {s.name}, source: {s.source}}}\n" for s in specs)
    )
    try:
        up = thaw.json("up", "--detach", "--config", str(config))
        assert sorted(up["models"]["added"]) == sorted(MODELS)
        yield thaw
    finally:
        thaw.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium, for modules with the mark `needs_chromium`."""
    from tests.support.browser import chromium  # not imported for tests without a browser

    with chromium() as found:
        yield found


@pytest.fixture
def client(mesh: Thaw) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=2) as client:
        yield client


@pytest.fixture
def plain(mesh: Thaw) -> Iterator[openai.OpenAI]:
    """Return a client without retries, to observe the mesh's own errors."""
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


@pytest.fixture
def admin(mesh: Thaw) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {mesh.endpoints['admin_key']}"}
    with httpx.Client(base_url=f"{mesh.url}/admin/v1", headers=headers, timeout=120) as client:
        yield client
