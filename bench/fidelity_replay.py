"""Replay a run that `bench.fidelity` recorded, and compare it with the simulator.

The recorded run gives the parameters by phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

from services.scheduler.domain.policies.port import Capability
from services.scheduler.profiles import profile_named
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.traces import LoadTrace, RequestTrace
from simulator.config import GB, Batching, ClusterFile, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.mesh.agents import StartTimes
from simulator.mesh.run import Simulation
from simulator.report import Outcome
from simulator.workloads.traces import read_trace

NAMES = ("one", "two", "three")
CAN: frozenset[Capability] = frozenset({"preempt", "migrate"})
FAST = 100.0
"""GB/s: weights of some megabytes lie in memory, and are mapped."""
PEER_OVER_HOST = 2.0
"""Bandwidth between two separate devices, over that from host memory to one."""
PROMPT = 31
"""Tokens of every prompt, with its template."""
SCHEDULER, GATEWAY = "scheduler", "gateway"
_Request = tuple[bool, float, dict[str, float]]
"""Whether it was cold, its TTFT, and that by phase."""


@dataclass(frozen=True, slots=True)
class SeparateDevices:
    """A node's devices with memory of their own, in bytes.

    Attributes:
        count: Devices of the node.
        weights: Pages of one model's units.
        booked: Of one instance.
        device: Of one device.
    """

    count: int
    weights: int
    booked: int
    device: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, means over the recorded run.

    Means of phases add up to the mean of their sum; medians do not.

    Attributes:
        gateway: From a request's arrival to the receipt of its demand.
        message: From a command's sending to its taking effect.
        decision: Until the command is sent.
        container: As recorded.
        init: As recorded.
        warm_up: As recorded.
        more: From then to the gateway's sending the request, and the extra time of a first prompt.
        leave: The scheduler's wait for bytes of idle holders.
        reply: The part of a warm TTFT that is neither waiting in the engine nor computing.
        prefill: A pass over one prompt.
        prefill_more: Each further prompt of the pass.
        token: Each further token.
    """

    gateway: float
    message: float
    decision: float
    container: float
    init: float
    warm_up: float
    more: float
    leave: float
    reply: float
    prefill: float
    prefill_more: float
    token: float
    copy_begins: float = 0.0
    """From a start's command to the beginning of its copy to a separate device."""
    copy: float = 0.0
    """Copy of a whole model to a separate device, alone on its link."""
    restore: float = 0.0
    """Milliseconds from the command to the gateway's request to the suspended instance; 0: none was
    suspended.
    """


def _span(spans: Iterable[PhaseSpan], phase: Phase, process: str = "") -> list[PhaseSpan]:
    return [s for s in spans if s.phase is phase and (not process or s.process == process)]


