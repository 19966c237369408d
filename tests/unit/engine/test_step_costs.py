"""Device time is charged to requests by their tokens, and the charges add up to its use."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
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
from services.engine.generation.request import Choice, GenerationRequest
from services.engine.generation.runner import Row
from shared.contracts.inference import FairShare


def test_a_step_is_split_by_tokens() -> None:
    costs = StepCosts()
    costs.begin(10.0)
    costs.split(14.0, {"a": 6, "b": 1}, background=1)
    assert (costs.of_request("a"), costs.of_request("b"), costs.background_s) == (3.0, 0.5, 0.5)


def test_the_end_of_a_step_is_charged_to_the_next_one() -> None:
    costs = StepCosts()
    costs.begin(0.0)
    costs.split(1.0, {"a": 1})
    costs.end(1.5, has_more=True)
    costs.begin(9.0)
    costs.split(10.0, {"a": 1, "b": 1})
    costs.end(11.0, has_more=False)
    assert (costs.of_request("a"), costs.of_request("b")) == (1.75, 0.75)
    costs.begin(20.0)
    costs.split(21.0, {"b": 1})
    assert costs.of_request("b") == 1.75, "an idle device charges no request"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 10),
            st.floats(0, 10),
            st.dictionaries(st.sampled_from("abcd"), st.integers(1, 500), max_size=4),
            st.integers(0, 100),
        ),
        max_size=30,
    )
)
def test_charges_add_up_to_the_time_of_all_steps(steps: list[tuple[float, float, dict[str, int], int]]) -> None:
    costs, now, used = StepCosts(), 0.0, 0.0
    for computing, rest, tokens, background in [*steps, (1.0, 0.0, {"last": 1}, 0)]:
        costs.begin(now)
        costs.split(now + computing, tokens, background)
        costs.end(now + computing + rest, has_more=True)
        used += computing + rest
        now += computing + rest + 100.0
    assert sum(map(costs.of_request, ["a", "b", "c", "d", "last"])) + costs.background_s == pytest.approx(used)


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
    stop = StopConditions(max_tokens=draw.randint(1, 40))
    choices = tuple(Choice(i, prompt, stop) for i in range(draw.choice([1, 1, 1, 3])))
    share = FairShare(flow=draw.choice("ab"), weight=draw.choice([1.0, 2.0]))
    return GenerationRequest(name, choices, SamplingParams(temperature=0.0), len(prompt), None, (), share=share)


def test_charges_of_random_requests_equal_the_use_of_the_device_within_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive and are cancelled at random, are paused for other keys, and lose memory."""
    clock = _Clock()
    for module in ("batcher", "device_loop"):
        monkeypatch.setattr(f"services.engine.generation.{module}.time", clock)
    draw, meter = random.Random(7), _Meter(clock)
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

    batcher = Batcher(cast(Any, _Runner(clock)), cast(Any, None), cast(Any, _Letters()), Limits(4, 12, 512, 64), deliver)
    loop = DeviceLoop(1, meter.on_step)
    serving = loop.serve("m", batcher)
    cancelled = set[str]()
    try:
        names = [f"r{i}" for i in range(40)]
        for name in names:
            batcher.submit(_request(name, draw))
            if draw.random() < 0.3:
                with grew:
                    assert grew.wait_for(lambda: len(charged) >= len(cancelled) + 1, 60)
                    victim = draw.choice(sorted(charged))
                batcher.cancel(victim)
                cancelled.add(victim)
        with grew:
            assert grew.wait_for(lambda: ended | cancelled >= set(names), 60)
    finally:
        batcher.stop()
        serving.result(60)
        loop.stop()
    assert len(cancelled) > 3
    assert sum(charged.values()) == pytest.approx(meter.used_s, rel=0.01)
