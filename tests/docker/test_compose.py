"""A mesh of compose/: requests, credentials, permissions, telemetry, teardown."""

from __future__ import annotations

import json
import re
import time

import httpx
import openai
import pytest
import yaml

from tests.docker.engine import OURS, POLL_S, ROOT, Images, Project, docker
from tests.support.launcher import until
from tests.support.otlp import OtlpReceiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
WITHIN_S = 300.0
"""A busy machine takes half a minute for a new zygote to import torch."""


@pytest.fixture
def client(project: Project) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{project.url}/v1", api_key="unused", max_retries=0, timeout=WITHIN_S)


def test_the_command_line_in_the_gateway_registers_and_shows(project: Project) -> None:
    assert "added" in project.add_model("demo", "/models/demo")
    cluster = json.loads(project.execute("gateway", "thaw", "ps", "--json"))
    assert "node-0" in json.dumps(cluster)
    assert "demo" in project.execute("gateway", "thaw", "models", "list")


def test_admin_api_requires_the_generated_key(project: Project) -> None:
    assert httpx.get(f"{project.url}/admin/v1/cluster", timeout=WITHIN_S, trust_env=False).status_code == 401
    key = project.execute("gateway", "cat", "/run/thaw-secrets/thaw_admin_key")
    authorization = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{project.url}/admin/v1/cluster", headers=authorization, timeout=WITHIN_S, trust_env=False)
    assert answer.status_code == 200


def test_a_cold_model_is_chatted_with(project: Project, client: openai.OpenAI) -> None:
    with client:
        assert [m.id for m in client.models.list()] == ["demo"]
        answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}], max_tokens=8)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8


def test_a_response_is_streamed_in_several_chunks(project: Project, client: openai.OpenAI) -> None:
    with client:
        stream = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
        )
        pieces = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert sum(1 for p in pieces if p.delta.content) > 1
    assert pieces[-1].finish_reason == "length"


def test_repeated_idempotency_key_generates_once(project: Project, client: openai.OpenAI) -> None:
    with client:
        answers = [
            client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "once"}],
                max_tokens=8,
                temperature=1.0,
                extra_headers={"idempotency-key": "compose-1"},
            )
            for _ in range(2)
        ]
    assert answers[0].id == answers[1].id


def test_a_model_of_the_hub_is_served(project: Project, client: openai.OpenAI) -> None:
    project.add_model("hub", "hf://org/model")
    with client:
        answer = client.completions.create(model="hub", prompt="hello", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_the_trace_of_a_load_reaches_the_collector_from_every_service(project: Project, otlp: OtlpReceiver) -> None:
    for phase in ("schedule", "load", "init"):
        otlp.wait_for(phase, within=120)

    def has_sent(service: str) -> bool:
        return any(service in sender for sender, _ in list(otlp.spans))

    until(lambda: has_sent("gateway") and has_sent("engine"), what="spans of the gateway and of an engine")
    assert "queue" in project.execute("gateway", "thaw", "trace", "--json")


def test_our_services_run_as_a_user_without_rights(project: Project) -> None:
    for service in (*OURS, "node"):
        status = project.execute(service, "cat", "/proc/self/status")
        assert re.search(r"^Uid:\s+10001\s+10001\s+10001", status, re.MULTILINE), service
        assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE), service
        assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE), service
        assert project.inspect(service)["HostConfig"]["ReadonlyRootfs"]


