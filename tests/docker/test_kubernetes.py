"""The manifests of deploy/kubernetes fit the schemas, and name what exists in the product.

No test starts a cluster.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.docker.engine import ROOT
from tests.docker.manifests import (
    DEPLOY,
    RELEASES,
    Resource,
    containers,
    named,
    pods,
    rendered,
    settings_of_the_product,
    without_comments,
    written,
)
from tests.support.kubernetes_schemas import ValidationError, validate
from tests.support.kubernetes_tools import kubectl
from tests.support.launcher import until
from tests.support.servers import kept_port, wait_for_port, wheel_script

OVERLAYS = ("bundled", "cpu", "external", "replicated")
NODES = ("gpu-a", "ip-10-0-0-1.ec2.internal")


@pytest.fixture(scope="module")
def compose() -> Resource:
    loaded: Resource = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]
    return loaded


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Resource]]:
    """Return the directory of credentials, and the Secrets of two nodes by name."""
    directory = tmp_path_factory.mktemp("credentials") / "thaw"
    command = [sys.executable, "-m", "thaw.kubernetes", str(directory), *NODES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return directory, {s["metadata"]["name"]: s for s in yaml.safe_load_all(done.stdout)}


@pytest.mark.parametrize("release", RELEASES)
def test_every_resource_fits_the_schema(release: str) -> None:
    resources = written()
    assert {r["kind"] for r in resources} >= {"Deployment", "DaemonSet", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}
    for resource in resources:
        validate(resource, release)


def test_schema_refuses_a_misspelled_field() -> None:
    (deployment,) = [r for r in written() if r["kind"] == "Deployment" and r["metadata"]["name"] == "gateway"]
    broken = json.loads(json.dumps(deployment))
    broken["spec"]["template"]["spec"]["containers"][0]["comand"] = ["sh"]
    with pytest.raises(ValidationError):
        validate(broken, RELEASES[-1])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rendered_overlay_fits_the_schema(overlay: str) -> None:
    for resource in rendered(overlay):
        validate(resource, RELEASES[-1])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_reference_of_an_overlay_resolves(overlay: str, made: tuple[Path, dict[str, Resource]]) -> None:
    """An overlay names its own resources, and the Secrets that thaw.kubernetes prints."""
    resources = rendered(overlay)
    maps, secrets = named(resources, "ConfigMap"), made[1]
    for name, pod in pods(resources).items():
        volumes = {v["name"] for v in pod.get("volumes", ())}
        for volume in pod.get("volumes", ()):
            assert volume.get("configMap", {}).get("name") in {None, *maps}, name
            assert volume.get("secret", {}).get("secretName") in {None, *secrets}, name
        for container in containers(pod):
            for source in container.get("envFrom", ()):
                assert source["configMapRef"]["name"] in maps, name
            mounted = {m["name"] for m in container["volumeMounts"]}
            claims = {"data"} if name in ("nats", "postgres") else set()
            assert mounted <= volumes | claims, name
    labels = {
        r["metadata"]["name"]: r["spec"]["template"]["metadata"]["labels"] for r in resources if "template" in r.get("spec", {})
    }
    for kind in ("Service", "PodDisruptionBudget"):
        for name, resource in named(resources, kind).items():
            selector = resource["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert [pod for pod, has in labels.items() if wanted.items() <= has.items()], f"{kind} {name}"
    for name, service in named(resources, "Service").items():
        (pod,) = [p for p, has in labels.items() if service["spec"]["selector"].items() <= has.items()]
        ports = {port["name"] for c in pods(resources)[pod]["containers"] for port in c.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports, name


def test_kustomization_of_the_documentation_renders(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "kubernetes")
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    (tmp_path / "kubernetes" / "mine").mkdir()
    (tmp_path / "kubernetes" / "mine" / "kustomization.yaml").write_text(textwrap.dedent(example))
    command = [kubectl(), "kustomize", str(tmp_path / "kubernetes" / "mine")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = pods(list(yaml.safe_load_all(done.stdout)))["node"]["containers"]
    (nodeagent,) = [container for container in found if container["name"] == "nodeagent"]
    assert nodeagent["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": "2"}
    assert nodeagent["image"] == "registry.example.com/thaw-node:0.2.0"
    assert "THAW_DEVICES: cuda:0,cuda:1" in done.stdout


def test_commands_images_and_health_checks_are_those_of_compose(compose: Resource) -> None:
    ours = {c["name"]: c for pod in pods(written()).values() for c in pod["containers"]}
    assert set(ours) == {"gateway", "scheduler", "migrator", "loader", "nodeagent", "nats", "postgres"}
    for name, container in ours.items():
        assert compose[name]["image"].partition(":-")[2] == container["image"] + "}", name
        if name not in ("nats", "postgres"):
            assert container["command"] == compose[name]["command"], name
            check = container["readinessProbe"]
            assert check.get("exec", {}).get("command") == (None if name == "gateway" else compose[name]["healthcheck"]["test"][1:])
            assert name == "gateway" or check["timeoutSeconds"] == 30
    assert ours["postgres"]["args"] == compose["postgres"]["command"]
    assert ours["nats"]["args"] == compose["nats"]["command"]


def literals() -> dict[str, str]:
    """Return the settings that kustomizations put into ConfigMaps."""
    found: dict[str, str] = {}
    for file in DEPLOY.rglob("kustomization.yaml"):
        for generator in yaml.safe_load(file.read_text()).get("configMapGenerator", ()):
            found |= dict(literal.split("=", 1) for literal in generator.get("literals", ()))
    return found


def test_every_setting_exists() -> None:
    variables = {e["name"] for pod in pods(written()).values() for c in containers(pod) for e in c.get("env", ())} | set(literals())
    others = {"HF_HOME", "HF_ENDPOINT", "HF_TOKEN", "NVIDIA_DRIVER_CAPABILITIES", "GOMEMLIMIT", "PGDATA"}
    others |= {"NODE_NAME", "POD_NAME", "POD_IP", "POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD_FILE"}
    assert variables - others <= settings_of_the_product()
    assert {v for v in variables if v.startswith("THAW_")} >= {"THAW_DEVICES", "THAW_NATS_REPLICAS", "THAW_REQUIRE_KEY"}


def test_settings_are_accepted_by_the_services() -> None:
    script = """
