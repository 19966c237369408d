"""Operators' commands: add, remove, wake and sleep models; cordon, drain and remove nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.scheduler.domain.admin.lora_adapters import check_lora_options, check_removal, resolve_infos, same_content
from services.scheduler.domain.effects import DeleteCatalog, PutCatalog, ReplyTo
from services.scheduler.domain.estimates.start_learning import forget_model
from services.scheduler.domain.events import (
    AddModelsRequested,
    AdminRequested,
    ChangeNodeRequested,
    RemoveModelRequested,
    SleepRequested,
    WakeRequested,
)
from services.scheduler.domain.lifecycle.node_status import forget_node
from services.scheduler.domain.lifecycle.suspension import prefer_suspend
from services.scheduler.domain.lifecycle.transitions import stop_instance
from services.scheduler.domain.placement.place import find_returning_node, never_fits_reason
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Model, Node
from services.scheduler.domain.state.measurements import MeasuredMemory, SloCounts
from services.scheduler.domain.state.migrations import MigrationTimes
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.usage_history import UsageHistory
from services.scheduler.domain.state.volatile import (
    ConsolidationFailures,
    FailureHistory,
    ModelDemand,
    ModelUsers,
    Overload,
    ParkFailures,
    Unschedulable,
    Waiter,
)
from services.scheduler.domain.values import replace
from shared.contracts.admin import ModelsAdded
from shared.contracts.base import Done
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec, routes_of
from shared.contracts.node import InstanceState
from shared.errors import Conflict, InsufficientMemory, InvalidRequest, ModelNotFound, NotFound, ThawError, Unavailable
from shared.sizing import need_of

RESTART_FIELDS = (
    "source",
    "engine",
    "dtype",
    "max_model_len",
    "max_concurrency",
    "stages",
    "engine_args",
    "trust_remote_code",
    "isolation",
    "command",
    "env",
    "container",
)
"""A change of one of these takes effect in a new engine only; the others at the next decision."""


def execute(tx: Transaction, event: AdminRequested) -> None:
    """Execute the command, or answer with its error."""
    try:
        match event:
            case AddModelsRequested():
                _add(tx, event)
            case RemoveModelRequested():
                _remove_with_adapters(tx, event)
                tx.emit(ReplyTo(event.waiter, Done()))
            case WakeRequested():
                _wake(tx, event)
            case SleepRequested():
                _sleep(tx, event)
            case ChangeNodeRequested():
                _change_node(tx, event)
    except ThawError as e:
        tx.emit(ReplyTo(event.waiter, e.body()))


def find_model(state: ClusterState, name: str) -> Model:
    model = state.model_named(name)
    if model is None:
        raise ModelNotFound(f"No model {name!r} is registered; see `thaw models list`", param="model")
    return model


def needs_inspection(state: ClusterState, specs: Iterable[ModelSpec]) -> list[ModelSpec]:
    """Return the specs whose files must be read: new ones and those with another source."""
    return [s for s in specs if s.name not in state.models or _reads_differently(state.models[s.name].card.spec, s)]


def _reads_differently(old: ModelSpec, new: ModelSpec) -> bool:
    return any(getattr(old, f) != getattr(new, f) for f in ("source", "trust_remote_code", "engine", "stages"))


def check_names(state: ClusterState, specs: tuple[ModelSpec, ...], prune: bool) -> None:
    """Raise if names clash, before anything is read or changed."""
    twice = [name for name, count in Counter(s.name for s in specs).items() if count > 1]
    if twice:
        raise InvalidRequest(f"Named twice: {', '.join(sorted(twice))}; every model needs a name of its own", param="specs")
    new = {s.name: s for s in specs}
    kept = {} if prune else {n: m.card.spec for n, m in state.models.items() if n not in new}
    everyone = kept | new
    owners: dict[str, list[str]] = {}
    for spec in everyone.values():
        for alias in (spec.name, *spec.aliases):
            owners.setdefault(alias, []).append(spec.name)
    clashes = [f"{alias!r} ({' and '.join(sorted(names))})" for alias, names in sorted(owners.items()) if len(names) > 1]
    if clashes:
        raise Conflict(f"Names and aliases must be unique; these are not: {', '.join(clashes)}", param="aliases")


def check_sources(state: ClusterState, specs: Iterable[ModelSpec], may_replace: bool) -> None:
    """Raise `Conflict` if a registered model would get another source, unless `may_replace`.

    Users and passwords in URLs do not count: they may be renewed.
    """
    for spec in () if may_replace else specs:
        model = state.models.get(spec.name)
        if model is not None and (old := model.card.spec.public_source) != spec.public_source:
            raise Conflict(
                f"{spec.name} is registered with another source ({old}). Set `replace` (`thaw models add --replace`) to change it to "
                f"{spec.public_source}, or take another name",
                param="replace",
            )


def check_unchanged(state: ClusterState, before: Iterable[ModelSpec]) -> None:
    """Raise `Conflict` if a spec that a change was made from is not the registered one any more."""
    for spec in before:
        model = state.models.get(spec.name)
        if model is None or model.card.spec != spec:
            raise Conflict(f"{spec.name} was changed or removed meanwhile. Show its settings, and change them again")


def _add(tx: Transaction, event: AddModelsRequested) -> None:
    check_unchanged(tx.state, event.before)
    check_names(tx.state, event.specs, event.prune)
    check_sources(tx.state, event.specs, event.replace)
    added: list[str] = []
    changed: list[str] = []
    unchanged: list[str] = []
    named = {s.name for s in event.specs}
    planned = {n: m.card for n, m in tx.state.models.items() if n in named or not event.prune}
    for spec in event.specs:
        old = tx.state.models.get(spec.name)
        info = event.infos.get(spec.name)
        if old is not None and old.card.spec == spec and (info is None or same_content(info, old.card.info)):
            unchanged.append(spec.name)
            continue
        check_lora_options(spec)
        planned[spec.name] = _card(tx, old, spec, event.infos)
        _refuse_longer_context(planned[spec.name])
        _refuse_shared_code(spec)
        _refuse_stages(planned[spec.name])
        (changed if old else added).append(spec.name)
    cards = resolve_infos(planned, {*added, *changed})
    _refuse_impossible(tx, [c for c in cards if c.spec.base is None])
    removed = sorted(set(tx.state.models) - {s.name for s in event.specs}) if event.prune else []
    for name in removed:
        _remove(tx, tx.state.models[name])
    for card in cards:
        old = tx.state.models.get(card.name)
        same = old is not None and old.card.generation == card.generation
        tx.put(Model(card, old.error if old and same else None))
        if not same:
            tx.drop(FailureHistory, card.name)
        tx.drop(ParkFailures, card.name)
        tx.emit(PutCatalog(card))
        for group in [i for i in tx.state.of_model(card.spec.base or "") if i.stages > 1]:
            stop_instance(tx, group, "drain", f"{group.model} has an adapter now, which groups of stages do not serve")
    answer = ModelsAdded(added=tuple(added), changed=tuple(changed), unchanged=tuple(unchanged), removed=tuple(removed))
    tx.emit(ReplyTo(event.waiter, answer))


def _card(tx: Transaction, old: Model | None, spec: ModelSpec, infos: dict[str, ModelInfo]) -> ModelCard:
    info = infos.get(spec.name)
    if info is None and old is not None and not _reads_differently(old.card.spec, spec):
        info = old.card.info
    if info is None:
        raise Unavailable(f"{spec.name} was changed by a concurrent command. Try again", should_retry=True)
    if old is None:
        return ModelCard(spec=spec, info=info, created=int(tx.now), routes=routes_of(spec))
    restart = not same_content(info, old.card.info) or any(getattr(spec, f) != getattr(old.card.spec, f) for f in RESTART_FIELDS)
    generation = old.card.generation + int(restart)
    return ModelCard(spec=spec, info=info, created=old.card.created, generation=generation, routes=routes_of(spec))


def _refuse_longer_context(card: ModelCard) -> None:
    """Raise `InvalidRequest` for a `max_model_len` beyond the model's own context."""
    asked, own = card.spec.max_model_len, card.info.context_length
    if asked is not None and card.spec.base is None and asked > own:
        raise InvalidRequest(
            f"{card.name}: max_model_len {asked} is more than the model's context of {own} tokens. Set it to {own} or less, or leave it out",
            param="max_model_len",
        )


