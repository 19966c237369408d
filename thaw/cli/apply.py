"""Wait until a mesh is ready, and apply the models of a thaw.yaml.

Only the difference to the present models is applied.
"""

from __future__ import annotations

import json
import os
import time
from urllib.parse import quote

from rich.console import Console

from shared.contracts.admin import ModelsAdded
from shared.contracts.keys import KeyList, NewKey
from shared.contracts.models import ModelSpec
from shared.policies import DEFAULT_POLICY
from thaw.cli.api import Api
from thaw.cli.models import changes_of, show_difference
from thaw.cli.output import Document
from thaw.config.load import NodeConfig
from thaw.errors import CommandError
from thaw.launcher.control import check_crashes
from thaw.launcher.home import Home, read_json, write_private
from thaw.launcher.plan import MeshPlan, read_plan
from thaw.launcher.planning import Wanted
from thaw.launcher.status import read_status

_READY_BOUND_S = 300.0
_POLL_S = 0.1
_RECORD = "declared.json"
"""File of the state directory with the names that the last file declared.

A name stays in it until its model or key is removed, also if the command fails before that.
"""


def await_ready(api: Api, home: Home, out: Console, plan: MeshPlan | None = None) -> None:
    """Wait until the gateway, and every node of the plan with its loader, is ready.

    Raises:
        CommandError: The mesh is not ready after 300 s, or a service keeps crashing (at once).
    """
    names = {n.name for n in (plan or read_plan(home)).nodes}
    deadline = time.monotonic() + _READY_BOUND_S
    missing = "the gateway"
    while time.monotonic() < deadline:
        if (status := read_status(home)) is not None:
            check_crashes(home, status)
        if api.is_ready():
            missing = _describe_missing(api, names)
            if not missing:
                return
        time.sleep(_POLL_S)
    raise CommandError(
        f"The mesh is not ready after {_READY_BOUND_S:.0f} s: {missing} is missing.",
        f"Look at the logs in {home.logs}, or run `thaw doctor`.",
        code="not_ready",
    )


def _describe_missing(api: Api, names: set[str]) -> str:
    try:
        cluster = api.cluster()
    except CommandError:
        return "the scheduler"
    seen = {n.node for n in cluster.nodes if n.alive and n.loader_alive and n.devices}
    return ", ".join(sorted(names - seen))


def apply_models(api: Api, home: Home, specs: tuple[ModelSpec, ...], out: Console, *, declared: bool = True) -> Document:
    """Register `specs`, and remove models that the file no longer declares.

    Models are removed only if `specs` are a file's, and an earlier version of that file declared
    them. Models registered by hand are unchanged.
    """
    before = _read_record(home, "models") if declared else set()
    if not specs and not before:
        return ModelsAdded().model_dump(mode="json", exclude={"v", "kind"})
    now = {s.name for s in specs}
    registered = {v.card.name: v.card.spec for v in api.cluster().models}
    changes = changes_of(registered, specs)
    # If the reply is lost, only new models are the file's: others may be unchanged.
    left, removed = before | (now - registered.keys()), []
    with out.status("registering models"):
        try:
            result = api.add_models(specs, replace=True) if specs else ModelsAdded()
            left |= now
            for name in _adapters_first(api, before - now):
                try:
                    api.remove_model(name)
                except CommandError as e:
                    if e.code != "model_not_found":
                        raise
                else:
                    removed.append(name)
                left.discard(name)
        finally:
            if declared:
                _write_record(home, "models", left)
    result = result.model_copy(update={"removed": (*result.removed, *removed)})
    show_difference(out, result, changes)
    return result.model_dump(mode="json", exclude={"v", "kind"})


