"""Full workers of pipeline groups (HydraServe, Algorithm 1): memory for the whole model.

A low-memory worker has memory for its stage only. A full worker is also promised the memory of the
whole instance that replaces the group on its device. No other instance gets it meanwhile.
"""

from __future__ import annotations

from services.scheduler.domain.state.booking import device_key
from services.scheduler.domain.values import value


@value(frozen=True, slots=True)
class FullWorker:
    """Memory of a device that is promised to the instance that replaces a group there.

    Attributes:
        group: The first stage of the group.
        reserve_bytes: Bytes for the whole instance, in addition to the memory of the stage on the
            device.
        used_by: The instance that has this memory now; None: no instance has it, and it counts as
            claimed.
    """

    group: str
    model: str
    node: str
    device_id: str
    reserve_bytes: int
    used_by: str | None = None

    @property
    def key(self) -> str:
        return f"{self.group}\0{self.device}"

    @property
    def device(self) -> str:
        """The device as node/device."""
        return device_key(self.node, self.device_id)
