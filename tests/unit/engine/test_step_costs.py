"""Device time is charged to requests by their tokens, and the charges add up to its use."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.domain.sampling_params import SamplingParams, StopConditions
from services.engine.domain.step_costs import StepCosts
from services.engine.domain.step_planning import Limits
from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Broken, Event, Progressed
from services.engine.generation.request import Choice, EmbedRequest, GenerationRequest
from services.engine.generation.runner import Row
from shared.contracts.inference import FairShare
from shared.engines.background_seconds import OWN
from shared.engines.charge_page import ChargePage, read_charges
from shared.errors import EngineFailed
from tests.support.examples import examples

_Step = tuple[float, float, dict[str, int], dict[str, int], tuple[str, int, str] | None, str | None]
"""Seconds of computing and of the rest; tokens of requests, and by cause; a victim, its lost tokens
and who takes its memory; who ends.
"""


def test_cause_with_work_is_kept_longer_than_causes_without() -> None:
    """Else its meter would begin again, and the ledger would miss that work."""
    costs = StepCosts()
    for n in range(200):
        costs.begin(2.0 * n)
        costs.split(2.0 * n + 1.0, {}, {"at work": 1, f"other {n}": 1})
        costs.end(2.0 * n + 1.0, has_more=False)
    assert costs.background_s["at work"] == pytest.approx(100.0)
    assert len(costs.background_s) <= 65


def test_a_step_is_split_by_tokens() -> None:
    costs = StepCosts()
    costs.begin(10.0)
    costs.split(14.0, {"a": 6, "b": 1}, {"plan": 1})
    assert (costs.report("a"), costs.report("b"), costs.background_s) == (3.0, 0.5, {"plan": 0.5})


def test_the_end_of_a_step_is_charged_to_the_next_one() -> None:
    costs = StepCosts()
    costs.begin(0.0)
    costs.split(1.0, {"a": 1})
    costs.end(1.5, has_more=True)
    costs.begin(9.0)
    costs.split(10.0, {"a": 1, "b": 1})
    costs.end(11.0, has_more=False)
    assert (costs.report("a"), costs.report("b")) == (1.75, 0.75)
    costs.begin(20.0)
    costs.split(21.0, {"b": 1})
    assert costs.report("b") == 1.75, "an idle device charges no request"


def test_seconds_that_an_ended_request_has_not_reported_are_work_of_no_request() -> None:
    costs = StepCosts()
    costs.begin(0.0)
    costs.split(2.0, {"a": 1})
    assert costs.report("a") == 2.0
    costs.split(5.0, {"a": 1})
    assert (costs.charged_s, costs.closed_s) == (5.0, 0.0)
    costs.close("a")
    assert (costs.report("a"), costs.background_s) == (0.0, {OWN: 3.0})
    assert (costs.charged_s, costs.closed_s) == (2.0, 2.0)


def test_requests_that_take_memory_pay_for_what_is_computed_again() -> None:
    costs = StepCosts()
    costs.begin(0.0)
    costs.split(8.0, {"victim": 8})
    costs.charge_preemption("victim", 4, {"victim": 5, "b": 1, "c": 3})
    assert [costs.report(name) for name in ("victim", "b", "c")] == [8.0, 1.0, 3.0]
    costs.split(11.0, {"victim": 4})
    assert costs.report("victim") == 8.0, "it computes again what the others have paid for"
    costs.split(13.0, {"victim": 1})
    assert costs.report("victim") == 9.0
    costs.charge_preemption("b", 1, {"c": 1})  # computed nothing yet: it has lost nothing
    assert (costs.report("b"), costs.report("c")) == (1.0, 3.0)


def test_payments_for_a_request_that_ends_are_taken_off_the_next_steps() -> None:
    costs = StepCosts()
    costs.begin(0.0)
    costs.split(8.0, {"victim": 8})
    costs.report("victim")
    costs.charge_preemption("victim", 8, {"b": 1})
    costs.close("victim")
    costs.split(10.0, {"b": 1})
    costs.split(19.0, {"b": 1})
    assert (costs.report("b"), costs.background_s) == (8.0 + 3.0, {})


def test_causes_of_long_ago_are_forgotten() -> None:
    costs = StepCosts()
    costs.begin(0.0)
    for n in range(200):
        costs.split(float(n + 1), {}, {OWN: 1, f"p-{n}": 1})
    assert costs.background_s[OWN] == 100.0
    assert "p-199" in costs.background_s
    assert "p-0" not in costs.background_s
    assert len(costs.background_s) < 100


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 10),
            st.floats(0, 10),
            st.dictionaries(st.sampled_from("abcd"), st.integers(1, 500), max_size=4),
            st.dictionaries(st.sampled_from([OWN, "p-1", "p-2"]), st.integers(0, 100), max_size=2),
            st.one_of(st.none(), st.tuples(st.sampled_from("abcd"), st.integers(1, 400), st.sampled_from("abcd"))),
            st.sampled_from([None, *"abcd"]),
        ),
        max_size=30,
    )
)
def test_charges_add_up_to_the_time_of_all_steps(steps: list[_Step]) -> None:
    """Requests take memory from others, and end without a report of their seconds."""
    costs, now, used, reported = StepCosts(), 0.0, 0.0, 0.0
    last: _Step = (1.0, 0.0, {"last": 1}, {}, None, None)
    for computing, rest, tokens, background, taken, ended in [*steps, last]:
        costs.begin(now)
        if taken is not None and taken[2] in tokens:
            costs.charge_preemption(taken[0], taken[1], {taken[2]: 1})
        costs.split(now + computing, tokens, background)
        if ended is not None:
            reported += costs.report(ended) if computing > 5 else 0.0
            costs.close(ended)
        costs.end(now + computing + rest, has_more=True)
        used += computing + rest
        now += computing + rest + 100.0
    costs.begin(now)
    costs.split(now + 1e6, {"last": 1})  # repays all that was paid in advance
    used += 1e6
    for name in "abcd":  # and what these still have in advance
        costs.begin(now)
        costs.split(now + 1e6, {name: 1})
        used += 1e6
    assert costs.closed_s == pytest.approx(reported)
    assert reported + sum(map(costs.report, ["a", "b", "c", "d", "last"])) + sum(costs.background_s.values()) == pytest.approx(used)


class _Clock:
    """A clock that computing advances, and each reading by a little."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now


