"""Every verb's help, and its JSON document with stable keys for scripts."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shared.contracts.plans import PlanRecord
from tests.e2e.batches import lines
from tests.support.launcher import Thaw
from thaw.cli.app import COMMANDS, main

SHARED = True
"""The last module with the shared mesh: its `down` ends it."""
CLUSTER = {
    "cluster.yaml": "{nodes: [{devices: 1, device_gb: 20, dram_gb: 10, ssd_gb: 50, links: {remote: 1, ssd: 5, device: 20}}]}"
}
MODELS = {"models.yaml": "models: [{name: a, weights_gb: 10, service: {kind: fixed, seconds: 1}, slo_ttft: 5}]"}
LLAMA_SWAP = {"llama-swap.yaml": "models:\n  one:\n    cmd: llama-server --model /m/one.gguf --port ${PORT}\n"}
REQUESTS = {"requests.jsonl": lines(2).decode()}
FILES = CLUSTER | MODELS | LLAMA_SWAP | REQUESTS
BATCH = {"id", "status", "endpoint", "model", "request_counts", "output_file_id", "error_file_id", "errors", "created_at"}

Case = tuple[tuple[str, ...], set[str]]
CASES: dict[str, Case] = {
    "up": (("--detach",), {"endpoint", "console", "already_running", "restart_needed", "models"}),
    "init": (("{home}/init.yaml", "--yes"), {"output", "devices", "models", "yaml"}),
    "service show": ((), {"unit"}),
    "service install": ((), {"path", "unit", "commands"}),
    "service remove": ((), {"path", "removed", "stopped", "disabled"}),
    "models add": (("four", "{home}/models/one"), {"added", "changed", "unchanged", "removed"}),
    "models list": ((), {"models"}),
    "models show": (("four",), {"card", "waiting", "last_plan", "error", "park", "needs"}),
    "pull": (("four", "--to", "dram"), {"model", "node", "tier", "tiers", "bytes", "seconds", "was_there"}),
    "models rm": (("four",), {"removed"}),
    "wake": (("one",), {"model", "instance_id", "plan_id", "took_ms"}),
    "chat": (
        ("one", "Hello", "--max-tokens", "2"),
        {"model", "request_id", "text", "finish_reason", "ttft_ms", "duration_ms", "usage"},
    ),
    "batches run": (("{home}/requests.jsonl", "--output", "{home}/results.jsonl"), BATCH | {"ok", "written"}),
    "batches list": ((), {"batches", "has_more"}),
    "batches show": (("{batch}",), BATCH),
    "batches cancel": (("{batch}",), BATCH),
    "ps": ((), {"v", "kind", "scheduler", "epoch", "models", "nodes", "instances", "migrations"}),
    "trace": ((), {"request", "load", "migrations"}),
    "explain": (("one",), {*PlanRecord.model_fields, "took_error_ms", "queue", "request", "running", "assumed", "others"}),
    "migrate": (("nobody",), {"error"}),
    "sleep": (("one",), {"model", "instances", "freed_bytes"}),
    "keys add": (("someone",), {"name", "scope", "created", "key"}),
    "keys list": ((), {"keys", "configured", "required"}),
    "keys change": (("someone", "--rpm", "60"), {"name", "scope", "created", "requests_per_minute"}),
    "keys rotate": (("someone", "--overlap", "0"), {"name", "scope", "created", "key"}),
    "keys log": ((), {"entries"}),
    "usage": ((), {"rows", "complete"}),
    "keys revoke": (("someone",), {"name", "scope", "created"}),
    "node list": ((), {"nodes"}),
    "node cordon": (("node-0",), {"node", "action"}),
    "node drain": (("node-0",), {"ok", "node", "action", "left", "moved", "stuck", "migrations"}),
    "node uncordon": (("node-0",), {"node", "action"}),
    "node rm": (("node-0",), {"error"}),
    "logs": (("gateway",), {"logs"}),
    "doctor": ((), {"ok", "findings", "fixed"}),
    "load": (
        ("{home}/models/one",),
        {"path", "tier", "files", "bytes", "seconds", "gb_per_s", "cpu_seconds", "threads", "stages", "steps", "verified_bytes"}
        | {f"{where}_bytes" for where in ("direct", "cached", "buffered", "remote")},
    ),
    "convert": (
        ("{home}/models/one", "{home}/converted"),
        {"source", "destination", "tensors", "tied", "bytes", "source_bytes", "companions", "ranks", "seconds", "verified"}
        | {"gb_per_s", "cpu_seconds", "peak_bytes"},
    ),
    "simulate": (
        ("--cluster", "{home}/cluster.yaml", "--models", "{home}/models.yaml", "--duration", "10"),
        {"runs", "plots"},
    ),
    "demo traffic": (
        ("--models", "1", "--seconds", "1", "--rate", "2", "--seed", "5", "--remove"),
        {"requests", "failed", "errors", "tokens", "models"},
    ),
    "import llama-swap": (
        ("{home}/llama-swap.yaml",),
        {"output", "yaml", "models", "without_counterpart", "required", "faults"},
    ),
    "docs settings": ((), {"markdown"}),
    "down": ((), {"was_running", "left_behind"}),
}


def _verbs(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return the leaf commands; typer's own click gives them no public type."""
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in children.items():
        yield from _verbs(child, f"{path} {name}")


