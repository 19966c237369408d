"""The manifests of deploy/kubernetes: as they are written, and as kustomize renders them."""

from __future__ import annotations

import re
import runpy
import subprocess
from functools import cache
from typing import Any

import yaml

from tests.docker.engine import ROOT
from tests.support.kubernetes_tools import kubectl

DEPLOY = ROOT / "deploy" / "kubernetes"
RELEASES = ("1.31", "1.37")
_PATCHES = {"node.yaml": "cpu", "nats-servers.yaml": "replicated"}
Resource = dict[str, Any]


def written() -> list[Resource]:
    """Return the resources as they are written, without kustomizations and patches."""
    files = [f for f in sorted(DEPLOY.rglob("*.yaml")) if f.name != "kustomization.yaml"]
    whole = [f for f in files if f.parent.name != _PATCHES.get(f.name)]
    return [resource for f in whole for resource in yaml.safe_load_all(f.read_text())]


@cache
def rendered(overlay: str) -> list[Resource]:
    command = [kubectl(), "kustomize", str(DEPLOY / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def pods(resources: list[Resource]) -> dict[str, Resource]:
    """Return the specifications of pods by the name of their controller."""
    return {r["metadata"]["name"]: r["spec"]["template"]["spec"] for r in resources if "template" in r.get("spec", {})}


def containers(pod: Resource) -> list[Resource]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def named(resources: list[Resource], kind: str) -> dict[str, Resource]:
    return {r["metadata"]["name"]: r for r in resources if r["kind"] == kind}


def settings_of_the_product() -> set[str]:
    """Return the variables that docs/configuration.md lists, which the code generates."""
    reference: Any = runpy.run_path(str(ROOT / "docs" / "generate_reference.py"))
    assert reference["_INTRODUCTION"] in (ROOT / "docs" / "configuration.md").read_text()
    return {"THAW_SECRETS_DIR", *re.findall(r"`(THAW_\w+)`", (ROOT / "docs" / "configuration.md").read_text())}


def without_comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]
