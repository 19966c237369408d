"""Engines in containers of real Docker and Podman: the life cycle of a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.enginehost.drivers.port import Launch
from services.enginehost.runtimes import container
from services.enginehost.runtimes.docker import Docker
from services.enginehost.settings import HostSettings
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from tests.docker.boxes import Boxes, docker_boxes, podman_boxes
from tests.docker.engine import CommandFailed, image_of
from tests.integration.nodeagent.harness import running_node, start_command
from tests.support.hosted import MIB, Hosts, hosted_card
from tests.support.intruder import get_as_another_user
from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer

pytestmark = pytest.mark.timeout(600)
IMAGE = "thaw-test-engine"
SERVER = Path(__file__).with_name("tiny_openai.py")


@pytest.fixture(scope="session", params=["docker", "podman"])
def boxes(request: pytest.FixtureRequest, engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    """Yield each container engine, with a small server in an image.

    The image has the same base as Thaw's images.
    """
    dockerfile = (
        f'FROM {image_of("PYTHON_IMAGE")}\nCOPY tiny_openai.py /tiny_openai.py\nENTRYPOINT ["python3", "/tiny_openai.py"]\n'
    )
    context = tmp_path_factory.mktemp("engine")
    shutil.copy(SERVER, context)
    (context / "Dockerfile").write_text(dockerfile)
    docker_boxes()("build", "-q", "-t", IMAGE, str(context))
    if request.param == "docker":
        yield docker_boxes()
        return
    with podman_boxes(tmp_path_factory.mktemp("podman")) as found:
        archive = context / "image.tar"
        docker_boxes()("save", "-o", str(archive), IMAGE)
        found("load", "-i", str(archive), within=300)
        found("tag", f"localhost/{IMAGE}", f"docker.io/library/{IMAGE}")
        archive.unlink()
        yield found


@pytest.fixture
def image(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("THAW_CONTAINER_SOCKET", str(boxes.socket))
    return IMAGE


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a state directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="thaw-t-") as place:
        monkeypatch.setenv("THAW_HOME", place)
        yield Path(place)


@pytest.fixture
async def hosts(
    boxes: Boxes, nats_server: NatsServer, home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Hosts]:
    async with connected_mesh(nats_server) as mesh:
        hosts = Hosts(mesh, f"n-{abs(hash(request.node.nodeid)) % 10**9}", nats_server.url, tmp_path)
        await hosts.start()
        yield hosts
        hosts.close()
        for instance in hosts.reports:
            for left in boxes.containers(instance):
                boxes("rm", "-f", left)


def card(image: str, *args: str, **more: Any) -> ModelCard:
    container = {"image": image, "args": [*args], "port": 9000, **more}
    return hosted_card("engine://m", "openai", memory=MIB, container=container, env={"GIVEN": "yes"})


async def test_from_start_to_removed(hosts: Hosts, boxes: Boxes, image: str) -> None:
    start = hosts.host(card(image))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert report.hosted is not None
    assert report.hosted.container is not None
    assert report.hosted.pids
    answer = await hosts.request(start.instance_id, "chat", messages=[], stream=True)
    assert answer.text() == "a b c "
    inspected = json.loads(boxes("inspect", report.hosted.container))[0]
    assert inspected["Config"]["Labels"]["thaw.node"] == hosts.node
    assert "GIVEN=yes" in inspected["Config"]["Env"]
    assert not [e for e in inspected["Config"]["Env"] if e.startswith("THAW_") and not e.startswith("THAW_INSTANCE=")]
    os.kill(report.pid, signal.SIGTERM)
    await hosts.reported(start.instance_id, lambda r: r.state == "stopped")
    assert boxes.containers(start.instance_id) == []
    assert "tiny: stopped by SIGTERM" in Path(start.log_path).read_text()


async def test_container_has_restricted_rights_and_limits(hosts: Hosts, boxes: Boxes, image: str) -> None:
    start = hosts.host(card(image, capabilities=["NET_BIND_SERVICE"], pids_limit=300, memory_limit_bytes=256 * MIB))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert report.hosted is not None
    assert report.hosted.container is not None
    status = boxes("exec", report.hosted.container, "cat", "/proc/1/status")
    assert int(re.findall(r"CapBnd:\s+(\w+)", status)[0], 16) == 1 << 10, "the one that it was given"
    assert re.findall(r"NoNewPrivs:\s+(\d)", status) == ["1"]
    limits = json.loads(boxes("inspect", report.hosted.container))[0]["HostConfig"]
    assert (limits["PidsLimit"], limits["Memory"]) == (300, 256 * MIB)
    os.kill(report.pid, signal.SIGTERM)
    await hosts.reported(start.instance_id, lambda r: r.state == "stopped")


async def test_a_published_port_is_the_loopbacks_and_no_other_container_reaches_the_engine(
    hosts: Hosts, boxes: Boxes, image: str
) -> None:
    start = hosts.host(card(image))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert report.hosted is not None
    assert report.hosted.container is not None
    inspected = json.loads(boxes("inspect", report.hosted.container))[0]["NetworkSettings"]
    assert [p["HostIp"] for p in inspected["Ports"]["9000/tcp"]] == ["127.0.0.1"]
    assert list(inspected["Networks"]) == [container.NETWORK]
    address = inspected["Networks"][container.NETWORK]["IPAddress"]
    if boxes.command == "podman":
        pytest.skip("containers of one network of Podman's reach each other")
    ask = f"import urllib.request as u; u.urlopen('http://{address}:9000/health', timeout=3)"
    assert boxes("exec", report.hosted.container, "python3", "-c", ask) == "", "or the rest proves nothing"
    for network in (container.NETWORK, "bridge"):
        with pytest.raises(CommandFailed, match=r"timed out|refused|unreachable|No route"):
            boxes("run", "--rm", "--network", network, "--entrypoint", "python3", image, "-c", ask)


async def test_container_with_a_socket_has_no_network_and_a_private_socket(
    hosts: Hosts, boxes: Boxes, image: str, tmp_path: Path
) -> None:
    if os.geteuid():
        pytest.skip("only root connects to the socket of a container's user")
    options = {"image": image, "args": ["--socket", "{socket}"]}
    start = hosts.host(hosted_card(tmp_path, "openai", memory=MIB, container=options))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    assert report.hosted is not None
    assert report.hosted.container is not None
    assert (await hosts.request(start.instance_id, "chat", messages=[], stream=True)).text() == "a b c "
    inspected = json.loads(boxes("inspect", report.hosted.container))[0]
    assert inspected["HostConfig"]["NetworkMode"] == "none"
    (path,) = (Path(m["Source"]) / "engine.sock" for m in inspected["Mounts"] if m["Destination"] == "/run/thaw")
    for above in path.parents[2:6]:
        above.chmod(0o755)
    assert get_as_another_user(str(path), "/health") == "PermissionError"
    path.parent.parent.chmod(0o755)
    path.chmod(0o777)
    assert get_as_another_user(str(path), "/health").startswith("HTTP/1.1 200"), "or the above proves nothing"
    os.kill(report.pid, signal.SIGTERM)
    await hosts.reported(start.instance_id, lambda r: r.state == "stopped")
    hosts.processes[-1].wait(60)
    assert not path.parent.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--exit", "7"), "exit status 7"), (("--signal", "9"), "signal 9"), (("--eat",), "out-of-memory killer")],
)
@pytest.mark.usefixtures("kernel_kills")
async def test_exit_of_a_container_is_explained(
    hosts: Hosts, boxes: Boxes, image: str, arguments: tuple[str, ...], words: str
) -> None:
    start = hosts.host(card(image, *arguments))
    report = await hosts.settled(start.instance_id)
    if words == "out-of-memory killer" and report.state == "ready":
        assert report.hosted is not None
        assert report.hosted.container is not None
        boxes("update", "--memory", "24m", "--memory-swap", "24m", report.hosted.container)
        await hosts.ask(start.instance_id, "chat", messages=[], eat=True)
        report = await hosts.reported(start.instance_id, lambda r: r.state == "failed")
    assert report.state == "failed"
    assert report.error is not None
    assert words in report.error.message
    assert boxes.containers(start.instance_id) == []


async def test_container_that_exits_before_its_inspection_is_explained(
    hosts: Hosts, boxes: Boxes, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that exits before its first inspection is explained too.

    It has neither an address nor a process then.
    """

    class Slow(Docker):
        async def start(self, container: str) -> None:
            await super().start(container)
            await self.wait(container)

    monkeypatch.setattr(container, "Docker", Slow)
    start = hosts.spec(card(image, "--exit", "7"))
    settings = HostSettings(node=hosts.node)
    launch = Launch(start.card, "cpu:0", 0, "0.0.0.0", 9000, "key", settings)
    options = start.card.spec.container
    assert options is not None
    running = await container.start_container(launch, options, options.args or (), {}, start, settings, lambda *_: None)
    assert str(await running.wait()) == "ended with exit status 7"
    assert running.pids() == ()
    await running.stop("SIGTERM", 1.0)
    assert boxes.containers(start.instance_id) == []