def _refuse_stages(card: ModelCard) -> None:
    """Raise `InvalidRequest` for a model that cannot be divided into its `stages`."""
    if card.spec.stages == 1:
        return
    layers = card.info.layers.count if card.info.layers is not None else 0
    if card.info.task != "generate" or not card.stages:
        what = f"it has {layers} layers" if layers else "its layers are not numbered"
        raise InvalidRequest(
            f"{card.name} cannot be divided into {card.spec.stages} stages: {what if card.info.task == 'generate' else 'it embeds'}. "
            "Set stages to 1, or leave it out",
            param="stages",
        )


def _refuse_shared_code(spec: ModelSpec) -> None:
    """Raise `InvalidRequest` for a model with code of its own that would share a process."""
    if spec.isolation == "shared" and spec.trust_remote_code:
        raise InvalidRequest(
            f"{spec.name}: a model with trust_remote_code is never shared, because its code could read other models' memory. "
            "Set isolation to dedicated, or leave it out",
            param="isolation",
        )


def _refuse_impossible(tx: Transaction, cards: list[ModelCard]) -> None:
    if not tx.bookings().largest_budget():
        return
    needs = [(c, need_of(c).total + need_of(c).executor) for c in cards]
    faults = [text for c, need in needs if (text := never_fits_reason(tx, c, need)) and not find_returning_node(tx, c, need)]
    if faults:
        raise InsufficientMemory("; ".join(faults), param="specs")


