"""Whether engines here map weights that the loader has on a GPU, or copy them into memory of their own (ADR 0027)."""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.node import WEIGHTS_ON_GPU, Capability

LEAST_DRIVER = 610
"""Earlier ones cannot checkpoint a process that uses IPC memory, and may leave it in no good state."""


def weights_on_gpu(kinds: Iterable[str], found: Iterable[Capability]) -> tuple[Capability, ...]:
    """The capability, told where there is a GPU. `found`: what suspending this node can do.

    An engine that CUDA may checkpoint has its weights to itself: drivers before `LEAST_DRIVER` fail at it, later ones have yet to be proved,
    and memory of the loader's would stay in use while the engine is suspended.
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
