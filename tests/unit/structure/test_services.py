"""Every service has the same skeleton: the same file names for the same parts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVICES = tuple(sorted(p.name for p in (ROOT / "services").iterdir() if (p / "__init__.py").is_file()))

EVERY = {"__main__", "app", "settings"}
"""Parts of every service: the process, its wiring, its settings."""

DECIDING = {"adapters", "domain", "loop"}
"""Further parts of a service that owns state: a loop, pure decisions, and what does I/O."""

SKELETON = EVERY | DECIDING | {"effects", "handlers"}

DECISIONS = {
    "gateway": "dispatcher",
    "loader": "decide",
    "migrator": "decide",
    "nodeagent": "decide",
    "scheduler": "decide",
}
"""The module of `domain/` that receives every event; the gateway's owns queues and routes."""

OWN = {
    "engine": {
        "domain",
        "generation",
        "grammar",
        "kv_transfer",
        "later_stage",
        "loader_watch",
        "loader_client",
        "lora",
        "model",
        "process",
        "remote_code",
        "server",
        "stages",
        "tokenization",
        "executor",
        "zygote",
    },
    "enginehost": {"drivers", "engine", "http1", "later_rank", "lora", "ranks", "runtimes", "server"},
    "gateway": {"authorization", "http", "idempotency", "readiness", "requests", "telemetry"},
    "loader": {"auditing", "expectations", "kv_lending", "local_socket", "prefetching", "status_publisher"},
    "migrator": set[str](),
    "nodeagent": {"devices", "engines", "settings_syntax", "suspend"},
    "scheduler": {"explain", "metrics", "migrations", "profiles", "views"},
}
"""Parts that only one service has. A new one is added here, or finds a place in the skeleton."""


def parts(service: str) -> set[str]:
    folder = ROOT / "services" / service
    modules = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    return modules | {p.parent.name for p in folder.glob("*/__init__.py")}


def test_the_lists_name_the_services() -> None:
    assert set(SERVICES) == OWN.keys()
    assert set(SERVICES) >= DECISIONS.keys()


@pytest.mark.parametrize("service", SERVICES)
def test_service_has_every_part_of_the_skeleton(service: str) -> None:
    assert parts(service) >= EVERY
    assert (ROOT / "services" / service / "README.md").is_file()


@pytest.mark.parametrize("service", DECISIONS)
def test_stateful_service_has_a_loop_and_pure_decisions(service: str) -> None:
    assert parts(service) >= DECIDING
    assert (ROOT / "services" / service / "domain" / f"{DECISIONS[service]}.py").is_file()


@pytest.mark.parametrize("service", SERVICES)
def test_service_has_no_parts_outside_the_skeleton(service: str) -> None:
    assert parts(service) - SKELETON - OWN[service] == set()
    assert OWN[service] <= parts(service)


@pytest.mark.parametrize("service", SERVICES)
def test_layer_contract_of_a_service_lists_all_its_parts(service: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    prefix = f"services.{service}."
    layers = [
        {module.removeprefix(prefix) for layer in c["layers"] for module in layer.split(" | ")}
        for c in contracts
        if c["type"] == "layers" and f"{prefix}app" in c["layers"]
    ]
    assert layers == [parts(service)]
