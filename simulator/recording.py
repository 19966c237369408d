"""A running mesh as the files of a simulation.

`thaw simulate --from-mesh` stores the admin API's answers in a directory: `mesh.json`
(`ClusterView`), `requests.jsonl` (`RequestTrace`) and `loads.jsonl` (`LoadTrace`). From them
`write` makes `cluster.yaml`, `models.yaml` and `run.jsonl`, which a person can write and change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from services.scheduler.domain.cost.links import PEER_LINK
from shared.contracts.admin import ClusterView, ModelView, NodeView
from shared.contracts.phases import NEW_ZYGOTE, Phase, PhaseSpan, measure_covered
from shared.contracts.traces import LoadTrace, RequestTrace
from shared.errors import InvalidRequest
from shared.percentiles import percentile
from shared.sizing import need_of
from simulator.config import GB

DEVICE_GB_PER_SECOND = 100.0
"""Bandwidth of a unified cpu device: its engines map the weights, and the loader copies nothing."""
GPU_GB_PER_SECOND = 20.0
SSD_GB_PER_SECOND = 2.0
REMOTE_GB_PER_SECOND = 0.125
PREFILL_TOKENS_PER_SECOND = 1000.0
TPOT_MS = 50.0
SLO_TTFT_S = 10.0
Record = TypeVar("Record")
_HEADER = "# Written by `thaw simulate --from-mesh` from a running mesh; docs/simulator.md explains the keys.\n"
_START = (Phase.CONTAINER, Phase.ATTACH, Phase.CONTEXT, Phase.LIBRARIES)
_LOADING = (Phase.LOAD, Phase.FETCH)
_WARM_UP = (Phase.PROFILE, Phase.COMPILE, Phase.CAPTURE)


@dataclass(frozen=True, slots=True)
class Recording:
    """The requests that a mesh has served, and those of its replay.

    Attributes:
        ttft_s: Times to the first token, in order of arrival.
        cold: Requests that waited for a start.
        left_out: Requests without a token, or to models that are not registered any more.
    """

    ttft_s: tuple[float, ...]
    cold: int
    left_out: int

    def figures(self) -> dict[str, Any]:
        ttft: dict[str, float | None] = {f"p{p}": percentile(self.ttft_s, p, default=None) for p in (50, 95, 99)}
        ttft["mean"] = fmean(self.ttft_s) if self.ttft_s else None
        return {"requests": len(self.ttft_s), "cold": self.cold, "left_out": self.left_out, "ttft": ttft}


def write(directory: Path, replay: bool) -> Recording:
    """Write the simulation's files beside the recorded ones.

    Args:
        directory: With the recorded files.
        replay: The recorded requests are needed, to be replayed.

    Raises:
        InvalidRequest: A file is missing or invalid, or the mesh has no model, node or request.
    """
    view = ClusterView.model_validate_json(_text(directory / "mesh.json"))
    requests = _lines(directory / "requests.jsonl", RequestTrace.model_validate_json)
    loads = _lines(directory / "loads.jsonl", LoadTrace.model_validate_json)
    nodes = [n for n in view.nodes if n.alive and n.devices]
    models = [m for m in view.models if m.card.spec.base is None]
    if not nodes or not models:
        raise InvalidRequest(f"The mesh has no {'node' if not nodes else 'model'}: there is nothing to simulate")
    replayed = _list_replayed(view, requests)
    if replay and not replayed:
        raise InvalidRequest(
            "The mesh has no trace of a request to a registered model. Send it requests first, or pass --workload synthetic"
            if not requests
            else "No recorded request is to a model that is registered now. Pass --workload synthetic to draw requests"
        )
    _dump(directory / "cluster.yaml", _cluster(nodes, models, replayed, loads))
    _dump(directory / "models.yaml", {"models": [_model(m, replayed) for m in _by_popularity(models, replayed)]})
    (directory / "run.jsonl").write_text("".join(f"{t.model_dump_json()}\n" for t in replayed))
    ttft = tuple((t.ttft_ms or 0.0) / 1e3 for t in replayed)
    return Recording(ttft, sum(t.cold for t in replayed), len(requests) - len(replayed))


def _list_replayed(view: ClusterView, requests: Iterable[RequestTrace]) -> list[RequestTrace]:
    """Return the requests with a token, those of LoRA adapters under their base's name."""
    bases = {m.card.name: m.card.spec.base or m.card.name for m in view.models}
    known = (t.model_copy(update={"model": bases[t.model]}) for t in requests if t.model in bases and t.ttft_ms is not None)
    return sorted(known, key=lambda t: t.received)


