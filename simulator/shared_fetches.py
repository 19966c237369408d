"""Share a fetch into a node's memory between all instances of the same weights.

HydraServe §5.1, ServerlessLLM §4, and Thaw's loader do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from simulator.instances import SimNode
from simulator.links import Flow, Link

Key = tuple[str, str, int, int]
"""Node, model, stage, stages; of the rest beside a stage: `~stage`."""
Done = Callable[[], None]


@dataclass(eq=False)
class _Fetch:
    """A fetch under way.

    Attributes:
        covered: Bytes that its readers lacked and have at the end of `flow`.
        waiting: By number, the bytes that each reader lacked, and its callback.
    """

    flow: Flow
    covered: float
    waiting: dict[int, tuple[float, Done]] = field(default_factory=dict)


class Fetches:
    def __init__(self) -> None:
        self._open: dict[Key, _Fetch] = {}
        self._numbers = 0

    def join(
        self,
        node: SimNode,
        key: Key,
        path: tuple[Link, ...],
        nbytes: float,
        done: Done,
        background: bool = False,
        lacking: float | None = None,
    ) -> Callable[[], None]:
        """Fetch, or join a fetch under way.

        A reader that lacks more than the fetch covers has the rest fetched afterwards. Devices give
        up the same parts of weights first, so that the larger part contains the smaller one.

        Args:
            node: The node.
            key: The weights.
            path: The links to the node's memory.
            nbytes: Bytes to fetch, unless they are being fetched.
            done: Called when the reader has all bytes.
            background: Leave the bandwidth to other flows.
            lacking: Bytes that the reader lacks, those of a prefetch included; None: `nbytes`.

        Returns:
            A function that leaves; when the last one leaves, the fetch is cancelled.
        """
        self._numbers += 1
        number, lacking = self._numbers, nbytes if lacking is None else lacking
        fetch = self._open.get(key)
        if fetch is None:
            flow = node.network.start(path, nbytes, lambda: self._on_arrived(node, key), background)
            fetch = self._open[key] = _Fetch(flow, lacking)
        fetch.waiting[number] = lacking, done

        def leave() -> None:
            if fetch.waiting.pop(number, None) is not None and not fetch.waiting and self._open.get(key) is fetch:
                del self._open[key]
                node.network.cancel(fetch.flow)

        return leave

    def drop(self, node: str) -> None:
        """Forget the fetches of a node that has failed: none of them ends."""
        for key in [key for key in self._open if key[0] == node]:
            del self._open[key]

    def under_way(self, key: Key) -> bool:
        return key in self._open

    def estimate_seconds(self, node: SimNode, model: str, path: tuple[Link, ...], nbytes: float) -> float:
        """Return the seconds until the bytes are in the node's memory.

        By a new fetch, or by the one under way for the weights of `model`, with the rest after it.
        """
        alone = node.network.estimate_seconds(path, nbytes) if path else 0.0
        fetch = self._open.get((node.name, model, 0, 1))
        if fetch is None:
            return alone
        flow = fetch.flow
        left = flow.left + max(0.0, nbytes - fetch.covered)
        return min(alone, left / flow.rate if flow.rate > 0 else inf)

    def _on_arrived(self, node: SimNode, key: Key) -> None:
        fetch = self._open[key]
        ready = [number for number, (lacking, _) in fetch.waiting.items() if lacking <= fetch.covered]
        done = [fetch.waiting.pop(number)[1] for number in ready]
        if fetch.waiting:
            more = min(lacking for lacking, _ in fetch.waiting.values()) - fetch.covered
            fetch.covered += more
            fetch.flow = node.network.start(fetch.flow.path, more, lambda: self._on_arrived(node, key), fetch.flow.background)
        else:
            del self._open[key]
        for each in done:
            each()
