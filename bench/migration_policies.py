"""Run part 3 of the migration benchmark.

It is the scenario of ServerlessLLM's Fig. 3 under four policies.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bench.cores import pin, unpin
from bench.moving import NODES, Bed, Timed, Values, begin, completion, paused_ms
from bench.slow_source import slow_source
from shared.contracts.models import ModelCard, ModelSpec
from shared.sizing import need_of
from thaw.cli.demo import card_of
from thaw.demo.models import make_demo_model

POLICIES = ("availability", "locality", "preemption", "migration")
SIZES = {"a": "60m", "b": "250m"}
SERVING = {"max_model_len": 2048, "max_concurrency": 4}
CONNECTION_BYTES_S = 20 * 1024 * 1024
"""The web server's limit for each of the loader's eight connections: B loads on node-0 at
160 MiB/s, as from a SATA disk.
"""
A_PROMPT, A_TOKENS = 256, 1000
B_PROMPT, B_TOKENS = 64, 192
RUNS_S = 3.0
"""A has run so long when B is asked for.

(An instance younger than two seconds that has not completed a request yet is not moved.)
"""


class Scene(Bed):
    """Two nodes whose device holds A or B.

    node-0's host memory keeps A alone, node-1's both. There are no copies on disk and none from a
    neighbour.
    """

    def __init__(self) -> None:
        super().__init__(THAW_PEERS="false", THAW_CACHE_BYTES="0", THAW_PREFETCH="false")

    def raise_up(self, sources: dict[str, str], directories: dict[str, Path]) -> None:
        cards = {n: self._card(n, directories[n]) for n in sources}
        weights = {n: c.info.weights_bytes for n, c in cards.items()}
        need = {n: need_of(c).total for n, c in cards.items()}
        budget = need["b"] + need["a"] // 2
        dram = {NODES[0]: (weights["a"] + weights["b"]) // 2, NODES[1]: 2 * sum(weights.values())}
        document = {
            "mesh": {"port": self.port, "nodes": {n: {"cpu:0": budget, "dram": dram[n]} for n in NODES}},
            "defaults": {"keep_alive": -1, **SERVING},
            "models": [{"name": n, "source": s} for n, s in sources.items()],
        }
        path = self.home / "thaw.yaml"
        path.write_text(json.dumps(document))
        self.json("up", "--detach", "--config", str(path))

    def _card(self, name: str, directory: Path) -> ModelCard:
        return card_of(ModelSpec(name=name, source=str(directory), **SERVING))

    def confine(self, model: str, *nodes: str, pin: bool = False) -> None:
        self.change(model, placement={"devices": [f"{n}/*" for n in nodes]}, pin=pin)

    def set_up(self) -> Timed:
        """A's weights in node-0's host memory, B's in node-1's, and A running on node-1."""
        for model, node in (("a", NODES[0]), ("b", NODES[1])):
            self.confine(model, node)
            self.json("wake", model)
            self.json("sleep", model)
        self.confine("a", NODES[1])
        self.json("wake", "a")
        self.confine("a")
        running = begin(self, "a", A_PROMPT, A_TOKENS, 8)
        time.sleep(max(0.0, running.began + RUNS_S - time.monotonic()))
        return running


def policies(rounds: int, figures: Values) -> None:
    """Part 3."""
    scene = Scene()
    try:
        directories = {n: make_demo_model(scene.home / "models" / n, size, seed=i) for i, (n, size) in enumerate(SIZES.items())}
        with slow_source(scene.home / "models", CONNECTION_BYTES_S) as url:
            scene.raise_up({n: f"{url}/{n}/" for n in SIZES}, directories)
            pin(scene.processes(), {NODES[0]: {0}, NODES[1]: {1}}, {0, 1})
            for policy in POLICIES * rounds:
                _run(scene, policy, figures)
    finally:
        unpin()
        scene.close()


def _run(scene: Scene, policy: str, figures: Values) -> None:
    """Request B while A runs, under a policy.

    - availability: B goes to a free device.
    - locality: B goes where its weights are, and waits for A.
    - preemption: B goes there, and A is preempted and starts again on node-0.
    - migration: The scheduler decides by itself, and may move A.
    """
    running = scene.set_up()
    scene.confine("b", *{"availability": NODES[:1], "migration": ()}.get(policy, NODES[1:]))
    if policy != "migration":  # a pinned instance is left alone
        scene.confine("a", pin=True)
    generated, began = len(running.tokens), running.began
    asked = Timed(scene.url, completion("b", B_PROMPT, B_TOKENS))
    asked.start()
    pause = 0.0
    if policy == "preemption":
        interrupted = time.monotonic()
        running.leave()
        scene.confine("a", NODES[0])
        scene.json("sleep", "a")
        running = begin(scene, "a", A_PROMPT, A_TOKENS, generated)
        pause = (time.monotonic() - interrupted) * 1e3
    if policy == "locality":
        running.result()
        scene.confine("a")
    running.result()
    asked.result()
    if policy != "preemption":
        pause = paused_ms(running, generated)
    where = (scene.place("a")[1] if policy != "locality" else NODES[1], scene.place("b")[1])
    errors = [s.error or "it did not end" for s in (running, asked) if s.error or not s.done]
    if where != EXPECTED[policy] or errors:
        print(f"{policy}: A and B are on {where} {errors}", flush=True)
        figures[f"{policy}.not_as_meant"].append(1.0)
    else:
        figures[f"{policy}.b_ttft_ms"].append((asked.first - asked.began) * 1e3)
        figures[f"{policy}.b_latency_ms"].append((asked.ended - asked.began) * 1e3)
        figures[f"{policy}.a_pause_ms"].append(pause)
        figures[f"{policy}.a_latency_ms"].append((running.ended - began) * 1e3)
    for model in SIZES:
        scene.confine(model)
        scene.json("sleep", model)


EXPECTED: dict[str, Any] = {
    "availability": (NODES[1], NODES[0]),
    "locality": (NODES[1], NODES[1]),
    "preemption": NODES,
    "migration": NODES,
}
"""Where A and B are at the end."""
