"""Pull weights: operators order them to a node's disk cache or host memory.

A pull is a prefetch (prewarm/prefetch.py) that an operator chose: it needs no likelihood, and it is
not cancelled when its model starts elsewhere. Without a node it goes to

1. a node that has the weights in that tier: the pull is then done;
2. for host memory, a node that has them on its disk;
3. a node with idle links, then the one with the most free bytes in the tier.

A pull ends when its node reports the weights, or why the prefetch failed, or when an operator
cancels it. While instances load on the node, the loader drops prefetches: the command is sent again
afterwards, as it is after a restart of the loader. Files that are fetched in part stay on the disk,
so that a repeated prefetch continues.

Pulls are stored in Postgres, and the next leader continues them (ADR 0092). A pull that has ended
is kept for `KEPT_S` with its answer, for requests that were lost with their leader and are
repeated. Pure.
"""

from __future__ import annotations

from services.scheduler.domain.effects import ReplyTo, SendCancelPrefetch, SendPrefetch
from services.scheduler.domain.events import PullCancelRequested, PullRequested
from services.scheduler.domain.formatting import gib
from services.scheduler.domain.placement.constraints import placement_rule
from services.scheduler.domain.prewarm.prefetch import BUSY_MS
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.pulls import Pull, Tier
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import LoaderPresence, Waiter
from services.scheduler.domain.values import replace
from shared.contracts.admin import ModelPulled, PullsCancelled, PullTarget, PullView
from shared.contracts.base import ErrorBody
from shared.contracts.loader import PREFETCH_HOLDER, CancelPrefetch, LoaderStatus, PrefetchStatus, PrefetchWeights
from shared.errors import (
    Conflict,
    InsufficientMemory,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PullCancelled,
    StoreFull,
    ThawError,
    Unavailable,
)

REPEAT_S = 5.0
"""A command without the effect that the loader's status should show is sent again after this."""
LOST_AFTER_S = 30.0
"""A pull fails after this time without a message of its loader; a restarted one continues it."""
KEPT_S = 60.0
"""A pull that has ended is kept for this time, for requests that a change of leader lost."""


def request_pull(tx: Transaction, event: PullRequested) -> None:
    """Begin a pull, or join one in progress; answer with an error if it is impossible."""
    pull = _find_request(tx.state, event.request_id)
    if pull is not None and pull.answer is not None:
        tx.emit(ReplyTo(event.waiter, pull.answer))
        return
    try:
        if pull is None:
            model = _find_model(tx, event)
            pull = _join(tx, model, event) or _plan(tx, model, event)
    except ThawError as e:
        tx.emit(ReplyTo(event.waiter, e.body()))
        return
    tx.put(pull.with_request(event.request_id))
    tx.put(Waiter(event.waiter, "pull", pull.model, event.at, pull=pull.key))


def cancel_pulls(tx: Transaction, event: PullCancelRequested) -> None:
    """End the pulls in progress that the event names, and answer which; perhaps none."""
    model = tx.state.model_named(event.name)
    name = model.key if model is not None else event.name
    of_model = [p for p in tx.state.pulls.values() if p.model == name and not p.is_over]
    if (error := _find_unknown(tx, event, has_model=model is not None or bool(of_model))) is not None:
        tx.emit(ReplyTo(event.waiter, error.body()))
        return
    found = [p for p in of_model if event.node in (None, p.node) and event.tier in (None, p.tier)]
    for pull in found:
        _cancel(tx, pull, PullCancelled(_describe_cancelled(pull)))
    cancelled = tuple(PullTarget(node=p.node, tier=p.tier) for p in found)
    tx.emit(ReplyTo(event.waiter, PullsCancelled(name=name, cancelled=cancelled)))


def advance_pulls(tx: Transaction) -> None:
    """Send the commands that are due, answer the pulls that have ended, and drop old ones."""
    for pull in list(tx.state.pulls.values()):
        if pull.is_over:
            _expire(tx, pull)
        else:
            _advance(tx, pull)


def end_lost_pulls(tx: Transaction, due: float) -> None:
    """End the pulls whose loaders are silent for too long.

    Args:
        due: The time of the tick. While it waited for its decision, messages of loaders waited too.
    """
    for pull in [p for p in tx.state.pulls.values() if not p.is_over]:
        loader = tx.state.loaders.get(pull.node)
        has_reported = loader is not None and _has_reported(tx.state, loader)
        last_seen_at = loader.last_message_at if loader is not None and has_reported else max(tx.state.recovered_at, pull.since)
        if due - last_seen_at > LOST_AFTER_S:
            _end(tx, pull, Unavailable(f"The loader of {pull.node} was lost while it pulled {pull.model}").body())


def view_pulls(state: ClusterState, now: float) -> tuple[PullView, ...]:
    """Return the pulls in progress, the earliest first."""
    found = sorted((p for p in state.pulls.values() if not p.is_over), key=lambda p: (p.since, p.key))
    return tuple(_view(state, p, now) for p in found)


def _find_request(state: ClusterState, request_id: str) -> Pull | None:
    """Return the pull that a request with this id began or joined."""
    if not request_id:
        return None
    return next((p for p in state.pulls.values() if request_id in p.requests), None)


def _find_unknown(tx: Transaction, event: PullCancelRequested, *, has_model: bool) -> ThawError | None:
    """Return the error of a cancellation that names an unknown model or node."""
    if not has_model:
        return _model_not_found(event.name)
    if event.node is not None and not _is_known(tx, event.node):
        return _node_not_found(event.node)
    return None