def measure_parameters(
    traces: Sequence[RequestTrace], loads: Sequence[LoadTrace], separate: SeparateDevices | None = None, *, overlap: bool = True
) -> Measured:
    """Return the parameters of a run.

    Args:
        traces: Its requests.
        loads: Its starts.
        separate: Its devices, if they have memory of their own.
        overlap: Requests may have waited for others. If not, a long wait is one of the machine.

    Raises:
        ValueError: The run has no warm request, or no start.
    """
    mean: Callable[[Sequence[float]], float] = _trim_mean if overlap else fmean
    woken = _first_of_each(traces, loads)
    cold = [t for t in woken if _span(t.spans, Phase.INIT)]
    restored = [t for t in woken if _span(t.spans, Phase.RESTORE)]
    if not cold or all(t.cold for t in traces):
        raise ValueError("the recorded run has no warm request, or no start: nothing can be measured from it")
    gateway = mean([min(s.start_ms for s in t.spans if s.process == SCHEDULER) for t in woken])
    message = fmean(
        max(0.0, min(s.start_ms for s in t.spans if s.process.startswith("nodeagent")) - _find_sent_at(t)) for t in woken
    )
    decision = fmean(sum(s.duration_ms for s in _span(t.spans, Phase.SCHEDULE, SCHEDULER)) for t in woken)
    prefill, further = _passes(traces)
    reply = fmean((t.ttft_ms or 0.0) - _prefill(t) - _sum_wait_ms(t) for t in traces if not t.cold)
    starts = [_early_start(t, message, reply, prefill) if separate else _start(t, message, reply + prefill) for t in cold]
    waited = [x.more for x in starts if x.more] if separate else [x.more for x in starts]
    copies = [(t, found[-1]) for t in cold if (found := _copies(t))]
    reserves = [_span(load.spans, Phase.RESERVE, SCHEDULER) for load in loads]
    leave = mean([found[-1].duration_ms for found in reserves if found] or [0.0])
    tokens = [(t.duration_ms - t.ttft_ms) / (t.completion_tokens - 1) for t in traces if t.ttft_ms and t.completion_tokens > 1]
    return Measured(
        max(0.0, gateway - message) / 1e3,
        message / 1e3,
        decision / 1e3,
        fmean(x.engine for x in starts),
        fmean(x.init for x in starts),
        fmean(x.warm_up for x in starts),
        fmean(waited) if waited else 0.0,
        max(0.0, leave - decision - 2 * message) / 1e3,
        reply / 1e3,
        prefill / 1e3,
        further / 1e3,
        max(fmean(tokens), 0.01) / 1e3,
        fmean(max(0.0, span.start_ms - _find_sent_at(t) - message) for t, span in copies) / 1e3 if copies else 0.0,
        _whole_copy_ms(copies) / 1e3,
        max(0.0, fmean(_find_dispatched_at(t) - _find_sent_at(t) for t in restored) - 2 * message) / 1e3 if restored else 0.0,
    )


def _prefill(t: RequestTrace) -> float:
    return sum(s.duration_ms for s in _span(t.spans, Phase.PREFILL))


def _sum_wait_ms(t: RequestTrace) -> float:
    """In the engine, for the pass before."""
    return sum(s.duration_ms for s in _span(t.spans, Phase.QUEUE, "engine"))


def _passes(traces: Sequence[RequestTrace]) -> tuple[float, float]:
    """Return the milliseconds of a pass over one prompt, and of each further one.

    They are a line through all passes. Warm requests of one instance with exactly the same time of
    computing were computed together.
    """
    counts = Counter((t.instance_id, _prefill(t)) for t in traces if not t.cold)
    took = [ms for _, ms in counts]
    more = 0.0
    if len(set(counts.values())) > 1:
        more = min(max(0.0, linear_regression(list(counts.values()), took).slope), fmean(took))
    return max(0.0, fmean(took) - more * (fmean(counts.values()) - 1)), more


def _trim_mean(values: Sequence[float]) -> float:
    """Return the mean of values up to twice the median.

    Larger values contain waiting, which the simulator adds by itself.
    """
    return fmean(v for v in values if v <= 2 * median(values))


def _start(t: RequestTrace, message: float, prompt: float) -> StartTimes:
    """Return the times of the start that the request caused.

    Args:
        t: The trace of the request.
        message: Milliseconds of a message.
        prompt: Milliseconds of the prefill.
    """
    init = _span(t.spans, Phase.INIT)[0]
    warm_up = sum(s.duration_ms for s in _span(t.spans, Phase.PROFILE))
    first = (t.ttft_ms or 0.0) - _find_dispatched_at(t) - prompt
    more = _find_dispatched_at(t) - init.end_ms - warm_up - message + first
    return StartTimes(
        max(0.0, init.start_ms - _find_sent_at(t) - message) / 1e3, init.duration_ms / 1e3, warm_up / 1e3, max(0.0, more) / 1e3
    )


def _copies(t: RequestTrace) -> list[PhaseSpan]:
    """Return the spans of copies to a separate device."""
    return [s for s in _span(t.spans, Phase.LOAD) if "device" in s.detail]


def _whole_copy_ms(copies: Sequence[tuple[RequestTrace, PhaseSpan]]) -> float:
    """Return the shortest first copy of a model: it is whole, and had its link for itself."""
    first: dict[str, float] = {}
    for t, span in copies:
        first.setdefault(t.model, span.duration_ms)
    return min(first.values(), default=0.0)