def apply_keys(api: Api, home: Home, keys: tuple[NewKey, ...], out: Console) -> None:
    """Make the keys of a file exist as described, and revoke those that it no longer declares.

    Keys that were added by hand are unchanged.
    """
    before = _read_record(home, "keys")
    if not keys and not before:
        return
    # If the reply is lost, only new keys are the file's: others may have been added by hand.
    present = {key.name for key in KeyList.model_validate(api.request("GET", "/admin/v1/keys")).keys} if keys else set()
    left = set(before)
    try:
        for key in keys:
            if key.name not in present:
                left.add(key.name)
            api.request("PUT", f"/admin/v1/keys/{quote(key.name, safe='')}", key.model_dump_json())
            left.add(key.name)
        for name in sorted(before - {key.name for key in keys}):
            try:
                api.request("DELETE", f"/admin/v1/keys/{quote(name, safe='')}")
            except CommandError as e:
                if e.code != "not_found":
                    raise
            left.discard(name)
    finally:
        _write_record(home, "keys", left)
    if keys:
        out.print(f"[green]✓[/] API keys of the file: {len(keys)}")


def _read_record(home: Home, kind: str) -> set[str]:
    """Return the names that files have declared and that were not removed since."""
    return set((read_json(home.root / _RECORD) or {}).get(kind, []))


def _write_record(home: Home, kind: str, names: set[str]) -> None:
    path = home.root / _RECORD
    write_private(path, json.dumps((read_json(path) or {}) | {kind: sorted(names)}))


def _adapters_first(api: Api, names: set[str]) -> list[str]:
    """A model is not removed from under its adapters."""
    adapters = {v.card.name for v in api.cluster().models if v.card.spec.base is not None} if names else set()
    return sorted(names, key=lambda n: (n not in adapters, n))


def differences(home: Home, wanted: Wanted) -> list[str]:
    """Return the settings that differ from the running mesh, by their thaw.yaml keys.

    They need a restart. Settings that neither options nor the file set do not differ.
    """
    try:
        plan = read_plan(home)
    except (CommandError, ValueError):
        return []
    found = []
    if wanted.host is not None or wanted.mesh.host is not None:
        found += ["mesh.host"] if wanted.host_or_default != plan.host else []
    if wanted.port is not None or wanted.mesh.port is not None:
        found += ["mesh.port"] if wanted.port_or_default != plan.port else []
    if wanted.nodes is not None or wanted.mesh.nodes:
        running = {n.name: n for n in plan.nodes}
        asked = {name: wanted.mesh.nodes.get(name, NodeConfig()) for name in wanted.node_names}
        same = asked.keys() == running.keys() and all(
            (not node.devices or node.devices == running[name].devices) and node.dram in (None, running[name].dram)
            for name, node in asked.items()
        )
        found += [] if same else ["mesh.nodes"]
    for key, asked_for, runs in (
        ("admin_key", wanted.mesh.admin_key, plan.credentials.admin_key),
        ("api_keys", set(wanted.api_key_hashes), set(plan.api_keys)),
        ("environment", _without_sections(wanted.mesh.environment), _without_sections(plan.environment)),
        ("nats_port", wanted.mesh.nats_port, plan.nats_port),
        ("postgres_port", wanted.mesh.postgres_port, plan.postgres_port),
    ):
        if key in wanted.mesh.model_fields_set and asked_for is not None and asked_for != runs:
            found.append(f"mesh.{key}")
    if wanted.scheduler.policy is not None:
        running_policy = plan.environment.get("THAW_POLICY") or os.environ.get("THAW_POLICY") or DEFAULT_POLICY
        found += ["scheduler.policy"] if wanted.environment.get("THAW_POLICY", running_policy) != running_policy else []
    if wanted.prices is not None:
        running_prices = plan.environment.get("THAW_PRICES") or os.environ.get("THAW_PRICES")
        found += ["prices"] if wanted.environment.get("THAW_PRICES", running_prices) != running_prices else []
    return found


def _without_sections(environment: dict[str, str]) -> dict[str, str]:
    """Leave out variables that sections of a thaw.yaml set."""
    return {name: value for name, value in environment.items() if name not in ("THAW_POLICY", "THAW_PRICES")}
