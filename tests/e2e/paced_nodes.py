"""A mesh whose nodes fetch over paced links, which they have measured, and one more node.

The server paces each connection, and each loader has one: so the link of each node is paced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.contracts.migration import MigrationRecord
from shared.contracts.models import ModelSpec
from shared.sizing import MIB, need_of
from tests.integration.loader.tiers_server import TierServer
from tests.support.launcher import until
from tests.support.moving import Roomy, Stream
from thaw.cli.demo import card_of
from thaw.demo.models import Shape, make_demo_model

NODES = ("node-0", "node-1")


@contextmanager
def paced_server(
    directory: Path, names: tuple[str, ...], shape: Shape, piece_delay_s: float, nodes: tuple[str, ...] = NODES
) -> Iterator[TierServer]:
    """Serve models of one shape, and one for each node to measure its link with.

    Args:
        directory: For the models' files.
        names: Of the models.
        shape: Of all of them.
        piece_delay_s: Seconds for each 64 KiB of a connection.
        nodes: Of the mesh, without `beside`.
    """
    for seed, name in enumerate((*names, *map(_probe, nodes))):
        make_demo_model(directory / name, shape, seed=seed)
    server = TierServer(directory)
    server.faults.piece_delay_s = piece_delay_s
    try:
        yield server
    finally:
        server.close()


def _probe(node: str) -> str:
    """Return the name of the model that a node's link is measured with."""
    return f"probe-{node}"


@contextmanager
def paced_nodes(
    server: TierServer, defaults: Mapping[str, Any], nodes: tuple[str, ...] = NODES, /, **environment: str
) -> Iterator[Roomy]:
    """Start a mesh whose `nodes` have room for two instances of the server's model `far`.

    The node `beside` serves the same weights from its disk, as `single`.
    """
    mesh = Roomy(THAW_DRAM_BYTES="0", THAW_LOADER_REMOTE_THREADS="1", **environment)
    source = server.directory / "far"
    sizes = {name: value for name, value in defaults.items() if name != "keep_alive"}
    need = 2 * need_of(card_of(ModelSpec(name="single", source=str(source), **sizes))).total + 16 * MIB
    probes = [
        {"name": _probe(node), "source": f"{server.url}/{_probe(node)}", "placement": {"devices": [f"{node}/*"]}} for node in nodes
    ]
    config = {
        "mesh": {"port": mesh.port, "nodes": {node: {"cpu:0": need} for node in (*nodes, "beside")}},
        "defaults": dict(defaults),
        "models": [*probes, {"name": "single", "source": str(source), "placement": {"devices": ["beside/*"]}}],
    }
    (mesh.home / "thaw.yaml").write_text(json.dumps(config))
    try:
        mesh.json("up", "--detach", "--config", str(mesh.home / "thaw.yaml"))
        for node in nodes:
            mesh.json("wake", _probe(node))
            mesh.json("sleep", _probe(node))
        until(lambda: all(has_measured(mesh, node) for node in nodes), what="the loaders report their links")
        yield mesh
    finally:
        mesh.close()


def has_measured(mesh: Roomy, node: str) -> bool:
    [view] = [n for n in mesh.cluster()["nodes"] if n["node"] == node]
    links = view["loader"]["links"] if view["loader"] else []
    return any(x["link"].startswith("remote:") and x["bytes_per_second"] for x in links)


def register(
    mesh: Roomy,
    server: TierServer,
    name: str,
    ttft: float | None,
    options: Mapping[str, Any],
    devices: str = "node-*/*",
    tpot: float | None = None,
) -> None:
    """Register a remote model with objectives, or change its objectives."""
    slo = {"ttft": ttft, "tpot": tpot}
    model = {"name": name, "source": f"{server.url}/{name}", "slo": slo, "placement": {"devices": [devices]}}
    path = mesh.home / f"{name}.yaml"
    path.write_text(json.dumps({"defaults": dict(options), "models": [model]}))
    mesh.json("models", "add", "--config", str(path))


