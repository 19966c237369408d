"""The chart of deploy/helm renders the same objects as the manifests of deploy/kubernetes.

A real helm renders it; no test starts a cluster.
"""

from __future__ import annotations

import copy
import functools
import re
import subprocess
import tomllib
from functools import cache
from typing import Any

import pytest
import yaml

from tests.docker import manifests
from tests.docker.engine import ROOT
from tests.support.kubernetes_schemas import validate
from tests.support.kubernetes_tools import helm

CHART = ROOT / "deploy" / "helm" / "thaw"
EXAMPLES = sorted(file.stem for file in (CHART / "examples").glob("*.yaml"))
OVERLAYS = {"bundled": (), "cpu": ("cpu",), "external": ("external",), "replicated": ("replicated",)}
"""The examples that make the chart equal to an overlay."""
Resource = dict[str, Any]
_OF_HELM = ("app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "helm.sh/chart", "thaw-pool")
"""Labels that only the chart sets."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=60, check=False)


def values(*examples: str) -> list[str]:
    return [argument for example in examples for argument in ("-f", str(CHART / "examples" / f"{example}.yaml"))]


@cache
def rendered(*examples: str, sets: tuple[str, ...] = (), release: str = "1.37") -> list[Resource]:
    chosen = [argument for given in sets for argument in ("--set", given)]
    done = run("template", "mine", str(CHART), "-n", "thaw", "--kube-version", release, *values(*examples), *chosen)
    assert (done.returncode, done.stderr) == (0, "")
    return [resource for resource in yaml.safe_load_all(done.stdout) if resource]


def by_name(resources: list[Resource]) -> dict[tuple[str, str], Resource]:
    """Return the objects without what differs between the chart and kustomize by intention.

    Kustomize names ConfigMaps by their content and makes the namespace. The chart has checksums
    instead, labels of its own, and pools of nodes. Comments in configurations do not count, and
    neither does the order of volumes, which patches change.
    """
    names = {
        r["metadata"]["name"]: re.sub(r"-[a-z0-9]{10}$", "", r["metadata"]["name"]) for r in resources if r["kind"] == "ConfigMap"
    }

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {k: plain(v) for k, v in value.items() if k not in (*_OF_HELM, "checksum/settings")}
            return {k: v for k, v in kept.items() if k != "annotations" or v}
        if isinstance(value, list):
            return [plain(v) for v in value]
        return names.get(value, value) if isinstance(value, str) else value

    found = {}
    for resource in copy.deepcopy(resources):
        if "nats.conf" in resource.get("data", {}):
            resource["data"] = {"nats.conf": manifests.without_comments(resource["data"]["nats.conf"])}
        one = plain(resource)
        for pod in manifests.pods([one]).values():
            pod["volumes"].sort(key=lambda volume: volume["name"])
        if one["kind"] != "Namespace":
            found[one["kind"], one["metadata"]["name"]] = one
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_chart_renders_the_objects_of_an_overlay(overlay: str) -> None:
    ours, theirs = by_name(rendered(*OVERLAYS[overlay])), by_name(manifests.rendered(overlay))
    assert ours.keys() == theirs.keys()
    for name, resource in theirs.items():
        assert ours[name] == resource, name


@pytest.mark.parametrize("release", manifests.RELEASES)
@pytest.mark.parametrize("example", ["", *EXAMPLES])
def test_rendered_chart_fits_the_schema(example: str, release: str) -> None:
    resources = rendered(*filter(None, [example]), release=release)
    assert len(by_name(resources)) == len(resources)
    for resource in resources:
        validate(resource, release)


@pytest.mark.parametrize("example", ["", *EXAMPLES])
def test_chart_passes_its_linter(example: str) -> None:
    done = run("lint", "--strict", str(CHART), *values(*filter(None, [example])))
    assert done.returncode == 0, done.stdout + done.stderr


def test_pools_of_nodes_are_daemonsets_that_select_their_own_pods() -> None:
    resources = rendered("gpus")
    sets = manifests.named(resources, "DaemonSet")
    maps = manifests.named(resources, "ConfigMap")
    assert {n: s["spec"]["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.count"] for n, s in sets.items()} == {
        "node": "1",
        "eight": "8",
    }
    for name, gpus in (("node", 1), ("eight", 8)):
        spec = sets[name]["spec"]
        assert spec["selector"]["matchLabels"] == {"app.kubernetes.io/name": "node", "thaw-pool": name}
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        nodeagent = spec["template"]["spec"]["containers"][1]
        assert nodeagent["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
        assert {"configMapRef": {"name": f"thaw-{name}-settings"}} in nodeagent["envFrom"]
        assert maps[f"thaw-{name}-settings"]["data"]["THAW_DEVICES"] == ",".join(f"cuda:{i}" for i in range(gpus))
    only = manifests.named(rendered(sets=("nodePools.node=null", "nodePools.two.gpus=2")), "DaemonSet")
    assert only.keys() == {"two"}


def test_changed_setting_restarts_the_pods() -> None:
    def checksums(*sets: str) -> dict[str, str]:
        templates = {
            name: r["spec"]["template"]["metadata"].get("annotations", {})
            for (_, name), r in {(r["kind"], r["metadata"]["name"]): r for r in rendered(sets=sets)}.items()
            if "template" in r.get("spec", {})
        }
        return {name: annotations["checksum/settings"] for name, annotations in templates.items() if annotations}

    before, after = checksums(), checksums("settings.THAW_LOG_LEVEL=debug")
    assert {name for name in before if before[name] != after[name]} == {"gateway", "scheduler", "migrator", "node"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gateway.replcas=3", "additional properties 'replcas' not allowed"),
        ("nats.replicas=2", "at '/nats/replicas'"),
        ("settings.THAW_LOG_LEVEL=1", "got number, want string"),
        ("node.weights=80Gi", "The loader's memory limit (70Gi) of the pool node has to be above `weights` (80Gi)"),
        ("node.gpus=0", "needs `devices`, for example cpu:0=4GiB"),
        ("nodePools.gateway.gpus=1", "'gateway'"),
    ],
)
def test_wrong_values_are_refused_with_a_reason(given: str, message: str) -> None:
    done = run("template", "mine", str(CHART), "--set", given)
    assert done.returncode != 0
    assert message in done.stderr


def test_every_setting_of_the_chart_exists() -> None:
    found: set[str] = set()
    for example in ("", *EXAMPLES):
        for resource in rendered(*filter(None, [example])):
            if resource["kind"] == "ConfigMap":
                found |= resource["data"].keys() - {"nats.conf"}
    assert found - {"HF_HOME", "HF_ENDPOINT", "NVIDIA_DRIVER_CAPABILITIES"} <= manifests.settings_of_the_product()


def test_versions_are_those_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_notes_name_the_steps_that_are_left() -> None:
    notes = functools.partial(run, "install", "mine", str(CHART), "--dry-run=client", "-n", "llm")
    done = notes(*values("external"), "--set", "node.peers=true")
    assert done.returncode == 0, done.stderr
    assert (
        "python -m thaw.kubernetes --namespace llm --nats HOST:PORT --postgres HOST:PORT --peers DIRECTORY NODE..." in done.stdout
    )
    assert "kubectl label node NODE... thaw-node=true\n" in done.stdout
    assert "https://llm.example.com" in notes(*values("gpus")).stdout
