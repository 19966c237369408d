"""Sizes of bodies that exceed a NATS message, in tests of a gateway.

By default the test's NATS server takes messages of 2 MB, and bodies are a quarter of those that
`make test-long` sends (`THAW_TEST_FULL_BODIES=1`) over a server with Thaw's own limit of 8 MB.
"""

from __future__ import annotations

import os

_ARE_FULL = "THAW_TEST_FULL_BODIES" in os.environ
SMALL_PAYLOAD = "8MB" if _ARE_FULL else "2MB"
"""Largest message of NATS; a test module sets its `MAX_PAYLOAD` to this."""
MIB = (1 << 20) if _ARE_FULL else (1 << 18)
"""A mebibyte of a body of the full size."""