def _remove_with_adapters(tx: Transaction, event: RemoveModelRequested) -> None:
    model = find_model(tx.state, event.name)
    adapters = [m for m in tx.state.models.values() if m.card.spec.base == model.key]
    check_removal(model.key, (a.key for a in adapters), with_adapters=event.with_adapters)
    for gone in (*adapters, model):
        _remove(tx, gone)


def _remove(tx: Transaction, model: Model) -> None:
    plan = tx.state.last_plan_of(model.key)
    if plan is not None and plan.outcome == "pending" and plan.instance_id is None:
        tx.put(plan.model_copy(update={"outcome": "cancelled"}))
    tx.drop(Model, model.key)
    tx.drop(FailureHistory, model.key)
    tx.drop(ParkFailures, model.key)
    tx.drop(ConsolidationFailures, model.key)
    tx.drop(MeasuredMemory, model.key)
    tx.drop(MigrationTimes, model.key)
    forget_model(tx, model.key)
    tx.drop(UsageHistory, model.key)
    tx.drop(ModelDemand, model.key)
    tx.drop(SloCounts, model.key)
    tx.drop(Overload, model.key)
    tx.drop(ModelUsers, model.key)
    tx.drop(Unschedulable, model.key)
    tx.emit(DeleteCatalog(model.key))
    _cancel_wakes(tx, model, ModelNotFound(f"The model {model.key!r} was removed"))


def _wake(tx: Transaction, event: WakeRequested) -> None:
    model = tx.state.serving_model(event.name) or find_model(tx.state, event.name)
    tx.put(replace(model, sleep_requested=False))
    tx.put(Waiter(event.waiter, "wake", model.key, event.at))


def _cancel_wakes(tx: Transaction, model: Model, why: ThawError) -> None:
    """Answer the operators who wait for a wake that will not happen: the last command wins."""
    for w in list(tx.state.waiters.values()):
        if w.kind == "wake" and w.model == model.key:
            tx.drop(Waiter, w.waiter)
            tx.emit(ReplyTo(w.waiter, why.body()))


def _sleep(tx: Transaction, event: SleepRequested) -> None:
    model = find_model(tx.state, event.name)
    if (base := model.card.spec.base) is not None:
        raise InvalidRequest(f"{model.key} is an adapter of {base} and has no instance of its own: thaw sleep {base}", param="name")
    tx.put(replace(model, sleep_requested=True))
    _cancel_wakes(tx, model, Conflict(f"{model.key} was put to sleep while it was being woken"))
    there = [i for i in tx.state.of_model(model.key) if not i.state.parked]
    critical_phases = tuple(i.instance_id for i in there if not i.is_claim)
    tx.put(Waiter(event.waiter, "sleep", model.key, event.at, critical_phases))
    for i in there:
        back = (
            i.state is InstanceState.RESUMING and not i.is_claim
        )  # an instance that was suspended can be suspended again after it has resumed
        stop_instance(tx, i, "suspend" if back else prefer_suspend(tx, i, "drain"), "put to sleep by an operator")


def _change_node(tx: Transaction, event: ChangeNodeRequested) -> None:
    node = tx.state.nodes.get(event.node)
    if node is None:
        raise NotFound(f"No node {event.node!r}; see `thaw node list`", param="node")
    match event.action:
        case "cordon":
            tx.put(replace(node, cordoned=True))
        case "remove":
            _remove_node(tx, node)
        case "drain":
            tx.put(replace(node, cordoned=True, drain_since=node.drain_since if node.drain_since is not None else tx.now))
        case _:
            tx.put(replace(node, cordoned=False, drain_since=None))
    tx.emit(ReplyTo(event.waiter, Done()))


def _remove_node(tx: Transaction, node: Node) -> None:
    """Remove a node whose machine is gone for good.

    Raises:
        Conflict: It reports, or has been silent for less than `node_lost_after_s`.
    """
    presence = tx.state.presence.get(node.name)
    if presence is not None and presence.alive:
        remedy = (
            f"Empty it with `thaw node drain {node.name}`, stop its nodeagent, and wait until `thaw node list` shows it as lost"
        )
        raise Conflict(f"Node {node.name} is alive, or has been silent for less than {tx.policy.node_lost_after_s:g} s. {remedy}")
    forget_node(tx, node.name)
