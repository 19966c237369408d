"""Share a fetch into a node's memory between all instances of the same weights.

HydraServe §5.1, ServerlessLLM §4, and Thaw's loader do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from simulator.instances import SimNode
from simulator.links import Flow, Link

Key = tuple[str, str, int, int]
"""Node, model, stage, stages; of the rest beside a stage: `~stage`."""
Done = Callable[[], None]


class Fetches:
    def __init__(self) -> None:
        self._open: dict[Key, tuple[Flow, dict[int, Done]]] = {}
        self._numbers = 0

    def join(
        self, node: SimNode, key: Key, path: tuple[Link, ...], nbytes: float, done: Done, background: bool = False
    ) -> Callable[[], None]:
        """Fetch, or join a fetch under way.

        Returns:
            A function that leaves; when the last one leaves, the fetch is cancelled.
        """
        self._numbers += 1
        number = self._numbers
        found = self._open.get(key)
        if found is None:
            waiting: dict[int, Done] = {}
            flow = node.network.start(path, nbytes, lambda: self._on_arrived(key), background)
            self._open[key] = found = (flow, waiting)
        flow, waiting = found
        waiting[number] = done

        def leave() -> None:
            if waiting.pop(number, None) is not None and not waiting and self._open.get(key) is found:
                del self._open[key]
                node.network.cancel(flow)

        return leave

    def drop(self, node: str) -> None:
        """Forget the fetches of a node that has failed: none of them ends."""
        for key in [key for key in self._open if key[0] == node]:
            del self._open[key]

    def under_way(self, key: Key) -> bool:
        return key in self._open

    def estimate_seconds(self, node: SimNode, whole: str | None, path: tuple[Link, ...], nbytes: float) -> float:
        """Return the seconds until the bytes are in the node's memory.

        By a new fetch, or by the one under way for the model `whole`.
        """
        found = self._open.get((node.name, whole, 0, 1)) if whole is not None else None
        alone = node.network.estimate_seconds(path, nbytes) if path else 0.0
        if found is None:
            return alone
        flow = found[0]
        return min(alone, flow.left / flow.rate if flow.rate > 0 else inf)

    def _on_arrived(self, key: Key) -> None:
        _, waiting = self._open.pop(key)
        for done in list(waiting.values()):
            done()
