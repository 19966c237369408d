"""Pull weights: operators order them to a node's disk cache or host memory.

A pull is a prefetch (prewarm/prefetch.py) that an operator chose: it needs no likelihood, and it is
not cancelled when its model starts elsewhere. Without a node it goes to

1. a node that has the weights in that tier: the pull is then done;
2. for host memory, a node that has them on its disk;
3. a node with idle links, then the one with the most free bytes in the tier.

A pull ends when its node reports the weights, or why the prefetch failed. While instances load on
the node, the loader drops prefetches: the command is sent again afterwards, as it is after a
restart of the loader. Files that are fetched in part stay on the disk, so that a repeated prefetch
continues. Pure.
"""

from __future__ import annotations

from typing import Literal

from services.scheduler.domain.effects import ReplyTo, SendCancelPrefetch, SendPrefetch
from services.scheduler.domain.events import PullRequested
from services.scheduler.domain.formatting import gib
from services.scheduler.domain.placement.constraints import placement_rule
from services.scheduler.domain.prewarm.prefetch import BUSY_MS
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.usage_history import Prefetch, Pull
from services.scheduler.domain.state.volatile import LoaderPresence, Waiter
from services.scheduler.domain.values import replace
from shared.contracts.admin import ModelPulled
from shared.contracts.base import ErrorBody
from shared.contracts.loader import PREFETCH_HOLDER, CancelPrefetch, LoaderStatus, PrefetchWeights
from shared.errors import (
    Conflict,
    InsufficientMemory,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    StoreFull,
    ThawError,
    Unavailable,
)

Tier = Literal["ssd", "dram"]
REPEAT_S = 5.0
"""A command that the loader does not list is sent again after this."""
LOST_AFTER_S = 30.0
"""A pull fails after this time without a message of its loader; a restarted one continues it."""


def request_pull(tx: Transaction, event: PullRequested) -> None:
    """Begin a pull, or join one in progress; answer with an error if it is impossible."""
    try:
        model = _find_model(tx, event)
        pull = _join(tx, model, event) or _plan(tx, model, event)
    except ThawError as e:
        tx.emit(ReplyTo(event.waiter, e.body()))
        return
    tx.put(pull)
    tx.put(Waiter(event.waiter, "pull", model.key, event.at, pull=pull.key))


def advance_pulls(tx: Transaction) -> None:
    """Send the commands that are due, and answer the pulls that have ended."""
    for pull in list(tx.state.pulls.values()):
        _advance(tx, pull)


def _find_model(tx: Transaction, event: PullRequested) -> Model:
    model = tx.state.model_named(event.name)
    if model is None:
        raise ModelNotFound(f"No model {event.name!r} is registered; see `thaw models list`", param="model")
    spec = model.card.spec
    if spec.base is not None:
        raise InvalidRequest(
            f"{model.key} is an adapter of {spec.base}, and is loaded with it: thaw pull {spec.base}",
            param="name",
        )
    if spec.loads_itself:
        raise InvalidRequest(
            f"The engine of {model.key} ({spec.engine}) downloads and reads the weights itself. Start it instead: thaw wake {model.key}",
            param="name",
        )
    if event.tier == "ssd" and not _is_remote(model):
        raise InvalidRequest(
            f"The source of {model.key} is a local directory ({spec.public_source}): there is nothing to download. "
            "Pull it into host memory instead: --to dram",
            param="tier",
        )
    return model


def _is_remote(model: Model) -> bool:
    return "://" in model.card.info.source


def _join(tx: Transaction, model: Model, event: PullRequested) -> Pull | None:
    """Return a pull in progress that the request may wait for."""
    revision = model.card.info.revision
    for pull in tx.state.pulls.values():
        if (pull.model, pull.tier, pull.weights_id) == (model.key, event.tier, revision) and event.node in (None, pull.node):
            return pull
    return None


