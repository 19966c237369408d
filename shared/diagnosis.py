"""Derive findings from the state of a mesh: the checks that need no access to its machines.

The command line and the gateway use the same functions. Texts contain no credentials, so that a
read-only key may read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.addresses import is_loopback
from shared.contracts.admin import ClusterView, ModelView, NodeView
from shared.contracts.findings import Finding
from shared.contracts.keys import KeyList
from shared.contracts.node import Capability, DeviceStatus

_MAX_TEXT = 300
_REQUIRE_KEY = "THAW_REQUIRE_KEY"
CHANGED_REMEDY = (
    "Test the host's memory, and look for a process that writes to /dev/shm. THAW_VERIFY=true checks every reused unit."
)
VIOLATION_REMEDY = "Report it with the loader's log. A restart of the loader gives the device new pages."


def examine_gateway(name: str, faults: Sequence[str]) -> Finding:
    """Describe whether a gateway accepts requests.

    Args:
        name: Its address or id.
        faults: Why it refuses requests now.
    """
    if not faults:
        return Finding("gateway", "ok", f"{name} is ready")
    return Finding(
        "gateway",
        "fail",
        f"{name} is not ready: {'; '.join(faults)}",
        "Look at its log: thaw logs gateway.",
        "It refuses requests until this is over.",
    )


def report_no_scheduler(text: str) -> Finding:
    """Describe a scheduler that did not answer, and why."""
    return Finding(
        "scheduler",
        "fail",
        text,
        "Start a scheduler, and check that it reaches NATS and PostgreSQL: thaw logs scheduler.",
        "Models that are ready still answer. No model is started, stopped or moved.",
    )


def examine_cluster(cluster: ClusterView) -> Iterator[Finding]:
    """Examine the scheduler's view: nodes, their devices, and models."""
    yield Finding("scheduler", "ok", f"{cluster.scheduler} leads, epoch {cluster.epoch}")
    if not cluster.nodes:
        yield Finding(
            "nodes",
            "fail",
            "none has reported",
            "Start a nodeagent and a loader; their logs name what is missing.",
            "No model can be started.",
        )
    for node in cluster.nodes:
        yield from _examine_node(node)
    faults = [fault for model in cluster.models for fault in _examine_model(model)]
    yield from faults
    if not any(f.level == "fail" for f in faults):
        yield Finding("models", "ok", f"{len(cluster.models)} registered, and none has failed to start")


def _examine_node(node: NodeView) -> Iterator[Finding]:
    if not node.alive:
        yield Finding(
            "node",
            "fail",
            f"{node.node} does not answer",
            "Look at its nodeagent's log on that machine, and at its connection to NATS. "
            f"If the machine is gone for good: thaw node rm {node.node}",
            "Its instances are taken for lost. The scheduler starts their models on other nodes.",
        )
        return
    if not node.loader_alive:
        yield Finding(
            "node",
            "fail",
            f"{node.node} has no loader that answers",
            "Look at its loader's log on that machine.",
            "Instances that are ready still answer. No model can be loaded on this node.",
        )
        return
    if not node.devices:
        yield Finding("node", "warn", f"{node.node}: no devices", "Set THAW_DEVICES of its nodeagent.", "It can run no model.")
    elif node.cordoned:
        yield Finding(
            "node",
            "warn",
            f"{node.node} is cordoned",
            f"When its maintenance is over: thaw node uncordon {node.node}",
            "The scheduler starts no instance on it.",
        )
    else:
        yield Finding("node", "ok", f"{node.node}: {', '.join(d.device_id for d in node.devices)}")
    for capability in node.capabilities:
        yield from _examine_capability(node.node, capability, node.devices)
    yield from _examine_memory(node)