def _model_not_found(name: str) -> ThawError:
    return ModelNotFound(f"No model {name!r} is registered; see `thaw models list`", param="model")


def _node_not_found(node: str) -> ThawError:
    return NotFound(f"No node {node!r}; see `thaw node list`", param="node")


def _is_known(tx: Transaction, node: str) -> bool:
    return node in tx.state.nodes or node in tx.state.loaders


def _describe_cancelled(pull: Pull) -> str:
    place = "disk cache" if pull.tier == "ssd" else "host memory"
    kept = "Files that were fetched in part stay in the disk cache for a repeated pull"
    return f"The pull of {pull.model} to the {place} of {pull.node} was cancelled. {kept}"


def _find_model(tx: Transaction, event: PullRequested) -> Model:
    model = tx.state.model_named(event.name)
    if model is None:
        raise _model_not_found(event.name)
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
        is_same = (pull.model, pull.tier, pull.weights_id) == (model.key, event.tier, revision) and event.node in (None, pull.node)
        if is_same and not pull.is_over:
            return pull
    return None


def _plan(tx: Transaction, model: Model, event: PullRequested) -> Pull:
    node = _choose(tx, model, event.tier) if event.node is None else event.node
    if event.node is not None:
        _check_node(tx, model, event.node, event.tier)
    return Pull(model.key, node, event.tier, model.card.info.revision, tx.now)


def _check_node(tx: Transaction, model: Model, node: str, tier: Tier) -> None:
    """Raise if the node that the operator named cannot have the weights."""
    if not _is_known(tx, node):
        raise _node_not_found(node)
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
        _cancel(tx, pull, Conflict(f"{pull.model} was removed or changed while it was being pulled"))
        return
    if loader is None or not _has_reported(tx.state, loader):
        return
    command = _find_command(loader, pull)
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


def _has_reported(state: ClusterState, loader: LoaderPresence) -> bool:
    """True if the loader has reported in this term.

    The stored status of a loader is older than its first message in this term, and incomplete.
    """
    return loader.last_message_at > state.recovered_at


def _find_command(loader: LoaderPresence, pull: Pull) -> PrefetchStatus | None:
    return next((p for p in loader.status.prefetches if p.token == pull.token), None)


def _is_loading(status: LoaderStatus) -> bool:
    """True if weights are being loaded for an instance: they go first."""
    return any(
        s.error is None and s.loaded_bytes < max(s.total_bytes, 1) and any(not h.startswith(PREFETCH_HOLDER) for h in s.holders)
        for s in status.segments
    )


def _send(tx: Transaction, pull: Pull, model: Model) -> None:
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
            took_ms=0.0 if was_there else max(0.0, tx.now - pull.since) * 1e3,
            was_there=was_there,
        ),
    )


def _cancel(tx: Transaction, pull: Pull, error: ThawError) -> None:
    _end(tx, _send_cancel(tx, pull), error.body())


def _send_cancel(tx: Transaction, pull: Pull) -> Pull:
    """Cancel the pull's command, not those of other pulls and prefetches of the weights."""
    if pull.token == 0:
        return pull
    tx.emit(SendCancelPrefetch(pull.node, CancelPrefetch(weights_id=pull.weights_id, token=pull.token)))
    return replace(pull, sent_at=tx.now)


def _end(tx: Transaction, pull: Pull, answer: ModelPulled | ErrorBody) -> None:
    tx.put(replace(pull, ended_at=tx.now, answer=answer))
    for w in list(tx.state.waiters.values()):
        if w.pull == pull.key:
            tx.drop(Waiter, w.waiter)
            tx.emit(ReplyTo(w.waiter, answer))


def _expire(tx: Transaction, pull: Pull) -> None:
    """Drop a pull that ended some time ago; repeat a cancellation that was lost."""
    if pull.ended_at is not None and tx.now - pull.ended_at > KEPT_S:
        tx.drop(Pull, pull.key)
        return
    loader = tx.state.loaders.get(pull.node)
    if loader is None or not isinstance(pull.answer, ErrorBody) or loader.last_message_at <= pull.sent_at + REPEAT_S:
        return
    command = _find_command(loader, pull)
    if command is not None and command.state == "running":
        tx.put(_send_cancel(tx, pull))


def _view(state: ClusterState, pull: Pull, now: float) -> PullView:
    model, loader = state.models.get(pull.model), state.loaders.get(pull.node)
    command = _find_command(loader, pull) if loader is not None else None
    running = command if command is not None and command.state == "running" else None
    total = running.total_bytes if running is not None else 0
    return PullView(
        model=pull.model,
        node=pull.node,
        tier=pull.tier,
        state="running" if running is not None else "waiting",
        reason=_describe_wait(loader, pull, now) if running is None else "",
        since=pull.since,
        loaded_bytes=running.loaded_bytes if running is not None else 0,
        total_bytes=total or (model.card.info.weights_bytes if model is not None else 0),
        bytes_per_second=running.bytes_per_second if running is not None else None,
    )


def _describe_wait(loader: LoaderPresence | None, pull: Pull, now: float) -> str:
    if loader is None or now - loader.last_message_at > REPEAT_S:
        return f"the loader of {pull.node} does not report"
    if _is_loading(loader.status):
        return f"{pull.node} loads weights for instances first"
    return "its command is on the way"
