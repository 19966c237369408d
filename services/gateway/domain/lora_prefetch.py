"""Adapters that requests wait for while an instance of their base starts: which instances are to be told of which, once each.

An engine can be told from `loading` on: its first report has come over the same connection that it listens on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, NodeStatus

Told = tuple[str, ModelCard]
"""An instance, and an adapter that it is to be told of."""


@dataclass
class _Loading:
    model: str
    told: set[str] = field(default_factory=set)


@dataclass
class EarlyAdapters:
    _wanted: dict[str, dict[str, ModelCard]] = field(default_factory=dict)
    _loading: dict[str, dict[str, _Loading]] = field(default_factory=dict)

    def want(self, model: str, adapter: ModelCard) -> list[Told]:
        """A request for `adapter` waits for an instance of its base."""
        self._wanted.setdefault(model, {})[adapter.info.revision] = adapter
        return [told for instances in self._loading.values() for told in self._due(instances)]

    def heard(self, status: NodeStatus, waiting: Callable[[str], int]) -> list[Told]:
        """What a node says of its instances. `waiting`: requests that wait for a model now."""
        for model in [m for m in self._wanted if not waiting(m)]:
            del self._wanted[model]
        before = self._loading.get(status.node, {})
        after = {
            i.instance_id: before.get(i.instance_id) or _Loading(i.model)
            for i in status.instances
            if i.state is InstanceState.LOADING
        }
        if after:
            self._loading[status.node] = after
        else:
            self._loading.pop(status.node, None)
        return self._due(after)

    def _due(self, instances: dict[str, _Loading]) -> list[Told]:
        found: list[Told] = []
        for instance_id, instance in instances.items():
            wanted = self._wanted.get(instance.model, {})
            found += [(instance_id, adapter) for revision, adapter in wanted.items() if revision not in instance.told]
            instance.told |= wanted.keys()
        return found
