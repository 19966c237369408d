"""The request of one placement decision."""

from __future__ import annotations

from services.scheduler.domain.demand.key_shares import Standing
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.placement.constraints import Excludes, combine_rules
from services.scheduler.domain.policies.port import Ask, Profile
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.values import value


@value(frozen=True, slots=True)
class PlacementRequest:
    """A model that needs one more instance, and what limits where it may go.

    Attributes:
        model: The model.
        ask: The policy's view of it.
        may_preempt: Serving instances may be drained for it.
        profile: The policy that chooses.
        need_bytes: Bytes on each of its `devices`.
        devices: Number of devices of one node.
        avoid: Devices (node/device) where the model has just failed.
        forecast: Its predicted start times.
        has_cooldowns: Some instance or device is cooling down.
        excludes: Placement rules; None: no rule applies.
        standing: Of its waiting requests among the keys; None: no instance gives way for its share,
            and no share keeps one from it.
        link: Nodes whose links have no room for its fetch (link_rule.py); None: no node.
        is_last_resort: There is no other option: no share keeps an instance from it, unless its
            keys have others on the device that leave for it in turn.
        burst_stages: It is to be one more pipeline group, of so many stages; 0: not so.
    """

    model: Model
    ask: Ask
    may_preempt: bool
    profile: Profile
    need_bytes: int
    devices: int
    avoid: tuple[str, ...]
    forecast: Forecast
    has_cooldowns: bool
    excludes: Excludes | None
    standing: Standing | None = None
    link: Excludes | None = None
    is_last_resort: bool = False
    burst_stages: int = 0

    @property
    def refuses(self) -> Excludes | None:
        """Return the check for a start that brings the weights: placement rules and links."""
        return combine_rules(self.excludes, self.link)
