"""A mesh client for each test, on real NATS."""

from __future__ import annotations

from tests.support.patient_mesh import mesh

__all__ = ["mesh"]