def _plan(tx: Transaction, model: Model, event: PullRequested) -> Pull:
    node = _choose(tx, model, event.tier) if event.node is None else event.node
    if event.node is not None:
        _check_node(tx, model, event.node, event.tier)
    return Pull(model.key, node, event.tier, model.card.info.revision, tx.now)


def _check_node(tx: Transaction, model: Model, node: str, tier: Tier) -> None:
    """Raise if the node that the operator named cannot have the weights."""
    if node not in tx.state.nodes and node not in tx.state.loaders:
        raise NotFound(f"No node {node!r}; see `thaw node list`", param="node")
    loader = tx.state.loaders.get(node)
    if loader is None or not _is_alive(tx, node):
        raise Unavailable(f"The loader of {node} does not report: `thaw logs loader` says why", param="node", should_retry=False)
    if not _has_weights(loader, tier, model.card.info.revision) and (error := _find_obstacle(loader, model, tier)) is not None:
        raise error


def _choose(tx: Transaction, model: Model, tier: Tier) -> str:
    """Return the best node. Raises why there is none."""
    revision = model.card.info.revision
    excludes = placement_rule(tx.state, model)
    found: list[tuple[bool, bool, bool, int, str]] = []
    reasons: list[str] = []
    errors: list[ThawError] = []
    for node, loader in sorted(tx.state.loaders.items()):
        known = tx.state.nodes.get(node)
        if not _is_alive(tx, node) or loader.status.stopping:
            reasons.append(f"{node}: its loader does not report")
            continue
        if known is None or known.cordoned:
            reasons.append(f"{node}: it is cordoned" if known is not None else f"{node}: its nodeagent has not reported")
            continue
        devices = [b for d in known.devices if (b := tx.state.bookings.get(f"{node}/{d.device_id}")) is not None]
        if excludes is not None and devices and all(excludes(b) for b in devices):
            reasons.append(f"{node}: {excludes(devices[0])}")
            continue
        has = _has_weights(loader, tier, revision)
        if not has and (error := _find_obstacle(loader, model, tier)) is not None:
            errors.append(error)
            reasons.append(error.message)
            continue
        is_near = tier == "ssd" or revision in loader.on_disk
        is_busy = any((link.finish_ms or 0.0) > BUSY_MS for link in loader.status.links)
        found.append((not has, not is_near, is_busy, -_free_bytes(loader.status, tier), node))
    if found:
        return min(found)[-1]
    if errors:
        raise type(errors[0])("; ".join(reasons), param="node")
    raise Unavailable(
        f"No node can have the weights of {model.key} now: {'; '.join(reasons) or 'none reports'}", should_retry=False
    )


def _is_alive(tx: Transaction, node: str) -> bool:
    return tx.state.is_loader_alive(node, tx.now, tx.policy.node_lost_after_s)


def _free_bytes(status: LoaderStatus, tier: Tier) -> int:
    if tier == "ssd":
        return status.ssd_budget_bytes - status.ssd_bytes
    return status.dram_budget_bytes - status.dram_bytes


def _find_obstacle(loader: LoaderPresence, model: Model, tier: Tier) -> ThawError | None:
    """Return why the tier could not hold the weights even if all else there were evicted."""
    needed, status = model.card.info.weights_bytes, loader.status
    if tier == "ssd" and needed > status.ssd_budget_bytes:
        return StoreFull(
            f"{model.key} needs {gib(needed)}, and the disk cache of {loader.node} has {gib(status.ssd_budget_bytes)}. "
            "Raise THAW_CACHE_BYTES",
            param="node",
        )
    if tier == "dram" and needed > status.dram_budget_bytes:
        return InsufficientMemory(
            f"{model.key} needs {gib(needed)}, and {loader.node} keeps {gib(status.dram_budget_bytes)} of weights in host memory. "
            "Raise THAW_DRAM_BYTES, or pull it to the disk",
            param="node",
        )
    return None