def _by_popularity(models: Iterable[ModelView], requests: Sequence[RequestTrace]) -> list[ModelView]:
    return sorted(models, key=lambda m: -sum(t.model == m.card.name for t in requests))


def _cluster(
    nodes: Sequence[NodeView], models: Sequence[ModelView], requests: Sequence[RequestTrace], loads: Sequence[LoadTrace]
) -> dict[str, Any]:
    weights = sum(need_of(m.card).weights for m in models)
    can = ["preempt", "migrate"]
    if any(i.suspension.possible for n in nodes for i in n.instances) or any(
        _filter_spans(load.spans, Phase.RESTORE) for load in loads
    ):
        can.append("suspend")
    runtime = {
        "startup": _startup(loads),
        "capabilities": can,
        "ssd_copies": "full",
        "share_compute": "none",  # the measured times include what the mesh's instances took from each other
        "decision_ms": _mean((_sum_ms(load.spans, Phase.SCHEDULE, process="scheduler") for load in loads), 0.0),
        "reply_ms": _mean((_reply(t) for t in requests if not t.cold), 0.0),
    }
    return {"nodes": [_node(n, weights) for n in nodes], "runtime": runtime}


def _node(node: NodeView, weights: int) -> dict[str, Any]:
    loader = node.loader
    read = loader.bytes_per_second if loader else None
    separate = all(d.memory == "separate" for d in node.devices)
    unified_cpu = node.devices[0].kind == "cpu" and not separate
    return {
        "name": node.node,
        "kind": node.devices[0].kind,
        "devices": len(node.devices),
        "device_gb": min(d.budget_bytes for d in node.devices) / GB,
        "dram_gb": ((loader.dram_budget_bytes if loader else 0) + node.snapshot_budget_bytes) / GB,
        "ssd_gb": max(loader.ssd_budget_bytes if loader else 0, weights) / GB,
        "memory": "separate" if separate else "unified",
        "links": {
            "remote": _speed(node, ("remote:", "peer:")) or REMOTE_GB_PER_SECOND,
            "ssd": _speed(node, ("ssd:",)) or (read / GB if read else SSD_GB_PER_SECOND),
            "device": DEVICE_GB_PER_SECOND if unified_cpu else _speed(node, ("bus:",)) or GPU_GB_PER_SECOND,
            "peer": _peer_speeds(node) if separate else None,
        },
    }


def _peer_speeds(node: NodeView) -> list[list[float]] | None:
    """Return the measured GB/s from each device of a node to each other; 0: none was measured.

    None: no pair was.
    """
    links = node.loader.links if node.loader else ()
    known = {s.link: s.bytes_per_second / GB for s in links if s.bytes_per_second}
    ids = [d.device_id for d in node.devices]
    speeds = [[known.get(f"{PEER_LINK}:{source}>{target}", 0.0) for target in ids] for source in ids]
    return speeds if any(map(any, speeds)) else None


def _speed(node: NodeView, prefixes: tuple[str, ...]) -> float | None:
    """Return the fastest of the links with these names, in GB/s; None: none was measured."""
    links = node.loader.links if node.loader else ()
    return max((s.bytes_per_second / GB for s in links if s.link.startswith(prefixes) and s.bytes_per_second), default=None)


