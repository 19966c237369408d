"""HydraServe Fig. 14: a burst of requests on 16 V100, by workers per cold start.

The figures are by Eq. 5 and Eq. 2, not simulated: the simulator's autoscaler counts a group as one
instance until it has split, so that a burst would start four times the workers.
"""

from __future__ import annotations

from statistics import fmean

from bench.papers.constants import hydraserve as c
from bench.papers.core import Options, Result, Row
from services.scheduler.domain.policies.pipelines import Server, Times, ttft_overlapped

NAME = "hydraserve-fig14"
LOADS = (32, 64, 128)
GROUPS = (1, 2, 4)
TOKENS = 512
SERVERS, DEVICES = 4, 4
MODEL = "Llama2-13B"


def burst(requests: int, group: int, slower: float = 1.0, copies_apart: bool = False) -> dict[str, float]:
    """Workers for all requests at 8 each, over the servers evenly.

    A server fetches each part of the model once, however many of its workers wait for it (section
    5.1; artifact, local_server.py: one region by model, stage and stages, shared by all that ask);
    the stages of one group lie on different servers in the same order, so that each server has one
    part to fetch. With `copies_apart` every worker fetches its own. A group prefills its 8 x
    `group` requests one after another; each stage does its part of the work, so that prompts of
    different requests overlap in the pipeline.
    """
    workers = -(-requests // int(c.BATCH.value))
    fetches = -(-workers // SERVERS) if copies_apart else 1
    network = c.NETWORK.value * 1e9 / fetches
    floor = c.floors("v100")[2] * slower
    prefill = TOKENS / c.PREFILL["13B"]
    times = Times(prefill, c.TPOT_MS["13B"] / 1e3, c.HOP_S.value, 0.0, *(floor * part for part in c.SPLIT))
    servers = [Server(f"s{n}/0", f"s{n}", 0, network, c.LOAD.value * 1e9) for n in range(group)]
    first = ttft_overlapped(int(c.weights_gb(MODEL) * 1e9), group, group, servers, times)
    queued = [first + n * (prefill / group + c.HOP_S.value) for n in range(int(c.BATCH.value) * group)]
    tpot = times.decode + (times.hop * group if group > 1 else 0.0)
    return {"mean_ttft_s": fmean(queued), "tpot_ms": 1e3 * tpot}


def run(options: Options) -> Result:
    result = Result(NAME, "a burst on 16 V100: mean TTFT by workers in a group (by the formulas)")
    result.rows = [Row({"requests": str(n), "group": str(g)}, [burst(n, g)]) for n in LOADS for g in GROUPS]
    one, four = (result.row(requests="128", group=str(g)) for g in (1, 4))
    result.ratio(
        "8.4, Fig. 14a", "128 requests: mean TTFT of single workers over groups of four", one.divide_by(four, "mean_ttft_s"), 1.87
    )
    for group in GROUPS[1:]:
        slower = result.row(requests="128", group=str(group)).divide_by(one, "tpot_ms")
        result.claim_within("8.4, Fig. 14b", f"TPOT of groups of {group} over single workers'", slower, 1.08, 1.19)
    if options.sensitivity:
        for factor in (0.5, 1.5):
            gain = burst(128, 1, factor)["mean_ttft_s"] / burst(128, 4, factor)["mean_ttft_s"]
            result.notes.append(f"Sensitivity, times beside the bytes x {factor}: {gain:.2f} times.")
        apart = burst(128, 1, copies_apart=True)["mean_ttft_s"] / burst(128, 4, copies_apart=True)["mean_ttft_s"]
        result.notes.append(f"If each of a server's four workers fetched its own copy: {apart:.2f} times.")
    return result