def _early_start(t: RequestTrace, message: float, reply: float, prefill: float) -> StartTimes:
    """Return the times of a start whose engine accepts requests while its weights are copied.

    `more` is from the last byte to the release of results; 0 if the prompt took longer than the
    copy. What the prompt took more than usual then counts as initialisation.
    """
    init, opened = _span(t.spans, Phase.INIT)[0], _find_dispatched_at(t) - message
    copied = max((s.end_ms for s in _copies(t)), default=0.0)
    first, computed = (t.ttft_ms or 0.0) - reply, _find_dispatched_at(t) + prefill
    more = first - copied if copied > computed else 0.0
    extra = 0.0 if more else max(0.0, first - computed)
    engine = init.start_ms - _find_sent_at(t) - message
    return StartTimes(max(0.0, engine) / 1e3, (opened - init.start_ms + extra) / 1e3, 0.0, max(0.0, more) / 1e3)


def start_by_start(
    traces: Sequence[RequestTrace], loads: Sequence[LoadTrace], m: Measured, separate: SeparateDevices | None = None
) -> dict[str, list[StartTimes]]:
    """By model, what its starts took, in their order."""
    found: dict[str, list[StartTimes]] = {}
    for t in _first_of_each(traces, loads):
        if _span(t.spans, Phase.INIT):
            message, reply, prefill = m.message * 1e3, m.reply * 1e3, m.prefill * 1e3
            times = _early_start(t, message, reply, prefill) if separate else _start(t, message, reply + prefill)
            found.setdefault(t.model, []).append(times)
    return found


def _find_sent_at(t: RequestTrace) -> float:
    """When the command that its instance was started or restored by was sent."""
    return max(s.end_ms for s in t.spans if s.process == SCHEDULER)


def _find_dispatched_at(t: RequestTrace) -> float:
    return _span(t.spans, Phase.QUEUE, GATEWAY)[0].start_ms


def _first_of_each(traces: Sequence[RequestTrace], loads: Sequence[LoadTrace]) -> list[RequestTrace]:
    """The requests that caused the starts."""
    found: dict[str, RequestTrace] = {}
    for t in sorted(traces, key=lambda t: t.received):
        if t.ttft_ms is not None and t.load_plan_id is not None and t.load_plan_id not in found:
            found[t.load_plan_id] = t
    known = {load.plan_id for load in loads}
    return [t for plan, t in found.items() if plan in known and _span(t.spans, Phase.QUEUE, GATEWAY) and _is_woken(t)]


def _is_woken(t: RequestTrace) -> bool:
    return bool(_span(t.spans, Phase.INIT) or _span(t.spans, Phase.RESTORE))


def mean_of(several: Sequence[Measured]) -> Measured:
    return Measured(*(fmean(getattr(m, f.name) for m in several) for f in fields(Measured)))


def machines(m: Measured, separate: SeparateDevices | None = None) -> tuple[ClusterFile, tuple[ModelGroup, ...]]:
    """One device for two of three models; `separate`: the recorded run's."""
    links, weights_gb, kv_gb = LinkSpeeds(remote=FAST, ssd=FAST, device=FAST), 0.1, 0.0
    node = NodeGroup(devices=1, device_gb=0.25, dram_gb=10, ssd_gb=10, links=links)
    if separate is not None:
        weights_gb, kv_gb = separate.weights / GB, (separate.booked - separate.weights) / GB
        host = weights_gb / m.copy
        links = LinkSpeeds(remote=FAST, ssd=FAST, device=host, peer=host * PEER_OVER_HOST)
        node = NodeGroup(
            devices=separate.count, device_gb=separate.device / GB, dram_gb=10, ssd_gb=10, links=links, memory="separate"
        )
    runtime = Runtime(
        startup=Startup(
            container_s=m.container,
            init_s=m.init,
            warm_up_s=m.warm_up + m.more,
            leave_s=m.leave,
            restore_s=m.restore,
            copy_s=m.copy_begins,
            compute_while_loading=separate is not None,
        ),
        gateway_ms=m.gateway * 1e3,
        message_ms=m.message * 1e3,
        reply_ms=m.reply * 1e3,
        decision_ms=m.decision * 1e3,
        capabilities=CAN | ({"suspend"} if m.restore else set()) | ({"reuse", "peer_copy"} if separate else set()),
        in_dram=True,
        share_compute="none",  # engines of one thread each, on cores of their own
    )
    service = Batching(
        prefill_tokens_per_second=PROMPT / max(m.prefill_more, 1e-6),
        prefill_ms=max(0.0, m.prefill - m.prefill_more) * 1e3,
        prefill_together=True,
        tpot_ms=m.token * 1e3,
        concurrency=16,
    )
    models = tuple(
        ModelGroup(
            name=n,
            weights_gb=weights_gb,
            kv_gb=kv_gb,
            service=service,
            slo_ttft=10,
            has_ttft_objective=False,
            keep_alive=-1,
        )
        for n in NAMES
    )
    return ClusterFile(nodes=(node,), runtime=runtime), models