VERBS = {path: verb for entry in COMMANDS for path, verb in _verbs(entry.load(), entry.name)}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    command = VERBS[verb]
    assert "Example" in (command.help or ""), "the help shows no example"
    assert {"--json"} <= {option for p in command.params for option in p.opts}
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or parameter.help, f"{parameter.opts} has no help"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main([*verb.split(), "--help"]) == 0
    assert "Usage" in output.getvalue()


def test_every_verb_prints_one_json_document_with_its_keys(mesh: Thaw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(mesh.home / "config"))
    assert CASES.keys() == VERBS.keys()
    for name, text in FILES.items():
        (mesh.home / name).write_text(text)
    found: dict[str, Any] = {}
    for verb, (arguments, _) in CASES.items():
        batch = found.get("batches run", {}).get("id")
        words = [*verb.split(), *(a.format(home=mesh.home, batch=batch) for a in arguments)]
        if verb in ("up", "down", "demo traffic"):
            found[verb] = mesh.json(*words)
            continue
        status, out = mesh.inside(*words, "--json", *(["-"] if verb == "simulate" else []))
        document = json.loads(out)
        assert (status != 0) is ("error" in document and verb in ("migrate", "node rm")), f"thaw {' '.join(words)}: {out}"
        found[verb] = document
    # A new key breaks no script; a removed one does.
    gone = {verb: keys - found[verb].keys() for verb, (_, keys) in CASES.items()}
    assert {verb: keys for verb, keys in gone.items() if keys} == {}


def test_every_error_is_one_json_document(mesh: Thaw) -> None:
    """Every error is one JSON document.

    The mesh is down: verbs that need one report that, and every verb reports invalid arguments.
    """
    for verb in VERBS:
        status, out = mesh.inside(*verb.split(), "--no-such-option", "--json", *(["-"] if verb == "simulate" else []))
        assert (status, json.loads(out)["error"]["code"]) == (2, "usage"), verb
    error = mesh.error("ps")
    assert set(error) == {"code", "message", "remedy"}
    assert error["code"] == "not_running"


@pytest.mark.parametrize(
    ("url", "code"), [("localhost:8080", "bad_setting"), ("http://[::1", "bad_setting"), ("http://127.0.0.1:1", "no_gateway")]
)
def test_an_unreachable_address_is_named(mesh: Thaw, monkeypatch: pytest.MonkeyPatch, url: str, code: str) -> None:
    monkeypatch.setitem(mesh.environment, "THAW_URL", url)
    assert mesh.error("ps")["code"] == code
