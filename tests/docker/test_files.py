"""Properties of compose/ that need no container engine.

The tests read the files, and run a NATS server with the same nats.conf.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError

from services.loader.adapters.runs import LOADS_AT_ONCE
from shared.contracts import subjects
from shared.messaging.mesh import flush
from shared.messaging.streams import catalog_bucket, ensure_keyed_stream, ensure_trace_stream, idempotency_bucket, keys_bucket
from tests.docker.guarded import COMPOSE, Guarded
from thaw.secrets import make_secrets


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return loaded


OURS = {"scheduler", "migrator", "gateway", "loader", "nodeagent", "loader-gpu", "nodeagent-gpu"}


def test_every_service_has_a_health_check_limits_and_a_pinned_image(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert "healthcheck" in service or service["restart"] == "no", name
        assert "mem_limit" in service, name
        assert re.search(r":-[a-z/-]+:v?\d+\.\d+(\.\d+)?(-[\w.]+)?}$", service["image"]), name
        assert not service.get("privileged"), name


def test_our_health_checks_start_no_interpreter(document: dict[str, Any]) -> None:
    checks = {name: service["healthcheck"] for name, service in document["services"].items() if name in OURS}
    assert checks.keys() == OURS
    assert all(check["test"] == ["CMD", "thaw-healthy"] for check in checks.values())
    assert {check["timeout"] for check in checks.values()} == {"30s"}, "a busy machine takes seconds to start a shell, too"


RIGHTS = {"postgres": {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}}
"""Capabilities of services at their start; all others have none."""
NETWORKS = {
    "secrets": set(),
    "nats": {"core"},
    "postgres": {"data"},
    "jaeger": {"telemetry"},
    "prometheus": {"telemetry"},
    "grafana": {"telemetry"},
    "scheduler": {"core", "data", "telemetry"},
    "migrator": {"core", "telemetry"},
    "gateway": {"edge", "core", "telemetry"},
    "node": set(),
    "loader": {"core", "telemetry", "hub"},
    "nodeagent": {"core", "telemetry", "hub"},
    "node-gpu": set(),
    "loader-gpu": {"core", "telemetry", "hub"},
    "nodeagent-gpu": {"core", "telemetry", "hub"},
}


def test_every_service_is_hardened_and_limited(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert set(service.get("cap_add", ())) == RIGHTS.get(name, set()), name
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert 0 < service["pids_limit"] <= 4000, name
        assert service["mem_limit"], name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
    for name in ("loader", "loader-gpu"):
        assert document["services"][name]["pids_limit"] >= 2 * LOADS_AT_ONCE + 100, "two threads for each load"


def test_ports_are_published_on_loopback_each_by_its_own_variable(document: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in document["services"].items() if "ports" in service}
    assert published == {
        "gateway": ["${THAW_BIND:-127.0.0.1}:${THAW_PORT:-8080}:8080"],
        "jaeger": ["${JAEGER_BIND:-127.0.0.1}:${JAEGER_PORT:-16686}:16686"],
        "prometheus": ["${PROMETHEUS_BIND:-127.0.0.1}:${PROMETHEUS_PORT:-9090}:9090"],
        "grafana": ["${GRAFANA_BIND:-127.0.0.1}:${GRAFANA_PORT:-3000}:3000"],
    }


def test_networks_separate_the_edge_from_the_core(document: dict[str, Any]) -> None:
    services = document["services"]
    assert {name: set(service.get("networks", ())) for name, service in services.items()} == NETWORKS
    assert {name for name, service in services.items() if service.get("network_mode") == "none"} == {
        name for name, networks in NETWORKS.items() if not networks
    }
    assert {name for name, options in document["networks"].items() if (options or {}).get("internal")} == {"core", "data"}


def test_gpu_node_and_dashboards_are_started_only_by_profile(document: dict[str, Any]) -> None:
    profiled = {name: service["profiles"] for name, service in document["services"].items() if "profiles" in service}
    gpu_node = {name: ["gpu"] for name in ("node-gpu", "loader-gpu", "nodeagent-gpu")}
    assert profiled == gpu_node | {name: ["observability"] for name in ("prometheus", "grafana")}
    devices = document["services"]["nodeagent-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    for ours in ("loader", "nodeagent"):
        gpu, cpu = document["services"][f"{ours}-gpu"], document["services"][ours]
        assert gpu["command"] == cpu["command"]
        assert gpu["pid"] == gpu["ipc"] == "service:node-gpu"


def test_grafana_accepts_no_administrator(document: dict[str, Any]) -> None:
    """Grafana creates the user admin with the password admin. Viewers need no login."""
    environment = document["services"]["grafana"]["environment"]
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_every_variable_is_in_the_example_with_its_default(document: dict[str, Any]) -> None:
    text = "\n".join(line for f in ("compose.yaml", "suspend.yaml") for line in (COMPOSE / f).read_text().splitlines())
    used = dict(re.findall(r"\$\{(\w+):?-([^}]*)}", text))
    shown = dict(re.findall(r"^#(\w+)=(.*)$", (COMPOSE / ".env.example").read_text(), re.MULTILINE))
    assert {name: value for name, value in shown.items() if name != "TORCH_INDEX"} == {
        name: value for name, value in used.items() if name != "TORCH_INDEX"
    }


def test_every_service_of_ours_runs_under_the_watchdog(document: dict[str, Any]) -> None:
    """Every Thaw service runs under the watchdog: Docker restarts no hung container."""
    for name in OURS:
        service = name.removesuffix("-gpu")
        assert document["services"][name]["command"] == [
            "python",
            "-m",
            "shared.watchdog",
            "--",
            "python",
            "-m",
            f"services.{service}",
        ]
    (suspending,) = yaml.safe_load((COMPOSE / "suspend.yaml").read_text())["services"].values()
    assert suspending["command"][-7:] == document["services"]["nodeagent"]["command"]


def test_gateway_has_its_own_state_volume(document: dict[str, Any]) -> None:
    """The gateway has a state volume, separate from that of NATS.

    It records that keys have existed, in case the volume of NATS is lost with the keys.
    """
    mounted = {name: [v.split(":") for v in s.get("volumes", ())] for name, s in document["services"].items()}
    (volume,) = [v[0] for v in mounted["gateway"] if v[1:] == ["/var/lib/thaw"]]
    assert volume in document["volumes"]
    assert [name for name, volumes in mounted.items() if volume in [v[0] for v in volumes]] == ["gateway"]


HERE = {"node": "node-0", "node-gpu": "gpu-0"}
"""Nodes of compose.yaml, by folder."""


def test_secrets_are_created_once_and_kept_by_later_runs(tmp_path: Path) -> None:
    make_secrets(tmp_path, HERE)
    first = {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    shutil.rmtree(tmp_path / "node")
    (tmp_path / "scheduler" / "thaw_nats_url").write_text("of another mesh")
    make_secrets(tmp_path, HERE)
    assert first == {p.relative_to(tmp_path): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert {p.parts[0] for p in first} == {"nats", "postgres", "gateway", "scheduler", "migrator", "node", "node-gpu"}


def test_compose_creates_the_secrets_that_its_services_mount(document: dict[str, Any], tmp_path: Path) -> None:
    services = document["services"]
    command = [re.sub(r"\$\{\w+:-(.*?)}", r"\1", word) for word in services["secrets"]["command"][3:]]
    assert command[0] == "/run/make-secrets"
    subprocess.run([sys.executable, "-m", "thaw.secrets", str(tmp_path), *command[1:]], check=True, timeout=120)
    made = dict(mount.split(":")[:2] for mount in services["secrets"]["volumes"])
    assert set(made.values()) == {f"/run/make-secrets/{p.name}" for p in tmp_path.iterdir()}
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    assert all(path.removeprefix("/run/") in dockerfile for path in made.values())  # otherwise root owns the volume
    for name, user in {
        "gateway": "gateway",
        "loader": "node-node-0",
        "nodeagent-gpu": "node-gpu-0",
        "loader-gpu": "node-gpu-0",
    }.items():
        (volume,) = [m.split(":")[0] for m in services[name]["volumes"] if m.endswith(":/run/thaw-secrets:ro")]
        assert f"nats://{user}:" in (tmp_path / made[volume].removeprefix("/run/make-secrets/") / "thaw_nats_url").read_text()


def test_every_node_has_its_own_user_and_password(tmp_path: Path) -> None:
    make_secrets(tmp_path, HERE, remote_nodes=["far-1"])
    folders = ("node", "node-gpu", "nats/nodes/far-1")
    urls = [urlsplit((tmp_path / folder / "thaw_nats_url").read_text()) for folder in folders]
    assert [u.username for u in urls] == ["node-node-0", "node-gpu-0", "node-far-1"]
    assert len({u.password for u in urls}) == 3
    make_secrets(tmp_path, HERE)
    assert "far-1" not in (tmp_path / "nats" / "authorization.conf").read_text()


@pytest.mark.parametrize("name", ["", "Node", "a.b", "*", "a b", '"', "-a"])
def test_node_name_with_subject_separators_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a node's name"):
        make_secrets(tmp_path, {"node": name})


def test_a_user_added_by_a_newer_version_gets_a_password(tmp_path: Path) -> None:
    make_secrets(tmp_path, HERE)
    passwords = tmp_path / "nats" / "passwords.conf"
    old = "".join(line for line in passwords.read_text().splitlines(keepends=True) if not line.startswith("MIGRATOR"))
    passwords.write_text(old)
    make_secrets(tmp_path, HERE)
    assert passwords.read_text().startswith(old)
    assert "MIGRATOR_PASSWORD" in passwords.read_text()


ENGINE_0 = subjects.instance_id(1, "node-0")
DENIED = [
    ("node-node-1", subjects.ADMIN, "commands the mesh"),
    ("node-node-1", subjects.DEMAND, "asks for models"),
    ("node-node-1", subjects.node_command("node-0"), "commands another node"),
    ("node-node-1", subjects.loader_command("node-0"), "commands another loader"),
    ("node-node-1", subjects.node_status("node-0"), "speaks for another node"),
    ("node-node-1", subjects.loader_status("node-0"), "speaks for another loader"),
    ("node-node-1", subjects.engine_report("node-0"), "speaks for another node's engine"),
    ("node-node-1", subjects.engine_control(ENGINE_0), "commands another node's engine"),
    ("node-node-1", subjects.infer(ENGINE_0), "infers on another node"),
    ("node-node-1", subjects.infer(subjects.instance_id(1, "node-1")), "infers"),
    ("node-node-1", f"$KV.{subjects.CATALOG_BUCKET}.x", "changes the catalogue"),
    ("node-node-1", f"$KV.{subjects.KEYS_BUCKET}.x", "makes API keys"),
    ("node-node-1", f"$JS.API.STREAM.MSG.GET.KV_{subjects.KEYS_BUCKET}", "reads API keys"),
    ("node-node-1", f"$JS.API.DIRECT.GET.KV_{subjects.KEYS_BUCKET}.$KV.{subjects.KEYS_BUCKET}.x", "reads an API key"),
    ("node-node-1", f"$JS.API.CONSUMER.CREATE.KV_{subjects.KEYS_BUCKET}", "watches API keys"),
    ("node-node-1", f"$JS.API.CONSUMER.CREATE.{subjects.KEYED_STREAM}", "watches others' answers"),
    ("node-node-1", f"$KV.{subjects.MIGRATIONS_BUCKET}.x", "orders migrations"),
    ("node-node-1", subjects.gateway_control("g"), "moves requests"),
    ("node-node-1", subjects.FIND_REQUEST, "looks for requests"),
    ("gateway", subjects.node_command("node-0"), "commands a node"),
    ("gateway", subjects.loader_command("node-0"), "commands a loader"),
    ("gateway", f"$KV.{subjects.CATALOG_BUCKET}.x", "changes the catalogue"),
    ("gateway", f"$JS.API.STREAM.DELETE.KV_{subjects.CATALOG_BUCKET}", "deletes the catalogue"),
    ("gateway", subjects.node_status("node-0"), "speaks for a node"),
    ("gateway", f"$KV.{subjects.MIGRATIONS_BUCKET}.x", "orders migrations"),
    ("scheduler", subjects.infer(ENGINE_0), "infers"),
    ("scheduler", subjects.reply("g", "r"), "answers clients"),
    ("migrator", subjects.infer(ENGINE_0), "infers"),
    ("migrator", subjects.node_command("node-0"), "commands a node"),
    ("migrator", subjects.reply("g", "r"), "answers clients"),
    ("migrator", f"$KV.{subjects.CATALOG_BUCKET}.x", "changes the catalogue"),
]


@pytest.mark.parametrize(("user", "subject", "what"), DENIED, ids=[f"{u} {w}" for u, _, w in DENIED])
async def test_unauthorized_publish_is_refused(guarded: Guarded, user: str, subject: str, what: str) -> None:
    async with guarded.client(user) as (client, refused):
        await client.publish(subject, b"{}")
        assert "permissions violation for publish" in await asyncio.wait_for(refused.get(), 60)


LISTENING_IN = [
    ("node-node-1", "thaw.v1.replies.>"),
    ("node-node-1", "_INBOX_gateway.>"),
    ("node-node-1", "_INBOX_node-node-0.>"),
    ("node-node-1", subjects.node_command("node-0")),
    ("node-node-1", "thaw.v1.node.*.command"),
    ("node-node-1", subjects.loader_command("node-0")),
    ("node-node-1", subjects.loader_files("node-0")),
    ("node-node-1", subjects.ALL_LOADER_STATUS),
    ("node-node-1", subjects.infer(ENGINE_0)),
    ("node-node-1", subjects.engine_control(ENGINE_0)),
    ("node-node-1", "thaw.v1.engine.*.*.infer"),
    ("node-node-1", "thaw.v1.engine.>"),
    ("node-node-1", f"$KV.{subjects.KEYS_BUCKET}.>"),
    ("gateway", "_INBOX_scheduler.>"),
    ("scheduler", ">"),
]


@pytest.mark.parametrize(("user", "subject"), LISTENING_IN, ids=[f"{u} {s}" for u, s in LISTENING_IN])
async def test_listening_in_is_refused(guarded: Guarded, user: str, subject: str) -> None:
    async with guarded.client(user) as (client, refused):
        await client.subscribe(subject)
        assert "permissions violation for subscription" in await asyncio.wait_for(refused.get(), 60)


async def test_connections_without_a_password_are_refused(guarded: Guarded) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
    writer.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
    assert b"Authorization Violation" in await asyncio.wait_for(reader.read(), 60)
    writer.close()


async def test_node_may_send_one_delayed_reply(guarded: Guarded) -> None:
    async with guarded.client("node-node-0") as (node, refused), guarded.client("scheduler") as (scheduler, _):

        async def answer(message: Any) -> None:
            await message.respond(b"1")
            await message.respond(b"2")

        await node.subscribe(subjects.node_command("node-0"), cb=answer)
        await flush(node)
        assert (await scheduler.request(subjects.node_command("node-0"), b"", timeout=60)).data == b"1"
        assert "permissions violation for publish" in await asyncio.wait_for(refused.get(), 60)


async def test_gateway_and_scheduler_share_catalogue_keys_and_traces(guarded: Guarded) -> None:
    async with guarded.client("scheduler") as (scheduler, s_refused), guarded.client("gateway") as (gateway, g_refused):
        of_gateway, of_scheduler = gateway.jetstream(timeout=60), scheduler.jetstream(timeout=60)
        for js in (of_gateway, of_scheduler):
            await ensure_trace_stream(js)
        theirs, ours = await catalog_bucket(of_gateway), await catalog_bucket(of_scheduler)
        watcher: Any = await theirs.watchall()
        await ours.put("a", b"card")
        while (entry := await watcher.updates(timeout=60)) is None:
            continue
        assert entry.value == b"card"
        assert await ours.keys() == ["a"]
        await ours.delete("a")
        await watcher.stop()
        keys = await idempotency_bucket(of_gateway, 60)
        assert await keys.update("k", b"2", last=await keys.create("k", b"1"))
        assert (await keys.get("k")).value == b"2"
        assert await (await keys_bucket(of_gateway)).put("k", b"1")
        for _ in range(2):
            await ensure_keyed_stream(of_gateway, 60, 1 << 20)
        await of_scheduler.publish(subjects.load_trace("p"), b"{}")
        await of_gateway.publish(subjects.request_trace("r"), b"{}")
        assert (await of_gateway.get_last_msg(subjects.TRACE_STREAM, subjects.load_trace("p"))).data == b"{}"
        assert s_refused.empty()
        assert g_refused.empty()


async def test_node_cannot_access_streams(guarded: Guarded) -> None:
    async with guarded.client("node-node-0") as (node, _):
        with pytest.raises((NatsTimeoutError, NoRespondersError, APIError, asyncio.TimeoutError)):
            await node.jetstream(timeout=0.5).stream_info(f"KV_{subjects.CATALOG_BUCKET}")
