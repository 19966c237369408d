"""docker and Compose commands: images of this tree, and projects."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import yaml

from shared.ports import free_port
from tests.docker.stages import Builder
from tests.support.launcher import until

ROOT = Path(__file__).parents[2]
OURS = ("gateway", "scheduler", "migrator", "loader", "nodeagent")
STAND_INS = {
    "NATS_IMAGE": "nats:2.12-alpine",
    "POSTGRES_IMAGE": "postgres:17-alpine",
    "PYTHON_IMAGE": "python:3.11-slim-bookworm",
}
"""Local images that an engine without a registry may have; compose/ pins the patch version of the
same.
"""
_SERVED = ("gateway", "scheduler", "migrator", "nodeagent")
"""Services that `up` names; it also starts their dependencies.

No service depends on Jaeger: the test's receiver gets the traces.
"""


POLL_S = 0.5
"""Time between looks at a container; each runs two commands."""


class CommandFailed(subprocess.SubprocessError):
    """A command failed; the message is its output."""


def docker(*arguments: str, within: float = 180, text: str | None = None, also_stderr: bool = False) -> str:
    """Return the output of `docker ARGUMENTS`.

    Raises:
        CommandFailed: The exit status is not 0.
    """
    return run("docker", *arguments, within=within, text=text, also_stderr=also_stderr)


def run(
    *command: str, within: float = 180, text: str | None = None, env: dict[str, str] | None = None, also_stderr: bool = False
) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=within, input=text, env=env, check=False)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout + (done.stderr if also_stderr else "")


COMPOSE_COMMANDS = {"v2": ("docker", "compose"), "v1": ("docker-compose",)}


@cache
def compose_version(kind: str) -> str | None:
    """Return the version that the command reports, as `2.26.1`.

    None if it is not installed, or if `docker-compose` is not of version 1.
    """
    command = COMPOSE_COMMANDS[kind]
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False)
    version = done.stdout.strip().removeprefix("v")
    return version if done.returncode == 0 and (kind == "v2" or version.startswith("1.")) else None


@cache
def base_image(variable: str) -> str | None:
    """Return the override of a server image of STAND_INS, if any.

    That is the environment variable, else the local stand-in if the pinned image is absent.
    """
    if given := os.environ.get(variable):
        return given
    local = STAND_INS[variable]
    return local if not _is_there(pinned(variable)) and _is_there(local) else None


def image_of(variable: str) -> str:
    """Return the image that a test uses for a server of STAND_INS."""
    return base_image(variable) or pinned(variable)


def pinned(variable: str) -> str:
    """Return the image that compose/ uses if a variable is not set."""
    if variable == "PYTHON_IMAGE":
        found = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "compose" / "Dockerfile").read_text(), re.MULTILINE)
    else:
        found = re.search(rf"\$\{{{variable}:-([^}}]+)}}", (ROOT / "compose" / "compose.yaml").read_text())
    assert found is not None
    return found[1]


@dataclass(frozen=True)
class Images:
    mesh: str
    node: str


def build_images(context: Path) -> Images:
    """Build the images that are missing; a hash of their inputs names them.

    Args:
        context: An empty directory.
    """
    python = image_of("PYTHON_IMAGE")
    builder = Builder(ROOT, context, python, lambda folder: _torch_wheels() if folder == "compose/wheels" else [])
    return Images(builder.build("mesh"), builder.build("node"))


def _is_there(image: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode == 0


def _torch_wheels() -> list[Path]:
    """Return torch wheels in the folders that pip searches.

    The build prefers these to the CUDA build of an index.
    """
    listed = run(sys.executable, "-m", "pip", "config", "list")
    folders = {f for line in listed.splitlines() if "find-links" in line for f in line.split("=", 1)[1].strip("'\" ").split()}
    return sorted(w for f in folders if Path(f).is_dir() for w in Path(f).glob("torch-*-cp311-*.whl"))


class Project:
    """A project of compose/, changed where local stand-ins replace server images."""

    def __init__(
        self,
        command: tuple[str, ...],
        images: Images,
        models: Path,
        otlp_port: int,
        hub_port: int,
        directory: Path,
        more: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        """Prepare the project.

        Args:
            directory: The folder for the changed files.
            ports: Host ports that the test itself serves to the containers.
            more: Files of compose/ on top of compose.yaml, and their variables.
        """
        self._command = command
        self._more = more
        self.name = f"thaw-test-{uuid.uuid4().hex[:8]}"
        self.images = images
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._override = directory / "override.yaml"
        self._override.write_text(yaml.safe_dump(_override()))
        self._env = {
            **os.environ,
            "THAW_MESH_IMAGE": images.mesh,
            "THAW_NODE_IMAGE": images.node,
            "THAW_MODELS": str(models),
            "THAW_PORT": str(self.port),
            "THAW_OTLP_ENDPOINT": f"http://receiver:{otlp_port}",
            "HF_ENDPOINT": f"http://receiver:{hub_port}",
            "THAW_DEVICES": "cpu:0=1GiB",
            "THAW_SHM_SIZE": "512m",
            "THAW_LOADER_MEMORY": "2g",
            "THAW_ENGINES_MEMORY": "4g",
            **environment,
        }
        for variable in ("NATS_IMAGE", "POSTGRES_IMAGE"):
            if (image := base_image(variable)) is not None:
                self._env[variable] = image

    def compose(self, *arguments: str, within: float = 300) -> str:
        names = [ROOT / "compose" / n for n in ("compose.yaml", *self._more)]
        files = [x for path in (*names, self._override) for x in ("-f", str(path))]
        return run(*self._command, *files, "-p", self.name, *arguments, within=within, env=self._env)

    def up(self) -> None:
        try:
            self.compose("up", "-d", "--no-build", *_SERVED, within=600)
            self.wait_healthy("nats", "postgres", "node", *OURS)
        except (subprocess.SubprocessError, TimeoutError) as e:
            raise RuntimeError(f"{e}\n{self.logs()}") from e

    def down(self) -> None:
        self.compose("down", "-v", "--remove-orphans", "-t", "20", within=300)

    def container(self, service: str) -> str:
        """Return the id of a service's container."""
        return docker("ps", "-aq", *self._of_project(), "--filter", f"label=com.docker.compose.service={service}").strip()

    def inspect(self, service: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(docker("inspect", self.container(service)))
        return found[0]

    def execute(self, service: str, *command: str, user: str = "", text: str | None = None, within: float = 300) -> str:
        """Return the output of a command in a service's container."""
        options = ["-i"] + (["-u", user] if user else [])
        return docker("exec", *options, self.container(service), *command, within=within, text=text)

    def add_model(self, name: str, source: str, *options: str) -> str:
        """Register a model; return the command's output when the gateway knows the model."""
        output = self.execute("gateway", "thaw", "models", "add", name, source, *options)
        model = f"{self.url}/v1/models/{name}"
        until(lambda: httpx.get(model, timeout=120, trust_env=False).is_success, what=f"the gateway knows {name}")
        return output

    def logs(self, *services: str) -> str:
        return self.compose("logs", "--no-color", "--tail=60", *services)

    def wait_healthy(self, *services: str, within: float = 600) -> None:
        """Wait until all services are healthy, at most `within` seconds in all."""
        deadline = time.monotonic() + within
        for service in services:
            while (state := self.inspect(service)["State"])["Status"] != "running" or state["Health"]["Status"] != "healthy":
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{service} is not healthy: {json.dumps(state)[-2000:]}")
                time.sleep(POLL_S)

    def left(self) -> list[str]:
        """Return containers, volumes and networks of this project that still exist."""
        kinds = (("ps", "-aq"), ("volume", "ls", "-q"), ("network", "ls", "-q"))
        return [name for kind in kinds for name in docker(*kind, *self._of_project()).split()]

    def _of_project(self) -> tuple[str, str]:
        return "--filter", f"label=com.docker.compose.project={self.name}"


def _override() -> dict[str, Any]:
    services: dict[str, Any] = {name: {"extra_hosts": ["receiver:host-gateway"]} for name in OURS}
    if not _has("NATS_IMAGE", "command -v wget"):
        # In a shell: it runs every 3 s, and would start an interpreter each time.
        ask = r"exec 3<>/dev/tcp/127.0.0.1/8222 && printf 'GET /healthz HTTP/1.0\r\n\r\n' >&3 && grep -q '200 OK' <&3"
        services["nats"] = {"healthcheck": {"test": ["CMD", "bash", "-c", ask]}}
    if _has("POSTGRES_IMAGE", "test -e /entry"):
        # A stand-in image that reads only POSTGRES_PASSWORD.
        start = 'POSTGRES_PASSWORD=$$(cat "$$POSTGRES_PASSWORD_FILE") exec /entry "$$@"'
        services["postgres"] = {"entrypoint": ["sh", "-c", start, "--"]}
    return {"services": services}


def _has(variable: str, test: str) -> bool:
    image = image_of(variable)
    done = subprocess.run(["docker", "run", "--rm", "--entrypoint", "sh", image, "-c", test], capture_output=True, check=False)
    return done.returncode == 0