def _startup(loads: Sequence[LoadTrace]) -> dict[str, float]:
    """Return the mean durations of the starts and of the resumptions.

    What overlaps counts once: initialisation only where no byte is loaded.
    """
    ready = [load for load in loads if load.outcome == "ready"]
    starts = [load.spans for load in ready if _filter_spans(load.spans, Phase.INIT)]
    resumed = [load.spans for load in ready if _filter_spans(load.spans, Phase.RESTORE)]
    return {
        "container_s": _mean((_sum_ms(s, *_START) for s in starts if not _with_new_zygote(s)), 0.0) / 1e3,
        "init_s": _mean((_sum_ms(s, Phase.INIT, *_LOADING) - _sum_ms(s, *_LOADING) for s in starts), 0.0) / 1e3,
        "warm_up_s": _mean((_sum_ms(s, *_WARM_UP) for s in starts), 0.0) / 1e3,
        "leave_s": _mean((left for s in ready if (left := _sum_ms(s.spans, Phase.RESERVE, process="scheduler"))), 0.0) / 1e3,
        "restore_s": _mean((_sum_ms(s, Phase.RESTORE) for s in resumed), 0.0) / 1e3,
    }


def _with_new_zygote(spans: Iterable[PhaseSpan]) -> bool:
    return any(s.detail.get("launcher") == NEW_ZYGOTE for s in spans)


def _model(view: ModelView, requests: Sequence[RequestTrace]) -> dict[str, Any]:
    card, need = view.card, need_of(view.card)
    spec = card.spec
    mine = [t for t in requests if t.model == card.name] or requests
    warm = [t for t in mine if not t.cold] or mine
    prompts = [(t.prompt_tokens, _sum_ms(t.spans, Phase.PREFILL)) for t in warm]
    spent = sum(ms for tokens, ms in prompts if tokens) / 1e3
    tokens = [(t.duration_ms - t.ttft_ms) / (t.completion_tokens - 1) for t in mine if t.ttft_ms and t.completion_tokens > 1]
    return {
        "name": card.name,
        "weights_gb": max(need.weights, 1) / GB,
        "kv_gb": (need.total - need.weights) / GB,
        "kv_mb_per_token": card.info.kv_bytes_per_token / 1e6,
        "service": {
            "kind": "batching",
            "prefill_tokens_per_second": sum(t for t, _ in prompts) / spent if spent else PREFILL_TOKENS_PER_SECOND,
            "prefill_together": True,
            "tpot_ms": max(_mean(tokens, TPOT_MS), 0.01),
            "concurrency": spec.max_concurrency,
        },
        "slo_ttft": spec.slo.ttft or SLO_TTFT_S,
        "has_ttft_objective": spec.slo.ttft is not None,
        "slo_tpot": spec.slo.tpot,
        "percentile": spec.slo.percentile,
        "keep_alive": -1 if spec.pin else spec.keep_alive,
        "replicas_min": spec.replicas.min,
        "replicas_max": spec.replicas.max,
        "priority": spec.priority,
        "sensitivity": spec.latency_sensitivity,
    }


def _filter_spans(spans: Iterable[PhaseSpan], *phases: Phase, process: str = "") -> list[PhaseSpan]:
    return [s for s in spans if s.phase in phases and (not process or s.process == process)]


def _sum_ms(spans: Iterable[PhaseSpan], *phases: Phase, process: str = "") -> float:
    """Return the milliseconds that any of the phases covers."""
    return measure_covered((s.start_ms, s.end_ms) for s in _filter_spans(spans, *phases, process=process))


def _reply(t: RequestTrace) -> float:
    """Return the milliseconds of a warm TTFT that are neither computing nor waiting for it."""
    return max(0.0, (t.ttft_ms or 0.0) - _sum_ms(t.spans, Phase.PREFILL, Phase.QUEUE))


def _mean(values: Iterable[float], default: float) -> float:
    found = list(values)
    return fmean(found) if found else default


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be read: {e.strerror}") from e


def _lines(path: Path, parse: Callable[[str], Record]) -> list[Record]:
    try:
        return [parse(line) for line in _text(path).splitlines()]
    except ValidationError as e:
        raise InvalidRequest(f"{path} is not what a mesh records: {e.errors()[0]['msg']}") from e


def _dump(path: Path, document: dict[str, Any]) -> None:
    path.write_text(_HEADER + yaml.safe_dump(_round_values(document), sort_keys=False))


def _round_values(value: Any) -> Any:
    """Return the document with at most six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _round_values(v) for k, v in value.items()}
    return [_round_values(v) for v in value] if isinstance(value, list) else value