import importlib, json, sys
for service, variables in json.load(sys.stdin).items():
    import os
    os.environ.update(variables)
    module = importlib.import_module(f"services.{service}.settings")
    getattr(module, f"{service.capitalize()}Settings")()
"""
    common = literals() | {"THAW_SECRETS_DIR": "", "THAW_STAGE_HOST": "10.0.0.1", "THAW_PEER_HOST": "10.0.0.1"}
    wanted = {}
    for pod in pods(written()).values():
        for container in pod["containers"]:
            if container["name"] in ("gateway", "scheduler", "migrator", "loader", "nodeagent"):
                plain = {e["name"]: e["value"] for e in container.get("env", ()) if "$" not in e.get("value", "$")}
                wanted[container["name"]] = common | plain
    assert len(wanted) == 5
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(wanted), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_node_reads_its_name_and_url_from_the_files_of_its_own(made: tuple[Path, dict[str, Resource]], tmp_path: Path) -> None:
    secret = made[1]["thaw-nodes"]["stringData"]
    assert len({url for key, url in secret.items() if key.endswith("url")}) == len(NODES)
    mounts = [m for m in pods(written())["node"]["containers"][0]["volumeMounts"] if m["name"] == "secrets"]
    for mount in mounts:
        key = mount["subPathExpr"].replace("$(NODE_NAME)", NODES[1])
        (tmp_path / Path(mount["mountPath"]).name).write_text(secret[key])
    script = "from shared.settings import NodeSettings as S; s = S(); print(s.node, s.nats_url.get_secret_value())"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THAW_")} | {"THAW_SECRETS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    name, url = done.stdout.split()
    assert name == "ip-10-0-0-1-ec2-internal"
    assert re.fullmatch(r"nats://node-ip-10-0-0-1-ec2-internal:\w+@nats:4222", url)


def test_secrets_fit_the_schema_and_keep_passwords_when_a_node_is_added(made: tuple[Path, dict[str, Resource]]) -> None:
    directory, secrets = made
    for secret in secrets.values():
        validate(secret, RELEASES[-1])
    command = [sys.executable, "-m", "thaw.kubernetes", str(directory), *NODES, "gpu-b"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    later = {s["metadata"]["name"]: s["stringData"] for s in yaml.safe_load_all(done.stdout)}
    assert later["thaw-nodes"].items() > secrets["thaw-nodes"]["stringData"].items()
    for name in ("thaw-gateway", "thaw-scheduler", "thaw-migrator", "thaw-postgres"):
        assert later[name] == secrets[name]["stringData"]


def test_secrets_are_in_the_namespace_that_the_caller_names(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "thaw.kubernetes", "--namespace", "llm", str(tmp_path / "d"), *NODES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert {s["metadata"]["namespace"] for s in yaml.safe_load_all(done.stdout)} == {"llm"}


def test_two_nodes_with_one_name_in_the_mesh_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "thaw.kubernetes", str(tmp_path / "d"), "a.b", "a-b"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "would both be a-b" in done.stderr


def test_credentials_are_not_kept_where_other_users_read_them(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(0o755)  # whatever the umask is
    command = [sys.executable, "-m", "thaw.kubernetes", str(directory), *NODES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, list(directory.iterdir())) == (2, "", [])
    assert "chmod 0700" in done.stderr


def test_every_container_is_hardened_and_limited() -> None:
    for name, pod in pods(written()).items():
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in containers(pod):
            context = container["securityContext"]
            is_chown = container["name"] == "own-state"
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]} | ({"add": ["CHOWN"]} if is_chown else {}), name
            assert context.get("runAsNonRoot", pod["securityContext"]["runAsNonRoot"]) is not is_chown, name
            assert "memory" in container["resources"]["limits"], name


def test_loader_and_nodeagent_share_processes_and_memory() -> None:
    pod = pods(written())["node"]
    assert pod["shareProcessNamespace"] is True
    (weights,) = [v for v in pod["volumes"] if v["name"] == "weights"]
    assert weights["emptyDir"]["medium"] == "Memory"
    loader, nodeagent = pod["containers"]
    for container in (loader, nodeagent):
        assert {"name": "weights", "mountPath": "/dev/shm"} in container["volumeMounts"]
    gibibytes = [
        int(size.removesuffix("Gi")) for size in (loader["resources"]["limits"]["memory"], weights["emptyDir"]["sizeLimit"])
    ]
    assert gibibytes[0] > gibibytes[1]


def test_each_container_reports_its_health_in_a_directory_of_its_own() -> None:
    for name, pod in pods(written()).items():
        mounted = [m["name"] for c in pod["containers"] for m in c.get("volumeMounts", ()) if m["mountPath"] == "/tmp"]
        assert len(set(mounted)) == len(mounted), name


def test_availability_of_stateless_services_survives_one_pod() -> None:
    resources = written()
    deployments = named(resources, "Deployment")
    assert {name: d["spec"]["replicas"] for name, d in deployments.items()} == {"gateway": 2, "scheduler": 2, "migrator": 2}
    assert {"gateway", "scheduler", "nats"} <= set(named(resources, "PodDisruptionBudget"))


def test_pods_reach_only_what_policies_allow() -> None:
    policies = {r["metadata"]["name"]: r["spec"] for r in written() if r["kind"] == "NetworkPolicy"}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    to_postgres = [
        p for p in policies.values() for rule in p.get("egress", ()) for port in rule.get("ports", ()) if port["port"] == 5432
    ]
    assert {json.dumps(p["podSelector"]) for p in to_postgres} == {'{"matchLabels": {"app.kubernetes.io/name": "scheduler"}}'}
    (sources,) = [rule["from"] for rule in policies["postgres"]["ingress"]]
    assert sources == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "scheduler"}}}]


def test_nats_is_configured_as_in_compose() -> None:
    wanted = without_comments((ROOT / "compose" / "nats.conf").read_text())
    assert without_comments((DEPLOY / "nats" / "nats.conf").read_text()) == wanted
    replicated = (DEPLOY / "overlays" / "replicated" / "nats.conf").read_text()
    assert set(without_comments(replicated)) >= set(wanted)
    (stateful,) = [r for r in written() if r["kind"] == "StatefulSet" and r["metadata"]["name"] == "nats"]
    routes = re.findall(r"nats://(nats-\d)\.([\w-]+):6222", replicated)
    assert routes == [(f"nats-{i}", stateful["spec"]["serviceName"]) for i in range(3)]


@pytest.fixture
def servers(made: tuple[Path, dict[str, Resource]], tmp_path: Path) -> Iterator[list[int]]:
    """Start the three servers of the replicated overlay; yields their monitoring ports."""
    text = (DEPLOY / "overlays" / "replicated" / "nats.conf").read_text()
    kept = [kept_port() for _ in range(9)]
    ports = [int(each.getsockname()[1]) for each in kept]
    clients, monitors, routes = ports[:3], ports[3:6], ports[6:]
    (tmp_path / "authorization.conf").write_text(made[1]["thaw-nats"]["stringData"]["authorization.conf"])
    for i, port in enumerate(routes):
        assert f"nats-{i}.nats-servers:6222" in text
        text = text.replace(f"nats-{i}.nats-servers:6222", f"127.0.0.1:{port}")
    processes = []
    try:
        for i in range(3):
            mine = text
            for there, here in (
                ("0.0.0.0:4222", f"127.0.0.1:{clients[i]}"),
                ("127.0.0.1:8222", f"127.0.0.1:{monitors[i]}"),
                ("0.0.0.0:6222", f"127.0.0.1:{routes[i]}"),
                ('"/data"', f'"{tmp_path}/js-{i}"'),
                ("../../run/thaw-secrets/authorization.conf", "authorization.conf"),
            ):
                assert there in mine
                mine = mine.replace(there, here)
            (tmp_path / f"nats-{i}.conf").write_text(mine)
            command = [wheel_script("nats-server"), "-c", str(tmp_path / f"nats-{i}.conf")]
            processes.append(subprocess.Popen(command, env=os.environ | {"POD_NAME": f"nats-{i}"}, stderr=subprocess.DEVNULL))
        for port, process in zip(clients, processes, strict=True):
            wait_for_port(port, process)
        yield monitors
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for each in kept:
            each.close()


def _is_healthy(url: str) -> bool:
    try:
        return bool(httpx.get(url, timeout=60).json() == {"status": "ok"})
    except httpx.TransportError:
        return False


def test_three_servers_form_a_cluster_and_pass_their_probes(servers: list[int]) -> None:
    """The servers elect a leader of JetStream, and every probe succeeds on each of them."""
    (container,) = pods(written())["nats"]["containers"]
    probes = [container[kind]["exec"]["command"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {c[0] for c in probes} == {"wget"}
    for port in servers:
        for probe in probes:
            url = probe[-1].replace("127.0.0.1:8222", f"127.0.0.1:{port}")
            until(functools.partial(_is_healthy, url), within=120)

    def read_cluster() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"http://127.0.0.1:{servers[0]}/jsz", timeout=60).json()["meta_cluster"]
        return found

    assert read_cluster()["cluster_size"] == 3
    until(lambda: read_cluster().get("leader") in {"nats-0", "nats-1", "nats-2"}, what="a server leads")
