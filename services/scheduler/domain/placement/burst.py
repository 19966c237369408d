"""Place one more pipeline group for a burst of requests to a cold model (HydraServe §6.1).

1. A group only: one worker would be ready later than the groups that start, and whole instances
   replace these anyway.
2. On nodes that have no stage of the model: each group has links of its own.
3. As an extra replica: it displaces no model that requests wait for.
"""

from __future__ import annotations

from services.scheduler.domain.placement.place import Placement, place
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.transaction import Transaction


def place_group_beside(tx: Transaction, model: Model, waited: float) -> Placement:
    """Return the place of one more group of the model, or none and why.

    It has as many stages as those that start.
    """
    live = tx.state.live_instances(model)
    taken = {device.partition("/")[0] for i in live for device in tx.state.devices_of(i)}

    def excludes(b: Booking) -> str:  # 2
        return "a stage of the model is on the node" if b.node in taken else ""

    return place(tx, model, waited, extra=True, burst_stages=max(i.stages for i in live), rule=excludes)  # 1, 3