def test_nats_and_postgres_run_with_minimal_rights(project: Project) -> None:
    for service in ("nats", "postgres"):
        host = project.inspect(service)["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert host["PidsLimit"] > 0, service
        assert host["Memory"] > 0, service
    # After its start the database has dropped the capabilities of the start.
    find = "for p in /proc/[0-9]*; do case $(tr '\\0' ' ' <$p/cmdline) in *postgres*-D*) grep CapEff $p/status;; esac; done 2>/dev/null"
    found = project.execute("postgres", "sh", "-c", find, user="root").split("\n")
    assert "CapEff:\t0000000000000000" in found


_CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        print("reached")
    except OSError:
        print("refused")
"""


def _address(project: Project, service: str, network: str, port: int) -> str:
    return f"{project.inspect(service)['NetworkSettings']['Networks'][f'{project.name}_{network}']['IPAddress']}:{port}"


def test_services_reach_only_the_servers_they_need(project: Project) -> None:
    nats, postgres = _address(project, "nats", "core", 4222), _address(project, "postgres", "data", 5432)
    reached = {
        service: project.execute(service, "python", "-", nats, postgres, text=_CONNECT).split()
        for service in ("gateway", "scheduler", "migrator", "loader", "nodeagent", "node")
    }
    assert reached.pop("scheduler") == ["reached", "reached"]
    assert reached.pop("node") == ["refused", "refused"]
    assert set(map(tuple, reached.values())) == {("reached", "refused")}


@pytest.mark.parametrize("network", ["telemetry", "edge", "hub"])
def test_neither_jaeger_nor_the_edge_reaches_nats_or_the_database(project: Project, network: str) -> None:
    """Jaeger and the edge reach neither NATS nor the database.

    The probe runs in a container of our image on their network: Jaeger's image has no suitable
    program.
    """
    targets = (_address(project, "nats", "core", 4222), _address(project, "postgres", "data", 5432), "nats:4222", "postgres:5432")
    output = docker(
        "run", "--rm", "-i", f"--network={project.name}_{network}", project.images.mesh, "python", "-", *targets, text=_CONNECT
    )
    assert output.split() == ["refused"] * 4


def test_nats_and_postgres_networks_are_internal(project: Project) -> None:
    for service, network in (("nats", "core"), ("postgres", "data")):
        assert list(project.inspect(service)["NetworkSettings"]["Networks"]) == [f"{project.name}_{network}"]
        (found,) = json.loads(docker("network", "inspect", f"{project.name}_{network}"))
        assert found["Internal"] is True


def test_mesh_image_has_no_torch_and_images_contain_no_sources(images: Images) -> None:
    ask = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    assert docker("run", "--rm", images.mesh, "python", "-c", ask).strip() == "False"
    assert docker("run", "--rm", images.node, "python", "-c", ask).strip() == "True"
    assert docker("run", "--rm", images.mesh, "ls", "/").split().count("src") == 0


@pytest.mark.parametrize("image", ["mesh", "node"])
def test_lock_contains_every_requirement(images: Images, image: str) -> None:
    """The lock contains every requirement, since pip installs it with --no-deps."""
    assert "No broken requirements" in docker("run", "--rm", getattr(images, image), "pip", "check")
    with_extras = "import transformers, sentencepiece, safetensors, obstore, pynvml, huggingface_hub, tokenizers"
    imports = "import services.gateway.app, services.scheduler.app, services.migrator.app, thaw.cli.app"
    docker("run", "--rm", "-e", "HOME=/tmp", getattr(images, image), "python", "-c", imports if image == "mesh" else with_extras)


# Asks the kernel to page out memory of another process, as suspending an engine does.
_PAGE_OUT = """
import ctypes, os, subprocess
child = subprocess.Popen(["sleep", "60"])
first = open(f"/proc/{child.pid}/maps").readline().split()[0]
start, end = (int(x, 16) for x in first.split("-"))
class Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
taken = libc.syscall(440, os.pidfd_open(child.pid), ctypes.byref(Range(start, end - start)), ctypes.c_size_t(1), 21, 0)
child.kill()
print(os.getuid(), taken > 0 or os.strerror(ctypes.get_errno()), open("/proc/self/status").read().split("CapEff:")[1].split()[0])
"""


def test_only_suspend_compose_file_grants_capabilities(images: Images) -> None:
    (service,) = yaml.safe_load((ROOT / "compose" / "suspend.yaml").read_text())["services"].values()
    options = ["--cap-drop=ALL", "--security-opt=no-new-privileges:true", "-i"]
    plain = docker("run", "--rm", *options, images.node, "python", "-", text=_PAGE_OUT)
    assert plain.split("\n")[0] == "10001 Operation not permitted 0000000000000000"
    given = ["--user", service["user"], *(f"--cap-add={c}" for c in service["cap_add"])]
    command = service["command"]
    as_thaw = command[command.index("setpriv") : command.index("python")]
    suspending = docker("run", "--rm", *options, *given, images.node, *as_thaw, "python", "-", text=_PAGE_OUT)
    assert suspending.split("\n")[0] == f"10001 True {1 << 23 | 1 << 19:016x}"


def test_both_files_and_the_gpu_profile_are_understood(project: Project) -> None:
    shown = yaml.safe_load(project.compose("--profile", "gpu", "-f", str(ROOT / "compose" / "suspend.yaml"), "config"))["services"]
    suspending, gpu = shown["nodeagent"], shown["nodeagent-gpu"]
    assert {"SYS_NICE", "SYS_PTRACE"} < set(suspending["cap_add"])
    assert suspending["cap_drop"] == ["ALL"]
    assert suspending["user"] == "root"
    assert "setpriv" in suspending["command"]
    mounted = [v["target"] if isinstance(v, dict) else v.split(":")[1] for v in suspending["volumes"]]
    assert set(mounted) == {"/run/thaw-secrets", "/var/lib/thaw", "/models", "/sys/fs/cgroup/thaw"}
    (devices,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["capabilities"]) == ("nvidia", ["gpu"])
    assert gpu["environment"]["THAW_DEVICES"] == "cuda:0"
    assert gpu["pid"] == gpu["ipc"] == "service:node-gpu"
    assert "cap_add" not in gpu


def test_service_has_access_only_to_its_own_secrets(project: Project) -> None:
    seen = {service: set(project.execute(service, "ls", "/run/thaw-secrets").split()) for service in OURS}
    assert seen == {
        "gateway": {"thaw_nats_url", "thaw_admin_key"},
        "scheduler": {"thaw_nats_url", "thaw_database_url"},
        "migrator": {"thaw_nats_url"},
        "loader": {"thaw_nats_url"},
        "nodeagent": {"thaw_nats_url"},
    }
    for service in (*OURS, "nats", "postgres"):
        environment = " ".join(project.inspect(service)["Config"]["Env"])
        assert not re.search(r"[0-9a-f]{48}|thaw-admin-", environment), service


def test_credentials_outlive_a_second_start(project: Project) -> None:
    before = project.execute("gateway", "cat", "/run/thaw-secrets/thaw_nats_url", "/run/thaw-secrets/thaw_admin_key")
    project.compose("run", "--rm", "--no-deps", "secrets")
    assert before == project.execute("gateway", "cat", "/run/thaw-secrets/thaw_nats_url", "/run/thaw-secrets/thaw_admin_key")


def test_the_node_shares_memory_and_process_ids(project: Project) -> None:
    spaces = {
        service: project.execute(service, "sh", "-c", "readlink /proc/self/ns/pid /proc/self/ns/ipc; stat -c %d /dev/shm")
        for service in ("node", "loader", "nodeagent")
    }
    assert len(set(spaces.values())) == 1
    size = project.execute("nodeagent", "df", "--output=size", "-B1", "/dev/shm").split()[-1]
    assert int(size) == 512 << 20
    assert "services.loader" in project.execute("nodeagent", "sh", "-c", "cat /proc/*/cmdline | tr '\\0' ' '")


@pytest.mark.parametrize("service", ["nodeagent", "loader", "scheduler", "gateway"])
def test_a_killed_container_is_restarted_and_the_mesh_serves(project: Project, client: openai.OpenAI, service: str) -> None:
    first = project.inspect(service)["State"]["StartedAt"]
    # SIGKILL from outside, as in a crash: Docker treats `docker kill` as a stop by the operator.
    pid = project.inspect(service)["State"]["Pid"]
    kill = ("--pid=host", "--user=root", "--cap-add=KILL", project.images.mesh, "sh", "-c", f"kill -9 {pid}")
    docker("run", "--rm", *kill)
    deadline = time.monotonic() + WITHIN_S
    while (state := project.inspect(service)["State"])["StartedAt"] == first or state["Status"] != "running":
        assert time.monotonic() < deadline, state
        time.sleep(POLL_S)
    project.wait_healthy(service)
    with client:
        answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "again"}], max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


_WATCHED = """
import pathlib, sys
def words(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\\0")[:-1]
    except OSError:
        return []
def parent(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
service = ["python", "-m", f"services.{sys.argv[1]}"]
for path in pathlib.Path("/proc").glob("[0-9]*"):
    if words(path.name) == service and "shared.watchdog" in words(parent(path.name)):
        print(path.name)
"""


@pytest.mark.parametrize("service", ["gateway", "scheduler", "migrator", "loader", "nodeagent"])
def test_hung_service_is_restarted_in_its_container(project: Project, client: openai.OpenAI, service: str) -> None:
    """The watchdog restarts a hung service in its container.

    SIGSTOP stops the service; its container keeps running, so Docker does not restart it.
    """
    started = project.inspect(service)["State"]["StartedAt"]
    (hung,) = project.execute(service, "python", "-", service, text=_WATCHED).split()
    project.execute(service, "sh", "-c", f"kill -STOP {hung}")
    deadline = time.monotonic() + WITHIN_S
    while project.execute(service, "python", "-", service, text=_WATCHED).split() in ([], [hung]):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert project.inspect(service)["State"]["StartedAt"] == started
    restarts = [
        line
        for line in docker("logs", project.container(service), also_stderr=True).splitlines()
        if "restarting a hung service" in line
    ]
    assert f'"pid": {hung}' in restarts[-1]
    assert "the process is stopped" in restarts[-1]
    with client:
        # On a busy machine a gateway takes longer to start than a few retries.
        answer = client.with_options(max_retries=20).completions.create(model="demo", prompt="again", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_killed_services_leave_no_zombies(project: Project) -> None:
    def are_reaped() -> bool:
        """Each process is a zombie for a moment, as those of health checks."""
        states = project.execute("node", "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -c1")
        return "Z" not in states.split()

    until(are_reaped, what="no process stays a zombie")


def list_models(project: Project, **headers: str) -> httpx.Response:
    return httpx.get(f"{project.url}/v1/models", headers=headers, timeout=WITHIN_S, trust_env=False)


def test_keys_are_created_and_revoked_in_a_running_mesh(project: Project) -> None:
    key = json.loads(project.execute("gateway", "thaw", "keys", "add", "alice", "--json"))["key"]
    try:
        assert list_models(project).status_code == 401
        assert list_models(project, authorization=f"Bearer {key}").status_code == 200
    finally:
        project.execute("gateway", "thaw", "keys", "revoke", "alice")


def test_endpoint_stays_closed_if_the_disk_of_nats_is_lost(project: Project) -> None:
    """The endpoint stays closed if the disk of NATS is lost.

    The gateway's volume records that keys have existed (docs/operations.md).
    """
    project.execute("gateway", "thaw", "keys", "add", "bob")
    project.compose("stop", "gateway", "nats")
    wipe = (
        "-v",
        f"{project.name}_nats:/data",
        "--user=root",
        project.images.mesh,
        "sh",
        "-c",
        "rm -rf /data/jetstream && ls /data",
    )
    assert docker("run", "--rm", *wipe) == ""
    project.compose("start", "nats")
    project.wait_healthy("nats")
    project.compose("start", "gateway")
    project.wait_healthy("gateway")
    assert "bob" not in project.execute("gateway", "thaw", "keys", "list")
    assert list_models(project).status_code == 401
    assert "inference" in project.execute("gateway", "cat", "/var/lib/thaw/gateway/keys-existed")


def test_nats_refused_no_service_a_subject(project: Project) -> None:
    assert "Permissions Violation" not in project.compose("logs", "--no-color")


def test_down_removes_all_containers_volumes_and_networks(project: Project) -> None:
    assert project.left()
    project.down()
    assert project.left() == []
