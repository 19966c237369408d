"""Between `thaw doctor` or a benchmark and a loader: the audit of device memory (invariant 12)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.contracts.base import Deadline, Frozen, Message, Request


class AuditMemory(Request):
    """Audit the pages of this node's devices against records and processes."""

    deadline_ms: Deadline = 10_000
    kind: Literal["audit"] = "audit"


class DeviceAudit(Frozen):
    """A device's pages of 2 MiB. Free, mapped, reusable and lent are `total_pages` together."""

    device_id: str
    total_pages: int
    free_pages: int
    mapped_pages: int = Field(description="Of units whose instance runs or loads.")
    reusable_pages: int
    lent_pages: int
    held_back_pages: int = Field(default=0, description="Of the reusable ones: a process still maps them.")
    unclaimed_pages: int = Field(default=0, description="Of the lent ones: the borrower's process does not map them (yet).")
    units: int = 0
    instances: tuple[str, ...] = Field(default=(), description="Whose units are mapped.")
    missing_instances: tuple[str, ...] = Field(
        default=(), description="Of these: the nodeagent no longer lists them; they are released within seconds."
    )
    processes: tuple[int, ...] = Field(default=(), description="That map pages.")
    violations: tuple[str, ...] = Field(default=(), description="Of conservation; none in a correct node.")
    changed_units: int = Field(
        default=0, description="Units whose bytes loads found changed since the loader's start. They were copied again."
    )


class MemoryAudited(Message):
    kind: Literal["audited"] = "audited"
    node: str
    boot_id: str
    devices: tuple[DeviceAudit, ...] = Field(default=(), description="Devices without pages of their own are left out.")
