"""A mesh client for each test, on real NATS."""

from __future__ import annotations

from tests.support.mesh_client import mesh

__all__ = ["mesh"]