def _examine_capability(node: str, capability: Capability, devices: Sequence[DeviceStatus]) -> Iterator[Finding]:
    """Report that engines on a device of the node cannot be suspended."""
    kind = capability.name.removeprefix("suspend:")
    if capability.available or kind not in {d.kind for d in devices}:
        return
    remedy = "docs/suspend.md lists what it needs; thaw doctor on that machine checks each."
    meaning = "An idle model that gives up its memory is stopped, so that its next request waits for a whole start."
    yield Finding("suspend", "warn", f"{node} suspends no engine on {kind}: {capability.reason}", remedy, meaning)


def changed_finding(units: int) -> str:
    """Return the finding of units with changed bytes on a device."""
    return f"loads found {units} units with changed bytes since the loader's start, and copied them again"


def _examine_memory(node: NodeView) -> Iterator[Finding]:
    """Report what the latest audit in the background found (invariant 12)."""
    for device in node.loader.memory if node.loader is not None else ():
        name = f"{node.node} {device.device_id}"
        for violation in device.violations:
            meaning = "The accounts of this device's memory contradict each other."
            yield Finding("device memory", "fail", f"{name}: {violation}", VIOLATION_REMEDY, meaning)
        if device.changed_units:
            found, meaning = changed_finding(device.changed_units), "The bytes of weights changed in this device's memory."
            yield Finding("device memory", "warn", f"{name}: {found}", CHANGED_REMEDY, meaning)
        if not device.violations:
            yield Finding("device memory", "ok", f"{name}: all pages are accounted for")


def _examine_model(model: ModelView) -> Iterator[Finding]:
    name, objective = model.card.name, model.objective
    if model.error is not None:
        yield Finding(
            "model",
            "fail",
            f"{name} did not start: {_first_line(model.error)}",
            f"See what was considered: thaw explain {name}. Then wake it again: thaw wake {name}",
            "Its requests fail until an attempt succeeds.",
        )
    if objective is not None and objective.required > 0:
        wanted = f"{100 * objective.percentile:g} % shall"
        yield Finding(
            "model",
            "warn",
            f"{name} misses its objective: {objective.met} of {objective.total} requests of the last day met it, {wanted}",
            f"See where the time goes: thaw trace. Pin the model, give it replicas, or relax its slo: thaw models show {name}",
            f"At least {objective.required:.0f} requests in a row must meet it until the model complies.",
        )
    if model.park is not None and model.park.state in ("impossible", "failed"):
        yield Finding(
            "model",
            "warn",
            f"{name} is not parked: {_first_line(model.park.reason)}",
            "docs/suspend.md lists what suspending needs.",
            "Its first request waits for a whole start.",
        )


def _first_line(text: str) -> str:
    """Return the first line: the others of an engine's error are the end of its log."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}…"


def examine_access(host: str, keys: KeyList) -> Finding:
    """Report whether other machines can use an endpoint at `host` with these keys."""
    subject = "keys"
    exists = bool(keys.configured) or any(key.scope == "inference" for key in keys.keys)
    if is_loopback(host):
        text = "a key is needed" if exists or keys.required else "no key is needed, and only this machine reaches the endpoint"
        return Finding(subject, "ok", text)
    if exists:
        return Finding(subject, "ok", f"the endpoint listens at {host} and needs a key")
    if keys.required:
        return Finding(
            subject,
            "warn",
            f"the endpoint listens at {host} without any key: every request is refused",
            "Make a key with `thaw keys add NAME`.",
        )
    return Finding(
        subject,
        "warn",
        f"THE ENDPOINT IS OPEN: it listens at {host} without any key, and {_REQUIRE_KEY}=false lets every machine that reaches it infer",
        f"Make a key with `thaw keys add NAME` and take {_REQUIRE_KEY}=false away, or start it with --host 127.0.0.1.",
    )


def examine_admin_access(*, guarded: bool) -> Finding:
    """Report whether the admin API needs a key."""
    if guarded:
        return Finding("admin key", "ok", "the admin API needs a key")
    return Finding(
        "admin key",
        "warn",
        "the admin API needs no key",
        "Start the gateway with THAW_ADMIN_KEY.",
        "Any program on the gateway's machine administers the mesh.",
    )
