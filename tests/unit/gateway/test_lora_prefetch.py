"""Prefetch of adapters: which starting instances load which adapters, and when."""

from __future__ import annotations

from services.gateway.domain.lora_prefetch import LoraPrefetch, PrefetchTarget
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from tests.support.fake_engine import card_of
from tests.unit.gateway.recorded_effects import instance, status


def adapter(name: str) -> ModelCard:
    card = card_of(name)
    return card.model_copy(update={"info": card.info.model_copy(update={"revision": name})})


def named(targets: list[PrefetchTarget]) -> list[tuple[str, str]]:
    return [(instance_id, card.name) for instance_id, card in targets]


def report(prefetch: LoraPrefetch, *states: InstanceState, node: str = "n", waiting: int = 1) -> list[tuple[str, str]]:
    """Build a status with one instance of m in each state, named by node and index."""
    instances = [instance(f"{node}{place}", state=state) for place, state in enumerate(states)]
    return named(prefetch.on_status(status(*instances, node=node), lambda _: waiting))


def test_adapter_is_prefetched_once_from_the_first_loading_status_on() -> None:
    prefetch = LoraPrefetch()
    assert prefetch.on_request("m", adapter("sql")) == []
    assert report(prefetch, InstanceState.PREPARING) == []
    assert report(prefetch, InstanceState.LOADING) == [("n0", "sql")]
    assert report(prefetch, InstanceState.LOADING) == []
    assert prefetch.on_request("m", adapter("sql")) == []


def test_new_adapter_is_prefetched_immediately_on_every_starting_instance() -> None:
    prefetch = LoraPrefetch()
    report(prefetch, InstanceState.LOADING, InstanceState.READY)
    report(prefetch, InstanceState.LOADING, node="o")
    assert named(prefetch.on_request("m", adapter("sql"))) == [("n0", "sql"), ("o0", "sql")]
    assert named(prefetch.on_request("m", adapter("poems"))) == [("n0", "poems"), ("o0", "poems")]
    assert prefetch.on_request("other", adapter("sql")) == []


def test_adapter_is_not_prefetched_when_no_request_waits() -> None:
    prefetch = LoraPrefetch()
    prefetch.on_request("m", adapter("sql"))
    assert report(prefetch, InstanceState.LOADING, waiting=0) == []
    assert report(prefetch, InstanceState.LOADING) == []


def test_vanished_instance_is_not_used_for_prefetch() -> None:
    prefetch = LoraPrefetch()
    prefetch.on_request("m", adapter("sql"))
    assert report(prefetch, InstanceState.LOADING) == [("n0", "sql")]
    assert report(prefetch) == []
    assert prefetch.on_request("m", adapter("poems")) == []
    assert report(prefetch, InstanceState.LOADING) == [("n0", "sql"), ("n0", "poems")]