def _has_weights(loader: LoaderPresence, tier: Tier, weights_id: str) -> bool:
    """True if the node has the weights there, not only for a prefetch in progress."""
    status = loader.status
    if any(c.weights_id == weights_id and c.tier == tier for c in status.cached):
        return True
    return tier == "dram" and any(
        s.weights_id == weights_id
        and s.error is None
        and not s.is_partial
        and s.loaded_bytes >= s.total_bytes > 0
        and any(not h.startswith(PREFETCH_HOLDER) for h in s.holders)
        for s in status.segments
    )


def _advance(tx: Transaction, pull: Pull) -> None:
    model, loader = tx.state.models.get(pull.model), tx.state.loaders.get(pull.node)
    if model is None or model.card.info.revision != pull.weights_id:
        tx.emit(SendCancelPrefetch(pull.node, CancelPrefetch(weights_id=pull.weights_id)))
        _end(tx, pull, Conflict(f"{pull.model} was removed or changed while it was being pulled").body())
        return
    if loader is None or tx.now - loader.last_message_at > LOST_AFTER_S:
        _end(tx, pull, Unavailable(f"The loader of {pull.node} was lost while it pulled {pull.model}").body())
        return
    command = next((p for p in loader.status.prefetches if p.token == pull.token), None)
    if _has_weights(loader, pull.tier, pull.weights_id):
        _complete(tx, pull, model, loader)
    elif command is not None and command.state == "failed":
        _end(tx, pull, command.error or ThawError(f"{pull.node} could not load {pull.model}").body())
    elif command is not None and command.state == "complete":
        if pull.tier == "ssd":  # the list of files on the disk may be a second old
            _complete(tx, pull, model, loader)
        else:
            text = f"{pull.model} was loaded, but {pull.node} has no room to keep it in host memory beside pinned models"
            _end(tx, pull, InsufficientMemory(text).body())
    elif command is None or command.state == "preempted":
        is_due = command is not None or pull.token == 0 or loader.last_message_at > pull.sent_at + REPEAT_S
        if is_due and not _is_loading(loader.status):
            _send(tx, pull, model)


def _is_loading(status: LoaderStatus) -> bool:
    """True if weights are being loaded for an instance: they go first."""
    return any(
        s.error is None and s.loaded_bytes < max(s.total_bytes, 1) and any(not h.startswith(PREFETCH_HOLDER) for h in s.holders)
        for s in status.segments
    )


def _send(tx: Transaction, pull: Pull, model: Model) -> None:
    ahead = tx.state.prefetches.get(pull.model)
    if ahead is not None and ahead.node == pull.node:
        tx.drop(Prefetch, ahead.key)  # the pull continues it
    command = PrefetchWeights(token=tx.next_token(), card=model.card, tier=pull.tier)
    tx.put(replace(pull, token=command.token, sent_at=tx.now))
    tx.emit(SendPrefetch(pull.node, command))


def _complete(tx: Transaction, pull: Pull, model: Model, loader: LoaderPresence) -> None:
    others: tuple[Tier, ...] = ("ssd", "dram")
    was_there = pull.token == 0
    _end(
        tx,
        pull,
        ModelPulled(
            name=pull.model,
            node=pull.node,
            tier=pull.tier,
            tiers=tuple(t for t in others if t == pull.tier or _has_weights(loader, t, pull.weights_id)),
            nbytes=model.card.info.weights_bytes,
            took_ms=0.0 if was_there else (tx.now - pull.since) * 1e3,
            was_there=was_there,
        ),
    )


def _end(tx: Transaction, pull: Pull, answer: ModelPulled | ErrorBody) -> None:
    tx.drop(Pull, pull.key)
    for w in list(tx.state.waiters.values()):
        if w.pull == pull.key:
            tx.drop(Waiter, w.waiter)
            tx.emit(ReplyTo(w.waiter, answer))
