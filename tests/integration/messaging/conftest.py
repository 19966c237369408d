"""A mesh client for each test; the whole services of some tests run in this process."""

from tests.support.mesh_client import mesh  # noqa: F401
from tests.support.shared_heap import shared_heap  # noqa: F401
