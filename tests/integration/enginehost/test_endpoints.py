"""A hosted engine is reachable for its host, and for no other user of the machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from services.enginehost.runtimes.endpoint import can_isolate, make_directory
from shared.contracts import subjects
from shared.contracts.inference import CancelInfer
from shared.settings import NodeSettings
from tests.integration.enginehost.driver_cards import ENGINES, SETTINGS, card_of
from tests.support.hosted import FAKE, MIB, Hosts, fake_program, hosted_card
from tests.support.intruder import get_as_another_user, listening_sockets

ATTACKS = ("/v1/models", "/collective_rpc", "/sleep", "/release_memory_occupation", "/stats", "/health")


@pytest.fixture
def needs_networks() -> None:
    if not can_isolate():
        pytest.skip("needs network namespaces: root, or user namespaces")


async def ready(hosts: Hosts, card: Any, **more: Any) -> tuple[str, Path]:
    """Yield the instance and the socket directory of its node's engines."""
    start = hosts.host(card, **more)
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    return start.instance_id, NodeSettings(node=hosts.node).node_state / "run"


async def answers_its_host_only(hosts: Hosts, instance: str, run: Path) -> None:
    assert (await hosts.request(instance, "chat", messages=[], max_tokens=2)).status == 200
    assert listening_sockets(hosts.marked(instance)) == {}, "no port of the machine's"
    (directory,) = run.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (path,) = directory.iterdir()
    path.chmod(0o777)
    for above in (run, *run.parents[:3]):
        above.chmod(0o755)
    for attack in ATTACKS:
        assert get_as_another_user(str(path), attack) == "PermissionError", "its own directory is enough"
    directory.chmod(0o755)
    assert get_as_another_user(str(path), "/v1/completions").startswith("HTTP/1.1 "), "or the above proves nothing"


@pytest.mark.usefixtures("needs_networks")
@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "ollama"])
async def test_no_other_user_reaches_an_engine(hosts: Hosts, tmp_path: Path, engine: str) -> None:
    card = card_of(tmp_path, engine)
    instance, run = await ready(hosts, card, device="cuda:0", **{SETTINGS[engine]: fake_program(tmp_path, engine)})
    await answers_its_host_only(hosts, instance, run)


@pytest.mark.usefixtures("needs_networks")
async def test_nor_ollama_with_a_file(hosts: Hosts, tmp_path: Path) -> None:
    """Only its host reaches Ollama, with a file too.

    It has no API keys. A model name to pull needs the machine's network.
    """
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    instance, run = await ready(hosts, hosted_card(file, "ollama"), THAW_OLLAMA_PROGRAM=fake_program(tmp_path, "ollama"))
    await answers_its_host_only(hosts, instance, run)


async def test_engine_on_a_socket_is_reachable_only_by_its_host(hosts: Hosts) -> None:
    command = [sys.executable, "-m", "tests.support.fake_openai", "--uds", "{socket}"]
    instance, run = await ready(hosts, hosted_card("engine://m", command=command, memory=MIB))
    await answers_its_host_only(hosts, instance, run)


@pytest.mark.usefixtures("needs_networks")
async def test_engine_in_a_private_network_is_reachable_only_by_its_host(hosts: Hosts) -> None:
    instance, run = await ready(hosts, hosted_card("engine://m", command=FAKE, memory=MIB, network="private"))
    await answers_its_host_only(hosts, instance, run)
    streamed = await hosts.request(instance, "completion", prompt="x", max_tokens=200, stream=True)
    assert len(streamed.text().split()) == 200, "the relay loses nothing"


@pytest.mark.usefixtures("needs_networks")
async def test_client_disconnect_ends_a_relayed_request(hosts: Hosts) -> None:
    instance, _ = await ready(hosts, hosted_card("engine://m", command=FAKE, memory=MIB, network="private"))
    stream = await hosts.ask(instance, "completion", prompt="x", stream=True, fake={"tokens": 10_000, "pace": 0.02})
    await stream.until(lambda r: len(r) > 3)
    cancel = CancelInfer(request_id=stream.request_id)
    await hosts.mesh.nc.publish(subjects.engine_control(instance), cancel.model_dump_json().encode())

    async def cancelled() -> int:
        return int((await hosts.request_route(instance, "/stats", "GET")).json["cancelled"])

    assert await hosts.eventually(cancelled, lambda n: n == 1) == 1


async def test_engine_on_a_public_port_has_no_development_mode(hosts: Hosts, tmp_path: Path) -> None:
    """An engine on a port of the machine has no development mode.

    docs/engines.md: with {port} in its command, or `network: host`, all users of the machine reach
    it.
    """
    command = [fake_program(tmp_path, "vllm"), "--port", "{port}"]
    instance, run = await ready(hosts, hosted_card(tmp_path, "vllm", command=command), device="cuda:0")
    env = (await hosts.request_route(instance, "/stats", "GET")).json["env"]
    assert "VLLM_SERVER_DEV_MODE" not in env
    hosted = hosts.reports[instance][-1].hosted
    assert hosted is not None
    assert hosted.sleep_levels == ()
    (port,) = listening_sockets(hosts.marked(instance))
    assert not run.exists()
    assert get_as_another_user(("127.0.0.1", port), "/health") == "HTTP/1.1 200 OK", "or the other tests prove nothing"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_socket_is_removed_after_the_host_exits(hosts: Hosts, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.support.fake_openai", "--uds", "{socket}"]
    instance, run = await ready(hosts, hosted_card("engine://m", command=command, memory=MIB))
    assert list(run.iterdir())
    os.kill(hosts.reports[instance][-1].pid, how)
    hosts.processes[-1].wait(60)

    async def left() -> list[Path]:
        return list(run.iterdir())

    assert await hosts.eventually(left, lambda found: not found) == []
    await hosts.left_nothing(instance)


def test_next_host_removes_directories_of_killed_hosts(tmp_path: Path) -> None:
    left = tmp_path / "run" / "1-1-abcd"  # process 1 did not start then
    left.mkdir(parents=True)
    (left / "engine.sock").touch()
    first = make_directory(tmp_path)
    assert not left.exists()
    second = make_directory(tmp_path)
    assert first.exists(), "this process lives"
    assert first != second


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_own_sockets_of_vllm_are_removed_after_the_host_exits(hosts: Hosts, tmp_path: Path, how: signal.Signals) -> None:
    """A killed vLLM removes none of them."""
    instance, _ = await ready(
        hosts, hosted_card("engine://demo", "vllm", memory=MIB), THAW_VLLM_PYTHON=fake_program(tmp_path, "vllm")
    )
    directory = Path((await hosts.request_route(instance, "/stats", "GET")).json["env"]["VLLM_RPC_BASE_PATH"])
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(directory / str(uuid.uuid4())))
    os.kill(hosts.reports[instance][-1].pid, how)
    hosts.processes[-1].wait(60)

    async def is_there() -> bool:
        return directory.exists()

    assert not await hosts.eventually(is_there, lambda there: not there)
    await hosts.left_nothing(instance)


@pytest.mark.parametrize("length", range(20, 80, 10))
def test_sockets_named_by_uuids_fit_the_directory_of_an_engine(length: int) -> None:
    with tempfile.TemporaryDirectory(prefix="thaw-") as place:
        directory = make_directory(Path(place) / ("x" * (length - len(place) - 1) or "x"))
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(str(directory / str(uuid.uuid4())))
        shutil.rmtree(directory)