async def test_missing_image_is_reported(hosts: Hosts, image: str) -> None:
    start = hosts.host(card("thaw-test-none:1", pull="never"))
    report = await hosts.settled(start.instance_id)
    assert report.error is not None
    assert "thaw-test-none:1 is not on this node" in report.error.message
    start = hosts.host(card("localhost:1/thaw-test-none:1"))
    report = await hosts.settled(start.instance_id)
    assert report.error is not None
    assert "Image localhost:1/thaw-test-none:1 cannot be pulled" in report.error.message


async def test_missing_container_engine_is_reported(hosts: Hosts) -> None:
    start = hosts.host(card("any"), THAW_CONTAINER_SOCKET="/nowhere/docker.sock")
    report = await hosts.settled(start.instance_id)
    assert report.error is not None
    assert "/nowhere/docker.sock does not answer" in report.error.message


async def test_nodeagent_removes_the_container_of_a_killed_host(
    nats_server: NatsServer, boxes: Boxes, image: str, tmp_path: Path
) -> None:
    async with running_node(nats_server.url, tmp_path) as node:
        await start_command(node, "boxed", card(image))
        status = await node.reaches("boxed", InstanceState.READY, InstanceState.FAILED, within=120)
        assert status.error is None
        assert len(boxes.containers("boxed")) == 1
        os.kill(status.pids[0], signal.SIGKILL)
        await node.reaches("boxed", InstanceState.FAILED)
        await node.until(lambda s: s.devices[0].reserved_bytes == 0, within=120)
        assert await asyncio.to_thread(boxes.containers, "boxed") == []
