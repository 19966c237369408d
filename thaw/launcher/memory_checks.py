"""Audit the device memory of this machine's nodes, for `thaw doctor` (invariant 12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shared.contracts.audit import AuditMemory, DeviceAudit
from shared.contracts.findings import Finding
from shared.contracts.loader_socket import loader_socket
from shared.diagnosis import CHANGED_REMEDY, VIOLATION_REMEDY, changed_finding
from shared.errors import ThawError
from thaw.launcher.home import Home
from thaw.units import format_size
from weights.client import audit_memory

_SUBJECT = "device memory"
_PAGE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class NodeAudit:
    """The answer of a node's loader.

    Attributes:
        error: Why there is no answer.
    """

    node: str
    devices: tuple[DeviceAudit, ...] = ()
    error: str | None = None


def audit_nodes(home: Home) -> list[NodeAudit]:
    """Ask the loader of each node under `home` for an audit."""
    return [_audit(home, node.name) for node in sorted(home.nodes.iterdir())] if home.nodes.is_dir() else []


def _audit(home: Home, node: str) -> NodeAudit:
    path = loader_socket(home.nodes / node)
    try:
        return NodeAudit(node, audit_memory(path, AuditMemory.usual_ms() / 1e3))
    except ThawError as e:
        return NodeAudit(node, error=e.message)


def findings_of(audits: Iterable[NodeAudit]) -> Iterator[Finding]:
    """Describe the audits of nodes; nodes without separate devices yield nothing."""
    for audit in audits:
        if audit.error is not None:
            yield Finding(_SUBJECT, "warn", f"{audit.node} has not audited its devices: {audit.error}", "Look at its loader's log.")
        for device in audit.devices:
            yield from _of_device(audit.node, device)


def _of_device(node: str, device: DeviceAudit) -> Iterator[Finding]:
    name = f"{node} {device.device_id}"
    for violation in device.violations:
        yield Finding(_SUBJECT, "fail", f"{name}: {violation}", VIOLATION_REMEDY)
    if device.changed_units:
        yield Finding(_SUBJECT, "warn", f"{name}: {changed_finding(device.changed_units)}", CHANGED_REMEDY)
    if device.violations:
        return
    parts = {
        "free": device.free_pages,
        "mapped": device.mapped_pages,
        "reusable": device.reusable_pages,
        "lent": device.lent_pages,
    }
    sums = " + ".join(f"{format_size(pages * _PAGE_BYTES)} {word}" for word, pages in parts.items())
    text = f"{name}: {sums} = {format_size(device.total_pages * _PAGE_BYTES)}; {len(device.instances)} instances"
    notes = []
    if device.held_back_pages:
        notes.append(f"processes still map {format_size(device.held_back_pages * _PAGE_BYTES)} of the reusable")
    if device.missing_instances:
        notes.append(f"{', '.join(device.missing_instances)} have ended and are released within seconds")
    yield Finding(_SUBJECT, "ok", "; ".join([text, *notes]))
