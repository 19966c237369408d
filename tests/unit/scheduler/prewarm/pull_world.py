"""A world whose operators pull a model, and the reports of its loaders."""

from __future__ import annotations

from typing import Any, Literal

from services.scheduler.domain.effects import SendPrefetch
from services.scheduler.domain.events import LoaderStatusReceived, PullRequested
from shared.contracts.base import ErrorBody
from shared.contracts.loader import CachedModel, LinkStatus, LoaderStatus, PrefetchStatus, SegmentStatus
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

ROOM = 1000 * MIB
REVISION = "rev-s3://b/m"


def report(
    w: World,
    node: str = "n1",
    *,
    disk: tuple[str, ...] = (),
    memory: tuple[str, ...] = (),
    ssd: int = ROOM,
    dram: int = ROOM,
    used: int = 0,
    queue_ms: float = 0.0,
    segments: tuple[SegmentStatus, ...] = (),
    prefetches: tuple[PrefetchStatus, ...] = (),
) -> None:
    cached = (
        *(CachedModel(weights_id=r, tier="ssd", nbytes=100 * MIB) for r in disk),
        *(CachedModel(weights_id=r, tier="dram", nbytes=100 * MIB) for r in memory),
    )
    status = LoaderStatus(
        node=node,
        boot_id="b",
        segments=segments,
        cached=cached,
        prefetches=prefetches,
        dram_budget_bytes=dram,
        dram_bytes=used,
        ssd_budget_bytes=ssd,
        ssd_bytes=used,
        links=(LinkStatus(link="remote:b", finish_ms=queue_ms),),
    )
    w.send(LoaderStatusReceived(w.now, status))


def world(*nodes: str, **spec: Any) -> World:
    w = World()
    for node in nodes or ("n1",):
        w.node(node, 400 * MIB)
    options: dict[str, Any] = {"source": "s3://b/m", "memory": 100 * MIB} | spec
    w.model("m", **options)
    return w


def pull(w: World, node: str | None = None, tier: Literal["ssd", "dram"] = "ssd", name: str = "m") -> str:
    waiter = w._waiter()
    w.send(PullRequested(w.now, waiter, name, node, tier))
    return waiter


def commands(w: World) -> list[tuple[str, str, str]]:
    return [(e.node, e.command.card.name, e.command.tier) for e in w.sent(SendPrefetch)]


def last(w: World, state: Literal["running", "complete", "preempted", "failed"], error: ErrorBody | None = None) -> PrefetchStatus:
    """Return the status of the last command."""
    return PrefetchStatus(token=w.sent(SendPrefetch)[-1].command.token, weights_id=REVISION, state=state, error=error)


def loading(holder: str, loaded: int = 1) -> tuple[SegmentStatus, ...]:
    return (SegmentStatus(weights_id="other", model="o", segment="s", total_bytes=9, loaded_bytes=loaded, holders=(holder,)),)


def error_of(w: World, waiter: str) -> tuple[str, str]:
    answer = w.answer(waiter)
    assert isinstance(answer, ErrorBody)
    return answer.code, answer.message
