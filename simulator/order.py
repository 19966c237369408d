"""Define the input of a simulation: the document of `thaw simulate`, and its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.scheduler.domain.policies.port import Profile
from services.scheduler.profiles import profile_named
from shared.errors import InvalidRequest
from simulator.config import ClusterFile, ModelGroup, ModelsFile, names_of, read
from simulator.mesh.run import Simulation
from simulator.report import Outcome
from simulator.simulate import simulate
from simulator.workloads.request import Request
from simulator.workloads.synthetic import DATASETS, LOCALITY, Burst, Synthetic, synthetic
from simulator.workloads.traces import read_trace


class Limits(BaseModel):
    """Limits of the simulation's process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_s: int = Field(ge=1, description="Seconds of processor time.")
    memory_bytes: int = Field(ge=1, description="Address space.")


class Order(BaseModel):
    """The order of a simulation; defaults are those of `thaw simulate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: Path
    models: Path
    policies: tuple[str, ...] = Field(default=("thaw",), min_length=1)
    seeds: int = Field(default=1, ge=1)
    mesh: bool = False
    recording: Path | None = Field(
        default=None, description="Directory of simulator.recording, which writes the files there first."
    )
    trace: Path | None = None
    speed: float = 1.0
    rps: float = 1.0
    duration: float = 600.0
    cv: float | None = None
    zipf: float = Field(default=1.0, ge=0)
    popularity: Literal["zipf", "azure"] = "zipf"
    each: bool = False
    locality: str | None = None
    lengths: str | None = None
    prompt_tokens: float = 256.0
    output_tokens: float = 128.0
    length_cv: float = Field(default=0.0, ge=0)
    bursts: tuple[tuple[float, float, float], ...] = ()
    plots: Path | None = None
    without: str | None = Field(default=None, description="Node: each policy is simulated again without it.")
    limits: Limits | None = Field(
        default=None, description="Set: the process has a low priority and these limits, and ends when its standard input does."
    )


Run = tuple[str, str | None, int, Outcome]
"""Policy, node that was left out, seed, and outcome."""
Progress = Callable[[int, int], None]


def requests_of(order: Order, models: Sequence[str], seed: int) -> list[Request]:
    if order.trace is not None:
        return read_trace(order.trace, models, seed, order.speed, order.zipf)
    level = None
    if order.locality is not None:
        if order.locality not in LOCALITY:
            raise InvalidRequest(f"--locality: {order.locality!r} is not one of {', '.join(LOCALITY)}")
        level = LOCALITY[order.locality]
    prompt, output, length_cv = order.prompt_tokens, order.output_tokens, order.length_cv
    if order.lengths is not None:
        if order.lengths not in DATASETS:
            raise InvalidRequest(f"--lengths: {order.lengths!r} is not one of {', '.join(DATASETS)}")
        like = DATASETS[order.lengths]
        prompt, output, length_cv = like.prompt, like.output, like.cv
    what = Synthetic(
        order.rps,
        order.duration,
        order.cv if order.cv is not None else level.cv if level is not None else 1.0,
        order.zipf,
        prompt,
        output,
        length_cv,
        order.popularity,
        level.run if level is not None else None,
        order.each,
        bursts=tuple(Burst(*b) for b in order.bursts),
    )
    return synthetic(what, models, seed)


def check_fit(path: Path, cluster: ClusterFile, models: Sequence[ModelGroup]) -> None:
    """Check that every model fits on some device.

    Raises:
        InvalidRequest: A model is larger than every device that it may be on.
    """
    for number, group in enumerate(models):
        rooms = [n.device_gb for n in cluster.nodes if not group.kinds or n.kind in group.kinds]
        where = f"{path}: models.{number}: {group.name}"
        if not rooms:
            raise InvalidRequest(
                f"{where} may only be on devices of kind {', '.join(sorted(group.kinds))}, and the cluster has none"
            )
        need = group.weights_gb + group.kv_gb
        if need > max(rooms):
            raise InvalidRequest(
                f"{where} needs {need:g} GB (weights_gb + kv_gb); the largest device that it may be on has {max(rooms):g} GB"
            )


def leave_out(cluster: ClusterFile, node: str) -> ClusterFile:
    """Return the cluster without one node, named as in the file or by its number (NAME-0).

    The later nodes of its group get the names of those before them, as do their failures.

    Raises:
        InvalidRequest: There is no such node, or no other one.
    """
    names = [name for name, _ in cluster.iter_nodes()]
    for group in cluster.nodes:
        own = [f"{group.name}-{n}" for n in range(group.count)]
        if node in own or (node == group.name and group.count == 1):
            gone = own.index(node) if node in own else 0
            renamed = {name: own[n if n < gone else n - 1] for n, name in enumerate(own)}
            events = tuple(
                e.model_copy(update={"node": renamed.get(e.node, e.node)}) for e in cluster.failures.events if e.node != own[gone]
            )
            fewer = [group.model_copy(update={"count": group.count - 1})] if group.count > 1 else []
            nodes = tuple(g for other in cluster.nodes for g in (fewer if other is group else [other]))
            if not nodes:
                raise InvalidRequest(f"{node} is the only node: nothing is left to simulate without it")
            failures = cluster.failures.model_copy(update={"events": events})
            return cluster.model_copy(update={"nodes": nodes, "failures": failures})
    raise InvalidRequest(f"There is no node {node!r} to leave out. The nodes are {', '.join(names[:8])}")


def outcomes(order: Order, progress: Progress) -> list[Run]:
    """Return the outcome for each policy, cluster and seed; all of them get the same requests."""
    cluster, models = read(order.cluster, ClusterFile), read(order.models, ModelsFile).models
    clusters: list[tuple[str | None, ClusterFile]] = [(None, cluster)]
    if order.without is not None:
        clusters.append((order.without, leave_out(cluster, order.without)))
    for _, simulated in clusters:
        check_fit(order.models, simulated, models)
    profiles = [profile_named(name) for name in order.policies]
    names = names_of(models)
    found = []
    total, done = len(profiles) * len(clusters) * order.seeds, 0
    run = _mesh if order.mesh else simulate
    for seed in range(order.seeds):
        requests = requests_of(order, names, seed)
        for profile in profiles:
            for without, simulated in clusters:
                progress(done, total)
                found.append((profile.name, without, seed, run(simulated, models, requests, profile, seed)))
                done += 1
    progress(done, total)
    return sorted(found, key=lambda f: (f[1] is not None, order.policies.index(f[0])))


def _mesh(cluster: ClusterFile, models: Sequence[ModelGroup], requests: Sequence[Request], profile: Profile, seed: int) -> Outcome:
    return Simulation(cluster, models, profile, seed=seed).run(requests)


def document(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "runs": [{"policy": name, "without": without, "seed": seed, **outcome.figures()} for name, without, seed, outcome in runs]
    }
