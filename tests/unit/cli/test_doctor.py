"""`thaw doctor` where THAW_URL names a gateway of another launcher.

That is the case in the gateway's container.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from shared.contracts.admin import ClusterView, NodeView
from shared.contracts.node import DeviceStatus
from thaw.cli.api import Api
from thaw.cli.app import main

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
    assert set(levels) == {"python", "gateway", "scheduler", "node"}


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
