"""Measurements that outlast the leader: Postgres stores them for the next one."""

from __future__ import annotations

from dataclasses import field

from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.values import value
from shared.contracts.base import Frozen


class MemoryProfile(Frozen):
    """Measured bytes: in all, of weights, per token of KV cache, and of the engine's runtime.

    Attributes:
        first_bytes: The first measurement; 0: that is `need_bytes`.
    """

    need_bytes: int
    load_bytes: int = 0
    kv_bytes_per_token: int = 0
    runtime_bytes: int = 0
    first_bytes: int = 0


@value(frozen=True, slots=True)
class MeasuredMemory:
    """The measured memory of a model's engine on all its devices together, by kind of device."""

    model: str
    generation: int
    engine: str
    by_kind: dict[str, MemoryProfile]

    @property
    def key(self) -> str:
        return self.model


ANYWHERE = ""
"""The node of quantities that are measured on all nodes together."""


@value(frozen=True, slots=True)
class Estimate:
    """Learned quantities of the starts of a model on a node.

    Attributes:
        model: Empty for quantities of the node, whatever the model.
        node: `ANYWHERE` for all nodes.
        parameters: By quantity: milliseconds of a phase, or bytes per second ("bandwidth:ssd").
    """

    model: str
    node: str
    parameters: dict[str, Parameter] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return estimate_key(self.model, self.node)


def estimate_key(model: str, node: str) -> str:
    return f"{model}\0{node}"


@value(frozen=True, slots=True)
class HourCounts:
    """Requests of one hour (Unix time / 3600), and how many of them met the objective."""

    hour: int
    total: int
    met: int


@value(frozen=True, slots=True)
class AppliedReport:
    """The last report of a gateway that was counted."""

    gateway: str
    number: int
    at: float


@value(frozen=True, slots=True)
class SloCounts:
    """Requests of a model with an objective, by hour, oldest first."""

    model: str
    hours: tuple[HourCounts, ...] = ()
    applied: tuple[AppliedReport, ...] = ()

    @property
    def key(self) -> str:
        return self.model
