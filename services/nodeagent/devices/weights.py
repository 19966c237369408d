"""Decide whether engines map the loader's weights on a GPU or copy them (ADR 0027)."""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.node import WEIGHTS_ON_GPU, Capability

LEAST_DRIVER = 610
"""Earlier drivers cannot checkpoint a process that uses IPC memory, and may leave it broken."""


def weights_on_gpu(kinds: Iterable[str], found: Iterable[Capability]) -> tuple[Capability, ...]:
    """The capability to share weights on GPUs; empty if the node has no GPU.

    An engine that CUDA may checkpoint has its own copy: drivers before `LEAST_DRIVER` fail with
    shared memory, later ones are unproven, and the loader's memory would stay in use while the
    engine is suspended.

    Args:
        kinds: Kinds of the node's devices.
        found: The node's capabilities to suspend engines.
    """
    if "cuda" not in kinds:
        return ()
    if any(c.name == "suspend:cuda" and c.available for c in found):
        why = (
            "engines here can be suspended by CUDA checkpoint, which takes along only memory of their own (and fails with the loader's before "
            f"driver {LEAST_DRIVER}); THAW_SUSPEND=off or sleep shares weights instead"
        )
        return (Capability(name=WEIGHTS_ON_GPU, available=False, reason=why),)
    return (Capability(name=WEIGHTS_ON_GPU, available=True),)