class _Runner:
    """Computes in a time of its own for each token."""

    rewinds = True

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def new_state(self) -> object:
        return object()

    def forget(self, adapter: object) -> None:
        """No adapter is used."""

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        self._clock.now += 0.001 + 0.00001 * sum(len(row.tokens) for row in rows)
        return torch.zeros(len(rows), 4)


class _Embedder:
    """Embeds one input at a time, and fails at the second one."""

    batch = 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._calls = 0

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None) -> torch.Tensor:
        self._calls += 1
        if self._calls == 2:
            raise RuntimeError("a fault")
        return torch.zeros(len(inputs), 4)


class _NoGrammar:
    def new_matcher(self) -> object:
        raise EngineFailed("a step takes more than its limits")


class _Letters:
    def decode(self, tokens: list[int]) -> str:
        return "x" * len(tokens)


class _Meter:
    """The device's use, as an executor sees it: the time from each step to the next call."""

    def __init__(self, clock: _Clock) -> None:
        self.used_s = 0.0
        self._clock = clock
        self._since: float | None = None

    def on_step(self, name: str | None) -> None:
        now = self._clock.monotonic()
        if self._since is not None:
            self.used_s += now - self._since
        self._since = now if name is not None else None


def _request(name: str, draw: random.Random) -> GenerationRequest:
    prompt = (0,) * draw.randint(1, 300)
    stop = StopConditions(max_tokens=draw.choice([draw.randint(1, 40), draw.randint(200, 400)]))
    choices = tuple(Choice(i, prompt, stop) for i in range(draw.choice([1, 1, 1, 3])))
    share = FairShare(flow=draw.choice("ab"), weight=draw.choice([1.0, 2.0]))
    return GenerationRequest(name, choices, SamplingParams(temperature=0.0), len(prompt), None, (), share=share)


