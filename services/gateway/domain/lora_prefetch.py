"""Prefetch of LoRA adapters on instances of their base model that are starting.

An engine accepts commands from `loading` on: its first status arrived over the connection that it
listens on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, NodeStatus

PrefetchTarget = tuple[str, ModelCard]
"""An instance, and the LoRA adapter that it shall load."""


@dataclass
class _Loading:
    """A loading instance, and the revisions of adapters that it was ordered to load."""

    model: str
    ordered: set[str] = field(default_factory=set)


@dataclass
class LoraPrefetch:
    """Adapters that requests wait for, and instances that are loading."""

    _wanted: dict[str, dict[str, ModelCard]] = field(default_factory=dict)
    _loading: dict[str, dict[str, _Loading]] = field(default_factory=dict)

    def on_request(self, model: str, adapter: ModelCard) -> list[PrefetchTarget]:
        """A request for `adapter` waits for an instance of its base model."""
        self._wanted.setdefault(model, {})[adapter.info.revision] = adapter
        return [target for instances in self._loading.values() for target in self._list_due(instances)]

    def on_status(self, status: NodeStatus, waiting: Callable[[str], int]) -> list[PrefetchTarget]:
        """A node reported its instances.

        Args:
            waiting: Counts the requests that wait for a model.
        """
        for model in [m for m in self._wanted if not waiting(m)]:
            del self._wanted[model]
        before = self._loading.get(status.node, {})
        after = {
            i.instance_id: before.get(i.instance_id) or _Loading(i.model)
            for i in status.instances
            if i.state is InstanceState.LOADING and not i.is_later_stage
        }
        if after:
            self._loading[status.node] = after
        else:
            self._loading.pop(status.node, None)
        return self._list_due(after)

    def _list_due(self, instances: dict[str, _Loading]) -> list[PrefetchTarget]:
        targets: list[PrefetchTarget] = []
        for instance_id, instance in instances.items():
            wanted = self._wanted.get(instance.model, {})
            targets += [(instance_id, adapter) for revision, adapter in wanted.items() if revision not in instance.ordered]
            instance.ordered |= wanted.keys()
        return targets
