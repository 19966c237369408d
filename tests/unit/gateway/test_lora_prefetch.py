"""Which starting instances hear of which adapters, and when."""

from __future__ import annotations

from services.gateway.domain.lora_prefetch import LoraPrefetch, PrefetchTarget
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from tests.support.fake_engine import card_of
from tests.unit.gateway.recorded_effects import instance, status


def adapter(name: str) -> ModelCard:
    card = card_of(name)
    return card.model_copy(update={"info": card.info.model_copy(update={"revision": name})})


def named(told: list[PrefetchTarget]) -> list[tuple[str, str]]:
    return [(instance_id, card.name) for instance_id, card in told]


def heard(early: LoraPrefetch, *states: InstanceState, node: str = "n", waiting: int = 1) -> list[tuple[str, str]]:
    """A status with one instance of m in each state, named by node and place."""
    instances = [instance(f"{node}{place}", state=state) for place, state in enumerate(states)]
    return named(early.on_status(status(*instances, node=node), lambda _: waiting))


def test_an_instance_is_told_once_from_its_first_word_on() -> None:
    early = LoraPrefetch()
    assert early.on_request("m", adapter("sql")) == []
    assert heard(early, InstanceState.PREPARING) == []
    assert heard(early, InstanceState.LOADING) == [("n0", "sql")]
    assert heard(early, InstanceState.LOADING) == []
    assert early.on_request("m", adapter("sql")) == []


def test_what_comes_later_is_told_at_once_and_wherever_the_base_starts() -> None:
    early = LoraPrefetch()
    heard(early, InstanceState.LOADING, InstanceState.READY)
    heard(early, InstanceState.LOADING, node="o")
    assert named(early.on_request("m", adapter("sql"))) == [("n0", "sql"), ("o0", "sql")]
    assert named(early.on_request("m", adapter("poems"))) == [("n0", "poems"), ("o0", "poems")]
    assert early.on_request("other", adapter("sql")) == []


def test_nobody_is_told_of_what_nobody_waits_for_any_more() -> None:
    early = LoraPrefetch()
    early.on_request("m", adapter("sql"))
    assert heard(early, InstanceState.LOADING, waiting=0) == []
    assert heard(early, InstanceState.LOADING) == []


def test_an_instance_that_has_gone_is_forgotten() -> None:
    early = LoraPrefetch()
    early.on_request("m", adapter("sql"))
    assert heard(early, InstanceState.LOADING) == [("n0", "sql")]
    assert heard(early) == []
    assert early.on_request("m", adapter("poems")) == []
    assert heard(early, InstanceState.LOADING) == [("n0", "sql"), ("n0", "poems")]
