"""`thaw doctor` where THAW_URL names a gateway of another launcher.

That is the case in the gateway's container.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from shared.contracts.admin import ClusterView, LoaderView, NodeView
from shared.contracts.audit import DeviceAudit
from shared.contracts.loader import DeviceMemory
from shared.contracts.node import DeviceStatus
from thaw.cli.api import Api
from thaw.cli.app import main
from thaw.launcher.memory_checks import NodeAudit, findings_of

DEVICE = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=1, reserved_bytes=0)
HEALTHY = ClusterView(scheduler="s-1", epoch=3, nodes=(NodeView(node="node-0", alive=True, loader_alive=True, devices=(DEVICE,)),))
LOST = ClusterView(scheduler="s-1", epoch=3, nodes=(NodeView(node="node-0", alive=False, devices=(DEVICE,)),))


def doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], ready: httpx.Response, cluster: ClusterView
) -> tuple[int, dict[str, str], dict[str, str]]:
    """Return the status, and levels and texts by subject."""
    monkeypatch.setenv("THAW_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("THAW_HOME", str(tmp_path / "none"))
    transport = httpx.MockTransport(lambda _: ready)
    monkeypatch.setattr(Api, "client", lambda *_: httpx.Client(base_url="http://127.0.0.1:1", transport=transport))
    monkeypatch.setattr(Api, "cluster", lambda _: cluster)
    status = main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return status, {f["subject"]: f["level"] for f in findings}, {f["subject"]: f["text"] for f in findings}


def test_healthy_stack_has_only_ok_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = httpx.Response(200, json={"status": "ready", "faults": []})
    status, levels, _ = doctor(monkeypatch, tmp_path, capsys, ready, HEALTHY)
    assert (status, set(levels.values())) == (0, {"ok"})
    assert set(levels) == {"python", "gateway", "scheduler", "node", "models"}


def test_faults_of_the_gateway_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = httpx.Response(503, json={"status": "not ready", "faults": ["NATS is unreachable"]})
    status, levels, texts = doctor(monkeypatch, tmp_path, capsys, ready, HEALTHY)
    assert (status, levels["gateway"]) == (1, "fail")
    assert "NATS is unreachable" in texts["gateway"]


def test_lost_node_fails_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, levels, _ = doctor(monkeypatch, tmp_path, capsys, httpx.Response(200, json={}), LOST)
    assert (status, levels["node"]) == (1, "fail")


def device(*violations: str) -> DeviceAudit:
    return DeviceAudit(
        device_id="cpu:1", total_pages=4, free_pages=1, mapped_pages=2, reusable_pages=1, lent_pages=0, violations=violations
    )


def test_a_conserved_device_is_described_by_its_pages() -> None:
    [found] = findings_of([NodeAudit("node-0", (device(),))])
    assert (found.level, found.subject) == ("ok", "device memory")
    assert found.text.startswith("node-0 cpu:1: 2.0 MiB free + 4.0 MiB mapped + 2.0 MiB reusable + 0 B lent = 8.0 MiB")


def test_violations_and_silent_loaders_are_findings() -> None:
    found = list(findings_of([NodeAudit("node-0", (device("page 3 is nowhere"),)), NodeAudit("node-1", error="No loader listens")]))
    assert [(f.level, f.text) for f in found] == [
        ("fail", "node-0 cpu:1: page 3 is nowhere"),
        ("warn", "node-1 has not audited its devices: No loader listens"),
    ]


def test_violations_behind_a_gateway_fail_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = DeviceMemory(
        device_id="cpu:1", total_bytes=1, free_bytes=1, mapped_bytes=0, reusable_bytes=0, violations=("page 3 is nowhere",)
    )
    node = HEALTHY.nodes[0].model_copy(update={"loader": LoaderView(memory=(memory,))})
    cluster = HEALTHY.model_copy(update={"nodes": (node,)})
    status, levels, _ = doctor(monkeypatch, tmp_path, capsys, httpx.Response(200, json={}), cluster)
    assert (status, levels["device memory"]) == (1, "fail")
