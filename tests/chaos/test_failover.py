"""An engine is killed every two seconds under more streams than it runs at once.

Each stream completes with the undisturbed response.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import openai
import psutil
import pytest

from tests.support.mesh import Victim, kill
from tests.support.outcomes import Asked, ask
from tests.support.paced_zygote import slowed_by
from tests.support.sizes import size

STREAMS = int(os.environ.get("THAW_TEST_STORM_STREAMS", "20"))
"""More than the model's `max_concurrency` of 16."""
TOKENS, STEP_S = size((100, 0.06), (300, 0.02))
"""A stream takes at least six seconds, and hardly any CPU time: it outlives a kill or two."""
FOR_S, EVERY_S = float(os.environ.get("THAW_TEST_STORM_S", "6")), 2.0
"""`make test-long` kills engines for a minute, under 30 streams."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Victim]:
    """Start a mesh for this module, so that its faults stay out of the others' logs.

    The models use float32, so that batching changes no token.
    """
    victim = Victim(**slowed_by(STEP_S))
    try:
        victim.begin()
        yield victim
    finally:
        victim.close()


def test_streams_survive_an_engine_kill_every_two_seconds(mesh: Victim, client: openai.OpenAI) -> None:
    whole = ask(client, tokens=TOKENS)
    streams = [Asked(mesh.url, "one", tokens=TOKENS) for _ in range(STREAMS)]
    ended: list[Asked] = []
    killed, begun = set[int](), time.monotonic()
    while time.monotonic() - begun < FOR_S:
        time.sleep(EVERY_S)  # the interval between kills
        for pid in [int(i["pids"][0]) for i in mesh.instances("one") if i["pids"]]:
            if pid not in killed and psutil.pid_exists(pid):
                kill(pid)
                killed.add(pid)
        ended += [s for s in streams if not s.is_alive()]
        streams = [s if s.is_alive() else Asked(mesh.url, "one", tokens=TOKENS) for s in streams]
    assert len(killed) > FOR_S / EVERY_S / 6
    for stream in (*ended, *streams):
        outcome = stream.outcome(within=180)
        assert (outcome.kind, outcome.finish, outcome.tokens) == ("answered", "length", TOKENS), outcome
        assert outcome.text == whole