def compare_replay(
    traces: Sequence[RequestTrace],
    loads: Sequence[LoadTrace],
    export: Path,
    given: Measured | None = None,
    policy: str = "thaw",
    separate: SeparateDevices | None = None,
    *,
    overlap: bool = True,
) -> dict[str, Any]:
    """Compare the recorded run with its replay.

    The result has the mean TTFT of cold and of warm requests, in all and by phase, the number of
    cold requests, and the order in which models were started.

    Args:
        given: Parameters in place of the run's own.
        policy: The mesh's policy.
        separate: The mesh's devices, if they have memory of their own.
        overlap: As in `measure_parameters`.
    """
    traces = sorted((t for t in traces if t.ttft_ms is not None), key=lambda t: t.received)
    m = given or measure_parameters(traces, loads, separate, overlap=overlap)
    cluster, models = machines(m, separate)
    requests = read_trace(export, NAMES)
    usual = StartTimes(m.container, m.init, m.warm_up, m.more)
    simulation = Simulation(cluster, models, profile_named(policy), usual=usual)
    outcome = simulation.run(requests)
    as_recorded = Simulation(
        cluster, models, profile_named(policy), usual=usual, recorded=start_by_start(traces, loads, m, separate)
    )
    exact = fmean(s.ttft for s in as_recorded.run(requests).served)
    started = [load.model for load in sorted(loads, key=lambda load: load.created)]
    real = [(t.cold, (t.ttft_ms or 0.0) / 1e3, _path(t)) for t in traces]
    replayed = [(s.cold, s.ttft, outcome.paths[s.number]) for s in outcome.served]
    mesh, simulator = fmean(x[1] for x in real), fmean(x[1] for x in replayed)
    return {
        "requests": len(real),
        "parameters_s": asdict(m),
        "ttft_mean_s": {"mesh": mesh, "simulator": simulator, "error": simulator / mesh - 1},
        "cold": {"mesh": sum(x[0] for x in real), "simulator": sum(x[0] for x in replayed)},
        "starts": {"mesh": started, "simulator": simulation.started},
        "start_by_start": {"ttft_mean_s": exact, "error": exact / mesh - 1, "starts": as_recorded.started},
        "same_requests_cold": _count_alike(traces, outcome),
        "cold_ttft_mean_s": {"mesh": _mean(real, True), "simulator": _mean(replayed, True)},
        "warm_ttft_mean_s": {"mesh": _mean(real, False), "simulator": _mean(replayed, False)},
        "cold_phases_mean_s": {"mesh": _phases(real), "simulator": _phases(replayed)},
    }


def _mean(found: Sequence[_Request], cold: bool) -> float | None:
    mine = [ttft for was, ttft, _ in found if was is cold]
    return fmean(mine) if mine else None


def _path(t: RequestTrace) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in t.critical_path:
        found[part.phase.value] = found.get(part.phase.value, 0.0) + part.duration_ms / 1e3
    return found


def _phases(found: Sequence[_Request]) -> dict[str, float]:
    """Return the mean milliseconds of each phase of cold requests."""
    paths = [path for cold, _, path in found if cold]
    names = dict.fromkeys(name for path in paths for name in path)
    return {name: fmean(path.get(name, 0.0) for path in paths) for name in names}


def _count_alike(traces: Sequence[RequestTrace], outcome: Outcome) -> int:
    """Requests that were cold in both, or in neither."""
    cold = {s.number: s.cold for s in outcome.served}
    return sum(cold.get(n) is t.cold for n, t in enumerate(traces))
