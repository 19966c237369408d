"""The operators' wishes: models registered and removed, woken and sent to sleep; nodes cordoned and drained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.scheduler.domain.admin.lora_adapters import check_removal, refitted, says_the_same
from services.scheduler.domain.effects import DeleteCatalog, PutCatalog, ReplyTo
from services.scheduler.domain.estimates.memory_needs import devices_of
from services.scheduler.domain.events import AddModelsAsked, AdminAsked, ChangeNodeAsked, RemoveModelAsked, SleepAsked, WakeAsked
from services.scheduler.domain.lifecycle.suspension import gently
from services.scheduler.domain.lifecycle.transitions import leave
from services.scheduler.domain.placement.place import hopeless_on
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.usage_history import Habit
from services.scheduler.domain.state.volatile import (
    MeasuredNeed,
    ModelDemand,
    Objective,
    ParkTrouble,
    Pressure,
    Trouble,
    Unmet,
    Waiter,
)
from services.scheduler.domain.values import replace
from shared.contracts.admin import ModelsAdded
from shared.contracts.base import Done
from shared.contracts.models import ModelCard, ModelInfo, ModelSpec, routes_of
from shared.contracts.node import InstanceState
from shared.errors import Conflict, InsufficientMemory, InvalidRequest, ModelNotFound, NotFound, ThawError, Unavailable
from shared.sizing import need_of

RUNNING_FIELDS = (
    "source",
    "engine",
    "dtype",
    "max_model_len",
    "max_concurrency",
    "engine_args",
    "trust_remote_code",
    "command",
    "env",
    "container",
)
"""A change of one of these only takes effect in a new engine; the others are read anew at each decision."""


def administer(d: Draft, event: AdminAsked) -> None:
    """Do what was asked, or answer why not."""
    try:
        match event:
            case AddModelsAsked():
                _add(d, event)
            case RemoveModelAsked():
                _remove_with_adapters(d, event)
                d.emit(ReplyTo(event.waiter, Done()))
            case WakeAsked():
                _wake(d, event)
            case SleepAsked():
                _sleep(d, event)
            case ChangeNodeAsked():
                _change_node(d, event)
    except ThawError as e:
        d.emit(ReplyTo(event.waiter, e.body()))


def find(state: ClusterState, name: str) -> Model:
    model = state.model_named(name)
    if model is None:
        raise ModelNotFound(f"no model {name!r} is registered; see `thaw models list`", param="model")
    return model


def to_inspect(state: ClusterState, specs: Iterable[ModelSpec]) -> list[ModelSpec]:
    """Those whose files have to be read: new ones, and those with another source."""
    return [s for s in specs if s.name not in state.models or _reads_differently(state.models[s.name].card.spec, s)]


def _reads_differently(old: ModelSpec, new: ModelSpec) -> bool:
    return (old.source, old.trust_remote_code, old.engine) != (new.source, new.trust_remote_code, new.engine)


def check(state: ClusterState, specs: tuple[ModelSpec, ...], prune: bool) -> None:
    """Refuse names that clash, before anything is read or changed."""
    twice = [name for name, count in Counter(s.name for s in specs).items() if count > 1]
    if twice:
        raise InvalidRequest(f"named twice: {', '.join(sorted(twice))}; every model needs a name of its own", param="specs")
    new = {s.name: s for s in specs}
    kept = {} if prune else {n: m.card.spec for n, m in state.models.items() if n not in new}
    everyone = kept | new
    owners: dict[str, list[str]] = {}
    for spec in everyone.values():
        for alias in (spec.name, *spec.aliases):
            owners.setdefault(alias, []).append(spec.name)
    clashes = [f"{alias!r} ({' and '.join(sorted(names))})" for alias, names in sorted(owners.items()) if len(names) > 1]
    if clashes:
        raise Conflict(f"names and aliases must be unique; these are not: {', '.join(clashes)}", param="aliases")


def _add(d: Draft, event: AddModelsAsked) -> None:
    check(d.state, event.specs, event.prune)
    added: list[str] = []
    changed: list[str] = []
    unchanged: list[str] = []
    named = {s.name for s in event.specs}
    planned = {n: m.card for n, m in d.state.models.items() if n in named or not event.prune}
    for spec in event.specs:
        old = d.state.models.get(spec.name)
        info = event.infos.get(spec.name)
        if old is not None and old.card.spec == spec and (info is None or says_the_same(info, old.card.info)):
            unchanged.append(spec.name)
            continue
        planned[spec.name] = _card(d, old, spec, event.infos)
        _refuse_longer_context(planned[spec.name])
        (changed if old else added).append(spec.name)
    cards = refitted(planned, {*added, *changed})
    _refuse_impossible(d, [c for c in cards if c.spec.base is None])
    removed = sorted(set(d.state.models) - {s.name for s in event.specs}) if event.prune else []
    for name in removed:
        _remove(d, d.state.models[name])
    for card in cards:
        old = d.state.models.get(card.name)
        same = old is not None and old.card.generation == card.generation
        d.put(Model(card, old.error if old and same else None))
        if not same:
            d.drop(Trouble, card.name)
        d.drop(ParkTrouble, card.name)
        d.emit(PutCatalog(card))
    answer = ModelsAdded(added=tuple(added), changed=tuple(changed), unchanged=tuple(unchanged), removed=tuple(removed))
    d.emit(ReplyTo(event.waiter, answer))


def _card(d: Draft, old: Model | None, spec: ModelSpec, infos: dict[str, ModelInfo]) -> ModelCard:
    info = infos.get(spec.name)
    if info is None and old is not None and not _reads_differently(old.card.spec, spec):
        info = old.card.info
    if info is None:
        raise Unavailable(f"{spec.name} was changed by someone else meanwhile; try again", should_retry=True)
    if old is None:
        return ModelCard(spec=spec, info=info, created=int(d.now), routes=routes_of(spec))
    restart = not says_the_same(info, old.card.info) or any(getattr(spec, f) != getattr(old.card.spec, f) for f in RUNNING_FIELDS)
    generation = old.card.generation + int(restart)
    return ModelCard(spec=spec, info=info, created=old.card.created, generation=generation, routes=routes_of(spec))


def _refuse_longer_context(card: ModelCard) -> None:
    """Raises `InvalidRequest` for a `max_model_len` beyond the model's own context; an adapter has its base's."""
    asked, own = card.spec.max_model_len, card.info.context_length
    if asked is not None and card.spec.base is None and asked > own:
        raise InvalidRequest(
            f"{card.name}: max_model_len {asked} is more than the model's context of {own} tokens. Set it to {own} or less, or leave it out",
            param="max_model_len",
        )


def _refuse_impossible(d: Draft, cards: list[ModelCard]) -> None:
    if not d.bookings().largest_budget():
        return
    faults = [text for c in cards if (text := hopeless_on(d, c.name, need_of(c).total, devices_of(c)))]
    if faults:
        raise InsufficientMemory("; ".join(faults), param="specs")


def _remove_with_adapters(d: Draft, event: RemoveModelAsked) -> None:
    model = find(d.state, event.name)
    adapters = [m for m in d.state.models.values() if m.card.spec.base == model.key]
    check_removal(model.key, (a.key for a in adapters), with_adapters=event.with_adapters)
    for gone in (*adapters, model):
        _remove(d, gone)


def _remove(d: Draft, model: Model) -> None:
    d.drop(Model, model.key)
    d.drop(Trouble, model.key)
    d.drop(ParkTrouble, model.key)
    d.drop(MeasuredNeed, model.key)
    d.drop(Habit, model.key)
    d.drop(ModelDemand, model.key)
    d.drop(Objective, model.key)
    d.drop(Pressure, model.key)
    d.drop(Unmet, model.key)
    plan = d.state.last_plan_of(model.key)
    if plan is not None and plan.outcome == "pending" and plan.instance_id is None:
        d.put(plan.model_copy(update={"outcome": "cancelled"}))
    d.emit(DeleteCatalog(model.key))
    _call_off_wakes(d, model, ModelNotFound(f"the model {model.key!r} was removed"))


def _wake(d: Draft, event: WakeAsked) -> None:
    model = d.state.serving(event.name) or find(d.state, event.name)
    d.put(replace(model, resting=False))
    d.put(Waiter(event.waiter, "wake", model.key, event.at))


def _call_off_wakes(d: Draft, model: Model, why: ThawError) -> None:
    """Whoever waits for the model to be woken is told that it will not be: the last order holds."""
    for w in list(d.state.waiters.values()):
        if w.kind == "wake" and w.model == model.key:
            d.drop(Waiter, w.waiter)
            d.emit(ReplyTo(w.waiter, why.body()))


def _sleep(d: Draft, event: SleepAsked) -> None:
    model = find(d.state, event.name)
    if (base := model.card.spec.base) is not None:
        raise InvalidRequest(f"{model.key} is an adapter of {base} and has no instance of its own: thaw sleep {base}", param="name")
    d.put(replace(model, resting=True))
    _call_off_wakes(d, model, Conflict(f"{model.key} was told to sleep while it was being woken"))
    there = [i for i in d.state.of_model(model.key) if not i.state.parked]
    waited_for = tuple(i.instance_id for i in there if not i.claim)
    d.put(Waiter(event.waiter, "sleep", model.key, event.at, waited_for))
    for i in there:
        back = i.state is InstanceState.RESUMING and not i.claim  # what was suspended can be again, once it is back
        leave(d, i, "suspend" if back else gently(d, i, "drain"), "told to sleep")


def _change_node(d: Draft, event: ChangeNodeAsked) -> None:
    node = d.state.nodes.get(event.node)
    if node is None:
        raise NotFound(f"no node {event.node!r}; see `thaw node list`", param="node")
    match event.action:
        case "cordon":
            d.put(replace(node, cordoned=True))
        case "drain":
            d.put(replace(node, cordoned=True, drain_since=node.drain_since if node.drain_since is not None else d.now))
        case _:
            d.put(replace(node, cordoned=False, drain_since=None))
    d.emit(ReplyTo(event.waiter, Done()))