def register_for_group(
    mesh: Roomy, server: TierServer, name: str, options: Mapping[str, Any], tpot: float | None = None
) -> dict[int, float]:
    """Register the model with an objective that one node misses and two meet.

    It is nearer to what one node takes: the time that a request has waited when it is placed counts
    too, and a busy machine must not use up what the group has.

    Args:
        mesh: The mesh.
        server: Its source.
        name: The model.
        options: Its settings.
        tpot: Its objective for each further token, which needs a measured time per token.

    Returns:
        The predicted start in milliseconds by number of stages.
    """
    register(mesh, server, name, 0.001, options, tpot=tpot)
    # A loader reports the end of an instance after the memory of its device is free.
    until(lambda: is_fetched_everywhere(mesh, name), what="no loader holds weights of an earlier instance")
    by_stages = predicted_ms(mesh, name)
    assert by_stages[2] < by_stages[1]
    register(mesh, server, name, (0.2 * by_stages[2] + 0.8 * by_stages[1]) / 1e3, options, tpot=tpot)
    return by_stages


def start_in_groups(
    mesh: Roomy,
    server: TierServer,
    name: str,
    options: Mapping[str, Any],
    start: Callable[[], list[Stream]],
    *,
    stages: int = 2,
    tpot: float | None = None,
) -> list[Stream]:
    """Register the model for groups, and start streams for which the scheduler chooses them.

    Args:
        start: Starts the streams.
        stages: Of all groups that start.
    """
    register_for_group(mesh, server, name, options, tpot)
    streams = start()
    found: list[dict[str, Any]] = []

    def are_placed() -> bool:
        found[:] = instances(mesh, name)
        return count_stages(found) >= stages

    until(are_placed, what=lambda: f"{stages} stages of {name} start: {found}; {mesh.json('explain', name)['reason']}")
    return streams


def count_stages(found: list[dict[str, Any]]) -> int:
    """Return how many of these instances are stages of groups."""
    return sum(i["group"] is not None for i in found)


def candidates(mesh: Roomy, name: str) -> list[dict[str, Any]]:
    plan = mesh.json("explain", name, "--what-if", "drop-node=beside")
    return [c for c in plan["candidates"] if c["predicted_ms"]]


def is_fetched_everywhere(mesh: Roomy, name: str) -> bool:
    """Return whether every possible start of one instance reads the weights from their source."""
    return all(c["source"] == "remote" for c in candidates(mesh, name) if c["stages"] == 1)


def predicted_ms(mesh: Roomy, name: str) -> dict[int, float]:
    """Return the soonest start of the model by number of stages, as `thaw explain` predicts it."""
    possible = candidates(mesh, name)
    found = {s: min(c["predicted_ms"] for c in possible if c["stages"] == s) for s in {c["stages"] for c in possible}}
    assert {1, 2} <= set(found), possible
    return found


def stages_of(mesh: Roomy, name: str) -> dict[int, str]:
    """Return the node of each ready stage of a group, by index."""
    return {
        i["group"]["index"]: n["node"]
        for n in mesh.cluster()["nodes"]
        for i in n["instances"]
        if i["model"] == name and i["state"] == "ready" and i["group"] is not None
    }


def instances(mesh: Roomy, model: str = "far") -> list[dict[str, Any]]:
    """Return the model's instances and stages that hold memory, each with its node."""
    states = ("preparing", "loading", "ready", "draining")
    found = [(n["node"], i) for n in mesh.cluster()["nodes"] for i in n["instances"]]
    return [{**i, "node": node} for node, i in found if i["model"] == model and i["state"] in states]


def consolidations(mesh: Roomy, model: str = "far") -> list[MigrationRecord]:
    """Return the records of migrations from groups of the model to whole instances."""
    return [r for r in mesh.records().values() if r.reason == "consolidation" and r.model == model]
