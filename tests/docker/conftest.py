"""A Docker Engine, two images built from this tree, and a mesh of them.

Tests are skipped, with the reason, if there is no Docker Engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import COMPOSE_COMMANDS, POLL_S, Images, Project, build_images, compose_version, docker
from tests.docker.guarded import Guarded
from tests.integration.loader.fake_hub import FakeHub
from tests.support.by_folder import has_docker_setup_ended
from tests.support.otlp import OtlpReceiver
from thaw.demo.models import make_demo_model

_SETUP_TIMEOUT_S = 800.0
"""Less than the time limit of the first module's tests (2,400 s). The set-up takes two minutes."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server = Guarded(tmp_path_factory.mktemp("nats"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def engine() -> None:
    """Return a Docker Engine that responds, or skip the test."""
    deadline = time.monotonic() + _SETUP_TIMEOUT_S
    while not has_docker_setup_ended() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if shutil.which("docker") is None:
        pytest.skip("needs a Docker Engine; there is no docker command")
    try:
        docker("info", within=120)
    except subprocess.SubprocessError as e:
        pytest.skip(f"needs a Docker Engine; none answers: {str(e).splitlines()[-1]}")


@pytest.fixture(scope="session")
def images(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return build_images(tmp_path_factory.mktemp("context"))


@pytest.fixture(scope="session")
def otlp() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver("0.0.0.0")
    yield receiver
    receiver.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the model `demo` that the containers' user can read."""
    directory = tmp_path_factory.mktemp("models")
    make_demo_model(directory / "demo", "test")
    for path in (directory, *directory.parents):
        if path == Path("/tmp"):
            break
        path.chmod(0o755)
    return directory


@pytest.fixture(scope="session")
def hub(models: Path) -> Iterator[FakeHub]:
    """Serve the model `demo` as repository org/model of a hub."""
    server = FakeHub(models / "demo", host="0.0.0.0")
    yield server
    server.close()


@pytest.fixture(scope="session")
def compose(engine: None) -> tuple[str, ...]:
    """Return the Compose under test.

    That is the plug-in of version 2, or docker-compose of version 1 if the plug-in is missing or
    `THAW_TEST_COMPOSE=v1`.
    """
    wanted = [os.environ["THAW_TEST_COMPOSE"]] if "THAW_TEST_COMPOSE" in os.environ else list(COMPOSE_COMMANDS)
    for kind in wanted:
        if compose_version(kind) is not None:
            return COMPOSE_COMMANDS[kind]
    pytest.skip(f"needs Compose {' or '.join(wanted)}, and there is none that answers as one")


@pytest.fixture(scope="module")
def project(
    compose: tuple[str, ...],
    images: Images,
    models: Path,
    otlp: OtlpReceiver,
    hub: FakeHub,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Project]:
    """Start the whole mesh of compose/ as a Compose project, and wait until it is healthy."""
    project = Project(compose, images, models, otlp.grpc_port, hub.port, tmp_path_factory.mktemp("compose"))
    try:
        project.up()
        yield project
    finally:
        project.down()
