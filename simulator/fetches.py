"""Bytes on their way to a node's memory: one fetch for all that wait for the same ones (one copy of a model's weights in a node's memory serves all
its instances: HydraServe §5.1, ServerlessLLM §4, and the mesh's own loader)."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from simulator.instances import SimNode
from simulator.links import Flow, Link

Key = tuple[str, str, int, int]
"""Node, model, stage, stages."""
Done = Callable[[], None]


class Fetches:
    def __init__(self) -> None:
        self._open: dict[Key, tuple[Flow, dict[int, Done]]] = {}
        self._numbers = 0

    def join(self, node: SimNode, key: Key, path: tuple[Link, ...], nbytes: float, done: Done) -> Callable[[], None]:
        """Fetch, or wait for who does already. Returns how to leave: with the last one the fetch ends."""
        self._numbers += 1
        number = self._numbers
        found = self._open.get(key)
        if found is None:
            waiting: dict[int, Done] = {}
            flow = node.network.start(path, nbytes, lambda: self._arrived(key))
            self._open[key] = found = (flow, waiting)
        flow, waiting = found
        waiting[number] = done

        def leave() -> None:
            if waiting.pop(number, None) is not None and not waiting and self._open.get(key) is found:
                del self._open[key]
                node.network.cancel(flow)

        return leave

    def under_way(self, key: Key) -> bool:
        return key in self._open

    def expected(self, node: SimNode, whole: str | None, path: tuple[Link, ...], nbytes: float) -> float:
        """Seconds until the bytes would be in the node's memory: of one more fetch, or of the one under way for `whole`, a model."""
        found = self._open.get((node.name, whole, 0, 1)) if whole is not None else None
        alone = node.network.expected(path, nbytes) if path else 0.0
        if found is None:
            return alone
        flow = found[0]
        return min(alone, flow.left / flow.rate if flow.rate > 0 else inf)

    def _arrived(self, key: Key) -> None:
        _, waiting = self._open.pop(key)
        for done in list(waiting.values()):
            done()