@pytest.mark.parametrize("fault", ["grammar", "embedding"])
def test_seconds_of_a_failed_request_become_work_of_no_request(fault: str) -> None:
    """Its gateway does not learn of them, as of no seconds since the last result."""
    broken: list[Event] = []

    def deliver(events: Sequence[Event]) -> None:
        broken.extend(event for event in events if isinstance(event, Broken))

    batcher = Batcher(cast(Any, _Runner(_Clock())), cast(Any, _Embedder()), cast(Any, _Letters()), Limits(4, 10, 512, 64), deliver)
    if fault == "embedding":
        batcher.submit(EmbedRequest("a", ((1,), (2,)), None, 2, ()))
    else:
        batcher.submit(replace(_request("a", random.Random(1)), grammar=cast(Any, _NoGrammar())))
    while not broken:
        assert batcher.step()
    assert (batcher._costs.charged_s, batcher.meters.closed_s) == (0.0, 0.0)
    assert batcher.meters.background_s[OWN] > 0
    batcher.stop()
    assert not batcher.step()


def test_charges_of_random_requests_equal_the_use_of_the_device_within_one_percent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests arrive and are cancelled at random, are paused for other keys, and lose memory."""
    clock = _Clock()
    for module in ("batcher", "device_loop"):
        monkeypatch.setattr(f"services.engine.generation.{module}.time", clock)
    # Of its own, as the number of requests to choose from depends on the threads.
    draw, draw_victim, meter = random.Random(7), random.Random(8), _Meter(clock)
    taken, charge_preemption = list[str](), StepCosts.charge_preemption

    def record_charge(costs: StepCosts, victim: str, lost_tokens: int, payers: Mapping[str, int]) -> None:
        taken.append(victim)
        charge_preemption(costs, victim, lost_tokens, payers)

    monkeypatch.setattr(StepCosts, "charge_preemption", record_charge)
    charged: dict[str, float] = {}
    ended: set[str] = set()
    grew = threading.Condition()

    def deliver(events: Sequence[Event]) -> None:
        with grew:
            for event in events:
                assert not isinstance(event, Broken), event
                if isinstance(event, Progressed):
                    assert event.device_s >= charged.get(event.request_id, 0.0)
                    charged[event.request_id] = event.device_s
                    ended.update({event.request_id} if event.done else ())
            grew.notify_all()

    batcher = Batcher(cast(Any, _Runner(clock)), cast(Any, None), cast(Any, _Letters()), Limits(4, 10, 512, 64), deliver)
    batcher.meters.keep_in(ChargePage(tmp_path / "m.charges"))
    loop = DeviceLoop(1, meter.on_step)
    serving = loop.serve("m", batcher)
    cancelled = set[str]()
    try:
        names = [f"r{i}" for i in range(40)]
        for name in names:
            batcher.submit(_request(name, draw))
            if draw.random() < 0.3:
                with grew:
                    assert grew.wait_for(lambda: bool(charged.keys() - cancelled), 60)
                    victim = draw_victim.choice(sorted(charged.keys() - cancelled))
                batcher.cancel(victim)
                cancelled.add(victim)
        with grew:
            assert grew.wait_for(lambda: ended | cancelled >= set(names), 60)
    finally:
        batcher.stop()
        serving.result(60)
        loop.stop()
    assert len(cancelled) > 3
    assert taken, "no request has lost its memory: the test shows nothing about it"
    in_all = sum(charged.values()) + sum(batcher.meters.background_s.values())
    assert in_all - batcher._costs.prepaid_s == pytest.approx(meter.used_s, rel=0.01)
    assert in_all - batcher._costs.prepaid_s == pytest.approx(batcher.meters.busy_s, rel=0.001)
    assert batcher._costs.closed_s == pytest.approx(sum(charged.values()))
    final = read_charges(tmp_path / "m.charges", os.getpid())
    assert final is not None
    assert final.busy_s == pytest.approx(batcher.meters.busy_s)
    assert final.charged_s + final.own_s == pytest.approx(in_all, rel=0.001)
