"""`thaw up` reports each obstacle with a remedy, and leaves nothing running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from shared.ports import free_port
from tests.support.launcher import Thaw
from tests.support.mesh import held
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model
from thaw.errors import CommandError
from thaw.launcher import preflight, unprivileged
from thaw.launcher.home import Home, write_private
from thaw.launcher.plan import MeshPlan, credentials_of
from thaw.launcher.probes import until_ready
from thaw.launcher.processes import Identity, identify, start_time
from thaw.launcher.servers import locate_postgres, prepare_postgres
from thaw.launcher.status import MeshStatus, running_status


@pytest.fixture
def thaw() -> Iterator[Thaw]:
    thaw = Thaw(THAW_ZYGOTE="false")  # no test starts an engine
    yield thaw
    thaw.close()


def test_port_in_use_is_reported_with_its_process(thaw: Thaw) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = thaw.error("up", "--detach", "--port", str(port))
    assert error["code"] == "port_taken"
    assert f"(pid {os.getpid()})" in error["message"]
    assert "--port" in error["remedy"]
    assert not (thaw.home / "run" / "supervisor.json").exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_address_of_another_machine_is_reported_as_bad_host(thaw: Thaw, host: str) -> None:
    error = thaw.error("up", "--detach", "--host", host, "--port", str(thaw.port))
    assert error["code"] == "bad_host"
    assert host in error["message"]
    assert "0.0.0.0" in error["remedy"]


def test_concurrent_ups_start_one_mesh(thaw: Thaw) -> None:
    both = [thaw.popen("up", "--detach", "--port", str(thaw.port), "--json") for _ in range(2)]
    documents = [json.loads(process.communicate(timeout=150)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0], documents
    assert sorted(d["already_running"] for d in documents) == [False, True]
    assert {d["endpoint"] for d in documents} == {f"{thaw.url}/v1"}
    assert {s["restarts"] for s in json.loads((thaw.home / "run" / "supervisor.json").read_text())["services"].values()} == {0}


def test_a_second_up_waits_until_the_first_has_applied_its_file(thaw: Thaw, tmp_path: Path) -> None:
    thaw.json("up", "--detach", "--port", str(thaw.port))
    files: dict[str, Path] = {}
    commands: list[subprocess.Popen[str]] = []
    for name in ("first", "second"):
        source = make_demo_model(tmp_path / name, "test")
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(f"models: [{{name: {name}, source: {source}}}]\n")
    with held(thaw.pid("supervisor")), held(thaw.pid("gateway")):  # the first command waits for the gateway
        for name, words in (("first", "The mesh is running already"), ("second", "waiting for another `thaw up`")):
            commands.append(thaw.popen("up", "--detach", "--config", str(files[name])))
            assert commands[-1].stdout is not None
            assert words in commands[-1].stdout.readline(), name
    ends = [command.communicate(timeout=150) for command in commands]
    assert [command.returncode for command in commands] == [0, 0], ends
    assert "- first removed" in ends[1][0]
    assert [card["spec"]["name"] for card in thaw.json("models", "list")["models"]] == ["second"]


def test_a_supervisor_status_of_another_version_is_refused(thaw: Thaw) -> None:
    home = Home(thaw.home)
    home.create()
    home.supervisor_file.write_text('{"supervisor": "of a form of its own"}')
    error = thaw.error("up", "--detach", "--port", str(thaw.port))
    home.supervisor_file.unlink()
    assert error["code"] == "state_directory"
    assert "another version" in error["message"]


def test_invalid_state_directory_is_reported(thaw: Thaw) -> None:
    (thaw.home / "file").write_text("")
    thaw.environment["THAW_HOME"] = str(thaw.home / "file" / "below")
    try:
        error = thaw.error("up", "--detach")
    finally:
        thaw.environment["THAW_HOME"] = str(thaw.home)
    assert error["code"] == "state_directory"
    assert "is a file" in error["message"]
    assert "THAW_HOME" in error["remedy"]


def test_state_directory_too_long_for_sockets_is_reported(thaw: Thaw) -> None:
    thaw.environment["THAW_HOME"] = str(thaw.home / ("x" * 90))
    try:
        error = thaw.error("up", "--detach")
    finally:
        thaw.environment["THAW_HOME"] = str(thaw.home)
    assert error["code"] == "state_directory"
    assert "bytes too long" in error["message"]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("available_memory", "too_little_memory"),
        ("free_shared_memory", "too_little_shared_memory"),
        ("free_disk", "too_little_disk"),
    ],
)
def test_insufficient_memory_or_disk_is_reported(thaw: Thaw, monkeypatch: pytest.MonkeyPatch, what: str, code: str) -> None:
    monkeypatch.setattr(preflight, what, lambda *_: 1000)
    with pytest.raises(CommandError) as caught:
        preflight.check_room(thaw.home, memory=2000, shared=2000, disk=2000, purpose="The demo")
    assert caught.value.code == code
    assert "1000 B" in caught.value.what
    assert caught.value.remedy


def test_a_stale_pid_file_is_not_mistaken_for_a_mesh(thaw: Thaw) -> None:
    home = Home(thaw.home)
    home.create()
    started = start_time(os.getpid())
    assert started is not None
    # This pid exists, but its start time differs from that of the supervisor that wrote the file.
    write_private(home.supervisor_file, MeshStatus(supervisor=Identity(pid=os.getpid(), started=started - 1)).model_dump_json())
    assert running_status(home) is None
    me = identify(os.getpid())
    assert me is not None
    write_private(home.supervisor_file, MeshStatus(supervisor=me).model_dump_json())
    assert running_status(home) is not None
    home.supervisor_file.unlink()


def test_down_without_a_mesh_is_no_error(thaw: Thaw) -> None:
    assert thaw.json("down") == {"was_running": False, "left_behind": {"processes": [], "segments": []}}


@pytest.mark.parametrize("verb", [("ps",), ("wake", "x"), ("models", "list"), ("chat", "x", "hi"), ("trace",), ("node", "list")])
def test_every_verb_without_a_mesh_names_the_up_command(thaw: Thaw, verb: tuple[str, ...]) -> None:
    error = thaw.error(*verb)
    assert error["code"] == "not_running"
    assert "thaw up" in error["remedy"]


def test_external_servers_are_used_and_the_endpoint_may_speak_https(thaw: Thaw, own_nats: NatsServer, database_url: str) -> None:
    key, certificate = thaw.home / "key.pem", thaw.home / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
        "-days",
        "2",
    ]
    subprocess.run([*command, "-subj", "/CN=models.example"], check=True, capture_output=True)
    thaw.environment |= {"THAW_NATS_URL": own_nats.url, "THAW_DATABASE_URL": database_url}
    thaw.environment |= {"THAW_TLS_CERTIFICATE": str(certificate), "THAW_TLS_KEY": str(key)}
    up = thaw.json("up", "--detach", "--port", str(thaw.port))
    assert up["endpoint"] == f"https://127.0.0.1:{thaw.port}/v1"
    assert [n["node"] for n in thaw.json("node", "list")["nodes"]] == ["node-0"]
    status = json.loads((thaw.home / "run" / "supervisor.json").read_text())
    assert not {"nats", "postgres"} & status["services"].keys()
    assert thaw.endpoints["nats_url"] == own_nats.url
    findings = {f["subject"]: f for f in thaw.json("doctor")["findings"]}
    assert findings["nats"]["level"] == findings["postgres"]["level"] == "ok"


def test_an_external_server_that_cannot_be_used_is_named_at_once(thaw: Thaw, database_url: str) -> None:
    guarded = NatsServer(config='authorization { user: "thaw", password: "right" }')
    held = socket.socket()
    held.bind(("127.0.0.1", 0))  # it refuses connections, and no other process can take the port
    port = held.getsockname()[1]
    try:
        for variable, url, words, remedy in (
            ("THAW_NATS_URL", f"nats://127.0.0.1:{port}", f"NATS: 127.0.0.1:{port} does not answer", "THAW_NATS_URL"),
            ("THAW_NATS_URL", f"nats://thaw:wrong@127.0.0.1:{guarded.port}", "runs but refuses the login", "credentials"),
            ("THAW_DATABASE_URL", f"{database_url}_not", "runs but refuses the login", "THAW_DATABASE_URL"),
            ("THAW_DATABASE_URL", f"postgresql://thaw:wrong@127.0.0.1:{port}/thaw", "does not answer", "THAW_DATABASE_URL"),
            ("THAW_DATABASE_URL", "mysql://thaw:wrong@127.0.0.1/thaw", "cannot be read", "postgresql://user"),
        ):
            thaw.environment[variable] = url
            error = thaw.error("up", "--detach", "--port", str(thaw.port))
            del thaw.environment[variable]
            assert error["code"] == "server_unusable", error
            assert words in error["message"]
            assert "wrong" not in error["message"]
            assert remedy in error["remedy"]
    finally:
        held.close()
        guarded.close()
    assert not (thaw.home / "run" / "supervisor.json").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: an ordinary user runs PostgreSQL as it is")
@pytest.mark.parametrize("namespaces", [True, False])
def test_postgres_runs_for_root(namespaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL runs for root.

    In a user namespace root keeps the data; if namespaces are refused, PostgreSQL runs as `nobody`.
    """
    if namespaces and not unprivileged.namespaces_work():
        pytest.skip("user namespaces are refused here")
    monkeypatch.setattr(unprivileged, "namespaces_work", lambda: namespaces)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="thaw-pg-") as directory:
        Path(directory).chmod(0o755)
        home = Home(Path(directory).resolve())
        home.create()
        try:
            postgres = locate_postgres(home)
        except CommandError as e:
            pytest.skip(e.what)
        plan = MeshPlan(credentials=credentials_of(home), nats_port=1, postgres_port=free_port())
        prepare_postgres(postgres, plan)
        prepare_postgres(postgres, plan)  # the second time it creates nothing, and sets the password again
        process = subprocess.Popen(postgres.server_command(plan), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(asyncio.wait_for(until_ready("postgres", plan.postgres_port), 60))
            assert asyncio.run(_version(plan.effective_database_url)) >= 14
            assert (postgres.data.stat().st_uid == 0) is namespaces
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


async def _version(url: str) -> int:
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        return int(connection.get_server_version().major)
    finally:
        await connection.close()


def test_an_endpoint_beyond_loopback_needs_a_key_and_is_warned_of(thaw: Thaw) -> None:
    document = thaw.json("up", "--detach", "--port", str(thaw.port), "--host", "0.0.0.0")
    assert "every request is refused" in document["warnings"][0]
    assert httpx.get(f"{thaw.url}/v1/models", timeout=60).status_code == 401
    assert httpx.get(f"{thaw.url}/admin/v1/keys", timeout=60).status_code == 401
    findings = {f["subject"]: f for f in thaw.json("doctor")["findings"]}
    assert findings["keys"]["level"] == "warn"
    key = thaw.json("keys", "add", "alice")["key"]
    assert httpx.get(f"{thaw.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=60).status_code == 200
    findings = {f["subject"]: f for f in thaw.json("doctor")["findings"]}
    assert findings["keys"]["level"] == "ok"
