"""The files that `thaw simulate --from-mesh` makes from what a mesh has recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.contracts.admin import ClusterView, LoaderView, ModelView, NodeView
from shared.contracts.loader import LinkStatus
from shared.contracts.models import ModelCard
from shared.contracts.node import DeviceStatus
from shared.contracts.phases import NEW_ZYGOTE, Phase, PhaseSpan
from shared.contracts.traces import LoadTrace, RequestTrace
from shared.errors import InvalidRequest
from shared.sizing import need_of
from simulator.config import ClusterFile, ModelsFile, read
from simulator.recording import PREFILL_TOKENS_PER_SECOND, write
from tests.support.fake_engine import card_of

GB = 10**9


def span(phase: Phase, start: float, length: float, process: str = "engine", **detail: str) -> PhaseSpan:
    return PhaseSpan(phase=phase, start_ms=start, duration_ms=length, process=process, detail=dict(detail))


def request(model: str, at: float, *, cold: bool = False, ttft: float | None = 50.0) -> RequestTrace:
    return RequestTrace(
        request_id=f"r{at}", trace_id="t", model=model, endpoint="/v1/chat/completions", received=at, cold=cold, ttft_ms=ttft,
        duration_ms=250, prompt_tokens=20, completion_tokens=11, spans=(span(Phase.PREFILL, 5, 40),),
    )  # fmt: skip


def start(*spans: PhaseSpan, outcome: Any = "ready") -> LoadTrace:
    return LoadTrace(
        plan_id="p", trace_id="t", model="a", node="n", instance_id="i", created=0, duration_ms=1, outcome=outcome, spans=spans
    )


def view(*cards: ModelCard, **loader: Any) -> ClusterView:
    device = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=8 * GB, reserved_bytes=0)
    small = device.model_copy(update={"device_id": "cpu:1", "budget_bytes": 6 * GB})
    node = NodeView(node="n", alive=True, devices=(device, small), loader=LoaderView(**loader), snapshot_budget_bytes=GB)
    gone = NodeView(node="gone", alive=False, devices=(device,))
    return ClusterView(scheduler="s", epoch=1, models=tuple(ModelView(card=c) for c in cards), nodes=(node, gone))


def files(directory: Path, seen: ClusterView, requests: list[RequestTrace], loads: list[LoadTrace]) -> tuple[dict[str, Any], Any]:
    (directory / "mesh.json").write_text(seen.model_dump_json())
    (directory / "requests.jsonl").write_text("".join(f"{t.model_dump_json()}\n" for t in requests))
    (directory / "loads.jsonl").write_text("".join(f"{t.model_dump_json()}\n" for t in loads))
    recorded = write(directory, replay=bool(requests))
    read(directory / "cluster.yaml", ClusterFile)
    read(directory / "models.yaml", ModelsFile)
    return recorded.figures(), tuple(yaml.safe_load((directory / f"{name}.yaml").read_text()) for name in ("cluster", "models"))


def test_nodes_links_and_models(tmp_path: Path) -> None:
    links = (
        LinkStatus(link="ssd:a", bytes_per_second=3 * GB),
        LinkStatus(link="ssd:b", bytes_per_second=1.0),
        LinkStatus(link="remote:x"),
    )
    cards = (card_of("a"), card_of("b", keep_alive=7, priority=3, slo={"ttft": 2}))
    figures, (cluster, models) = files(
        tmp_path, view(*cards, dram_budget_bytes=4 * GB, links=links), [request("b", 1, cold=True), request("b", 2)], []
    )
    assert figures == {"requests": 2, "cold": 1, "left_out": 0, "ttft": {"p50": 0.05, "p95": 0.05, "p99": 0.05, "mean": 0.05}}
    (node,) = cluster["nodes"]
    assert {k: node[k] for k in ("name", "devices", "device_gb", "dram_gb")} == {
        "name": "n",
        "devices": 2,
        "device_gb": 6,
        "dram_gb": 5,
    }
    assert node["links"] == {"remote": 0.125, "ssd": 3, "device": 100, "peer": None}
    asked, idle = models["models"]  # the more popular one first
    assert (asked["name"], asked["keep_alive"], asked["priority"], asked["slo_ttft"]) == ("b", 7, 3, 2)
    assert [m["has_ttft_objective"] for m in (asked, idle)] == [True, False]
    assert asked["weights_gb"] + asked["kv_gb"] == pytest.approx(need_of(cards[1]).total / GB, rel=1e-4)
    assert asked["service"]["prefill_tokens_per_second"] == pytest.approx(500)  # 20 tokens in 40 ms
    assert asked["service"]["tpot_ms"] == pytest.approx(20)
    assert idle["service"] == asked["service"]  # nothing was measured of it: as the others


def test_separate_devices_have_the_measured_links(tmp_path: Path) -> None:
    measured = {"bus:cpu:0": 2 * GB, "bus:cpu:1": GB, "p2p:cpu:0>cpu:1": 4 * GB}
    seen = view(card_of("a"), links=tuple(LinkStatus(link=k, bytes_per_second=v) for k, v in measured.items()))
    node = seen.nodes[0]
    separate = node.model_copy(update={"devices": tuple(d.model_copy(update={"memory": "separate"}) for d in node.devices)})
    _, (cluster, _) = files(tmp_path, seen.model_copy(update={"nodes": (separate,)}), [], [])
    (made,) = cluster["nodes"]
    assert made["memory"] == "separate"
    assert made["links"]["device"] == 2
    assert made["links"]["peer"] == [[0, 4], [0, 0]]
    _, (cluster, _) = files(tmp_path, seen, [], [])
    assert (cluster["nodes"][0]["memory"], cluster["nodes"][0]["links"]["peer"]) == ("unified", None)


def test_overlapping_phases_of_a_start_count_once(tmp_path: Path) -> None:
    plain = start(
        span(Phase.SCHEDULE, 0, 3, "scheduler"), span(Phase.RESERVE, 3, 60, "scheduler"), span(Phase.RESERVE, 70, 5, "nodeagent-n"),
        span(Phase.CONTAINER, 0, 100), span(Phase.LIBRARIES, 20, 50), span(Phase.LOAD, 50, 150), span(Phase.INIT, 150, 150),
        span(Phase.PROFILE, 300, 30),
    )  # fmt: skip
    first = start(span(Phase.CONTAINER, 0, 5000, launcher=NEW_ZYGOTE), span(Phase.INIT, 5000, 100), span(Phase.PROFILE, 5100, 30))
    failed = start(span(Phase.CONTAINER, 0, 9999), span(Phase.INIT, 0, 9999), outcome="failed")
    resumed = start(span(Phase.RESTORE, 0, 400))
    _, (cluster, _) = files(tmp_path, view(card_of("a")), [request("a", 1)], [plain, first, failed, resumed])
    assert cluster["runtime"]["startup"] == {
        "container_s": 0.1,
        "init_s": 0.1,
        "warm_up_s": 0.03,
        "leave_s": 0.06,
        "restore_s": 0.4,
    }
    assert "suspend" in cluster["runtime"]["capabilities"]


def test_only_complete_requests_of_known_models_are_exported(tmp_path: Path) -> None:
    cards = (card_of("a"), card_of("tuned", base="a"))
    requests = [request("a", 3), request("tuned", 1), request("gone", 2), request("a", 4, ttft=None)]
    figures, (_, models) = files(tmp_path, view(*cards), requests, [])
    assert (figures["requests"], figures["left_out"]) == (2, 2)
    replayed = [RequestTrace.model_validate_json(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [(t.model, t.received) for t in replayed] == [("a", 1), ("a", 3)]
    assert [m["name"] for m in models["models"]] == ["a"]


def test_a_mesh_without_requests(tmp_path: Path) -> None:
    _, (_, models) = files(tmp_path, view(card_of("a")), [], [])
    assert models["models"][0]["service"]["prefill_tokens_per_second"] == PREFILL_TOKENS_PER_SECOND
    with pytest.raises(InvalidRequest, match="Send it requests first, or pass --workload synthetic"):
        write(tmp_path, replay=True)


def test_a_mesh_without_models_or_nodes(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="The mesh has no model"):
        files(tmp_path, view(), [], [])
    with pytest.raises(InvalidRequest, match="The mesh has no node"):
        files(tmp_path, view(card_of("a")).model_copy(update={"nodes": ()}), [], [])
