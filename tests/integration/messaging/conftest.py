"""The whole services of some tests run in this process."""

from tests.support.shared_heap import shared_heap  # noqa: F401
