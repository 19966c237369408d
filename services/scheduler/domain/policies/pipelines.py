"""Choose stages, full workers and servers of a cold start (HydraServe §4.1).

Algorithm 1 splits a cold model's layers over s <= 4 servers, each of which fetches 1/s of them. The
first w workers are full-memory workers. A full-memory worker has memory for the whole model (it
computes its stage in 1/s of the time), a low-memory worker for its stage only (its device may be
shared: in the worst case each stage takes the whole time). Eq. 1, 2 and 5 predict. The live
scheduler and the simulator use the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

STAGES = 4
"""§4.1: "larger parallelism sizes yield little improvement"."""


@dataclass(frozen=True, slots=True)
class Server:
    """A candidate device.

    Attributes:
        network: Bytes per second (b).
        pcie: Bytes per second (p).
        sharing: Workers on the device.
    """

    key: str
    node: str
    free: int
    network: float
    pcie: float
    sharing: int = 0

    @property
    def ratio(self) -> float:
        """Return 1/b + 1/p: seconds per byte to fetch and load."""
        return 1 / self.network + 1 / self.pcie


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the parts of a pipeline's start, by HydraServe's symbols.

    Attributes:
        prefill: t_p.
        decode: t_d.
        hop: t_n.
        runtime: t_c. With overlapped workers the following three replace it.
        container: t_cc.
        context: t_cu.
        library: t_l.
    """

    prefill: float
    decode: float
    hop: float
    runtime: float = 0.0
    container: float = 0.0
    context: float = 0.0
    library: float = 0.0


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme (s, w, g): the first w of `servers` hold the whole model.

    Attributes:
        stages: s, the number of stages.
        full: w, the number of workers that hold the whole model.
        servers: The servers of the workers.
        ttft: Time to the first token in seconds.
        tpot: Time per output token in seconds.
        memory_needs: Memory of all workers over that of one full worker; None: low-memory workers
            take 1/s each.
    """

    stages: int
    full: int
    servers: tuple[Server, ...]
    ttft: float
    tpot: float
    memory_needs: float | None = None

    @property
    def memory(self) -> float:
        """Return the memory of all workers, in full workers."""
        return self.memory_needs if self.memory_needs is not None else self.full + (self.stages - self.full) / self.stages

    @property
    def sharing(self) -> int:
        return sum(s.sharing for s in self.servers)


def slowdown(s: int, w: int) -> float:
    """Return the worst-case slowdown of a step against one whole device: s - w + w/s."""
    return s - w + w / s


def ttft_in_turn(nbytes: int, s: int, w: int, servers: Sequence[Server], t: Times) -> float:
    """Return Eq. 1: the time to first token without overlap, in seconds.

    It adds runtime, fetch and load on the slowest server, prefill, and a hop per stage.
    """
    return t.runtime + nbytes / s * max(x.ratio for x in servers) + t.prefill * slowdown(s, w) + t.hop * s


def ttft_overlapped(nbytes: int, s: int, w: int, servers: Sequence[Server], t: Times) -> float:
    """Return Eq. 5: the time to first token with overlap, in seconds.

    Container and context precede libraries beside copying, all beside fetching.
    """
    stage = nbytes / s
    ready = max(max(t.container + t.context + max(stage / x.pcie, t.library), stage / x.network) for x in servers)
    return ready + t.prefill * slowdown(s, w) + t.hop * s


def tpot(s: int, w: int, t: Times) -> float:
    """Return Eq. 2."""
    return t.decode * slowdown(s, w) + t.hop * s


def schemes(nbytes: int, whole: int, servers: Sequence[Server], t: Times, *, overlapped: bool = True) -> Iterator[Scheme]:
    """Yield every (s, w) with its best servers.

    The w servers with the least 1/b + 1/p that fit a whole worker; then the best that fit a stage.
    Stages of one pipeline are on different nodes, to use different links.

    Args:
        nbytes: The model's weights, M of the formulas.
        whole: Memory of a full worker.
    """
    ttft = ttft_overlapped if overlapped else ttft_in_turn
    ranked = sorted(servers, key=lambda x: (x.ratio, x.sharing, -x.free, x.key))
    for s in range(1, STAGES + 1):
        for w in range(s + 1):
            full = _choose_best(ranked, w, whole, ())
            low = _choose_best(ranked, s - w, -(-whole // s), full)
            if len(full) + len(low) == s:
                group = (*full, *low)
                yield Scheme(s, w, group, ttft(nbytes, s, w, group, t), tpot(s, w, t))


def _choose_best(ranked: Sequence[Server], count: int, need: int, taken: tuple[Server, ...]) -> tuple[Server, ...]:
    nodes = {x.node for x in taken}
    found: list[Server] = []
    for server in ranked:
        if len(found) == count:
            break
        if server.free >= need and server.node not in nodes:
            found.append(server)
            nodes.add(server.node)
    return tuple(found)


def allocate(
    nbytes: int,
    whole: int,
    servers: Sequence[Server],
    t: Times,
    slo_ttft: float,
    slo_tpot: float,
    *,
    overlapped: bool = True,
    at_least: int = 1,
) -> Scheme | None:
    """Return the scheme of Algorithm 1; None: no server fits.

    Of the schemes within both objectives the one with the least sharing; of these (the paper does
    not say) the least memory, then the lowest TTFT. If none meets the objectives, one full-memory
    worker on the best server.

    Args:
        at_least: Stages that become instances of their own (§6.1).
    """
    return select(schemes(nbytes, whole, servers, t, overlapped=overlapped), slo_ttft, slo_tpot, at_least=at_least)


def select(found: Iterable[Scheme], slo_ttft: float, slo_tpot: float, *, at_least: int = 1) -> Scheme | None:
    """Return the scheme that Algorithm 1 takes of those `found`; None: none has one full worker."""
    found = list(found)
    within = [x for x in found if x.ttft <= slo_ttft and x.tpot <= slo_tpot and x.stages >= at_least]
    if within:
        return min(within, key=lambda x: (x.sharing, x.memory, x.ttft, x.stages))
    return next((x for x in found if (x.stages, x.full) == (1, 1)), None)
