"""Operators' placement rules (`PlacementRules`), checked for each candidate device.

1. Labels: the node must have all of them.
2. Devices: the device must match one of the patterns, as node/device or by its own name.
3. Anti-affinity to labels: the node must have none of them.
4. Anti-affinity to models: no instance on the node may be of a model that the patterns name, nor of
   a model whose patterns name this one.
5. Spread: no other instance of the model may be on the node.

Stopping and suspended instances do not count; a suspended one is checked when it resumes. A rule
evicts nothing, and a changed rule applies from the next start. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Model
from shared.contracts.models import PlacementRules

Excludes = Callable[[Booking], str]
"""Returns why a model may not run on a device; empty: it may."""


def placement_rule(state: ClusterState, model: Model, *, spread: bool = False) -> Excludes | None:
    """Return the check of devices for the model; None: no rule applies.

    Args:
        spread: As if the model had the spread rule.
    """
    rules = model.card.spec.placement
    if spread and not rules.spread:
        rules = rules.model_copy(update={"spread": True})
    if not rules.any and not state.anti_affine:
        return None
    found: dict[str, str] = {}
    """By node: rules 1 and 3 to 5."""

    def excludes(b: Booking) -> str:
        why = found.get(b.node)
        if why is None:
            why = found[b.node] = _node(state, model, rules, b.node)
        return why or _device(rules, b)

    return excludes


def combine_rules(first: Excludes | None, second: Excludes | None) -> Excludes | None:
    """Return the check that applies both."""
    if first is None or second is None:
        return first or second
    return lambda b: first(b) or second(b)


def confine_to(node: str, device: str, further: Excludes | None) -> Excludes:
    """Return a check that allows one node, or one `device` of it, and applies `further`."""

    def excludes(b: Booking) -> str:
        if b.node != node or (device and b.device_id != device):
            return "the destination is another node or device"
        return further(b) if further is not None else ""

    return excludes


def _device(rules: PlacementRules, b: Booking) -> str:
    if not rules.devices or any(fnmatchcase(b.key, p) or fnmatchcase(b.device_id, p) for p in rules.devices):  # 2
        return ""
    return f"placement.devices allows {', '.join(rules.devices)} only"


def _node(state: ClusterState, model: Model, rules: PlacementRules, name: str) -> str:
    node = state.nodes.get(name)
    labels = node.labels if node is not None else {}
    for label, value in rules.labels.items():  # 1
        if label not in labels or value not in ("*", labels[label]):
            has = f"it is {labels[label]}" if label in labels else "the node has no such label"
            return f"placement.labels requires {label}={value}: {has}"
    for pattern in rules.anti_affinity:  # 3
        label, is_label, value = pattern.partition("=")
        if is_label and label in labels and value in ("*", labels[label]):
            return f"placement.anti_affinity keeps it off {label}={labels[label]}"
    if not rules.anti_affinity and not rules.spread and not state.anti_affine:
        return ""
    for i in state.on_node(name):
        if i.leaving != "no" or i.state.parked:
            continue
        if i.model == model.key:
            if rules.spread:  # 5
                return f"placement.spread: {i.instance_id} of it is on the node already"
        elif _names(rules, i.model):  # 4
            return f"placement.anti_affinity: {i.model} ({i.instance_id}) is on the node"
        elif i.model in state.anti_affine and _names(state.models[i.model].card.spec.placement, model.key):
            return f"placement.anti_affinity of {i.model}, which is on the node ({i.instance_id})"
    return ""


def _names(rules: PlacementRules, model: str) -> bool:
    return any("=" not in p and fnmatchcase(model, p) for p in rules.anti_affinity)
