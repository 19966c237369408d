"""A real vLLM of two ranks, on one node and on two, with weights from loaders.

Pipeline ranks are not tried: vLLM 0.32's runner for cpu fails at their first request.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.stages import Stage, split_layers
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import (
    PATIENCE_S,
    PluginEngine,
    forked_python,
    plugin_card,
    spawn_loader,
    spawned_with_loader,
)
from tests.integration.engines_real.merged_lora import PROMPT, TOKENS, merged
from tests.support.hosted import Hosts, hosted_card
from tests.support.servers import NatsServer
from thaw.demo.models import SIZES, make_demo_model
from weights.formats.checkpoint import open_checkpoint
from weights.formats.safetensors import TensorEntry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]


@dataclass(frozen=True, order=True)
class Taken:
    """The bytes that a rank has reported."""

    rank: int
    taken: int
    whole: int
    brought: int
    read_whole: int


def taken(log: str) -> list[Taken]:
    lines = re.findall(
        r"Rank (\d+) of 2 took (\d+) of (\d+) bytes; the loader brought (\d+) bytes, (\d+) tensors were read whole", log
    )
    return sorted(Taken(*map(int, line)) for line in lines)


def share_bytes(directory: Path) -> tuple[int, int]:
    """Return the bytes of one of two ranks and of the whole model: all matrices are divided."""
    header = read_tensors(directory)
    whole = sum(t.nbytes for t in header)
    return sum(t.nbytes // 2 if len(t.shape) == 2 else t.nbytes for t in header), whole


def read_tensors(directory: Path) -> list[TensorEntry]:
    return [t for f in open_checkpoint(directory).files for t in f.header.tensors]


@pytest.fixture
def even_model(tmp_path: Path) -> Path:
    """Create a model with an even number of heads of each kind."""
    return make_demo_model(tmp_path / "even", replace(SIZES["5m"], hidden=256, heads=8, kv_heads=4))


@pytest.fixture
def two_ranks(nats_server: NatsServer, even_model: Path, tmp_path: Path) -> Iterator[PluginEngine]:
    yield from spawned_with_loader(plugin_card(even_model, tensor_parallel_size=2), nats_server.url, tmp_path)


@pytest.mark.runs("vllm", "llama")
async def test_each_rank_takes_its_share_from_the_loader(
    mesh: Mesh, nats_server: NatsServer, two_ranks: PluginEngine, even_model: Path, tmp_path: Path
) -> None:
    hosts = Hosts(mesh, two_ranks.start.node, nats_server.url, tmp_path)
    hosts.patience_s = PATIENCE_S
    await hosts.start()
    report = await hosts.settled(two_ranks.start.instance_id)
    assert report.state == "ready", report.error
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await hosts.request(two_ranks.start.instance_id, "completion", return_token_ids=True, **asked)
    assert answer.json["choices"][0]["token_ids"] == merged(even_model, None)
    log = Path(two_ranks.start.log_path).read_text()
    assert log.count("from its loader") == 2, "each rank has read from it"
    share, whole = share_bytes(even_model)
    found = taken(log)
    assert [(t.rank, t.taken, t.whole, t.read_whole) for t in found] == [(0, share, whole, 0), (1, share, whole, 0)]
    assert all(t.brought > whole for t in found), "the ranks of one node share all weights"


@pytest.mark.runs("vllm", "llama")
@pytest.mark.parametrize("from_loaders", [False, True])
async def test_ranks_on_two_nodes_are_one_engine(
    mesh: Mesh, nats_server: NatsServer, even_model: Path, tmp_path: Path, home: Path, from_loaders: bool
) -> None:
    """Both hosts are on this machine. When one rank is killed, the other one ends too.

    With loaders, each brings the part of its rank only.
    """
    args = {"tensor_parallel_size": 2, **({"load_format": "thaw"} if from_loaders else {})}
    card = hosted_card(even_model, "vllm", context=1024, dtype="float32", stages=2, engine_args=args, name="even")
    nodes = [Hosts(mesh, f"real-rank-{i}", nats_server.url, tmp_path) for i in range(2)]
    loaders = [spawn_loader(hosts.node, nats_server.url, str(home), tmp_path) for hosts in nodes] if from_loaders else []
    starts: list[str] = []
    logs: list[str] = []
    for index, hosts in enumerate(nodes):
        hosts.patience_s = PATIENCE_S
        await hosts.start()
        stage = Stage(
            group_id="g",
            index=index,
            count=2,
            layers=split_layers(4, 2)[index],
            secret="s" * 32,
            first=starts[0] if index else None,
        )
        start = hosts.spec(card).model_copy(update={"stage": stage})
        start = start.model_copy(update={"environment": {**start.environment, "THAW_VLLM_PYTHON": forked_python()}})
        hosts.spawn(start, "services.enginehost")
        starts.append(start.instance_id)
        logs.append(start.log_path)
    try:
        reports = [await hosts.settled(instance) for hosts, instance in zip(nodes, starts, strict=True)]
        assert [r.state for r in reports] == ["ready", "ready"], [r.error for r in reports]
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await nodes[0].request(starts[0], "completion", return_token_ids=True, **asked)
        assert answer.json["choices"][0]["token_ids"] == merged(even_model, None)
        if from_loaders:
            share, whole = share_bytes(even_model)
            for rank, log in enumerate(logs):
                [found] = taken(Path(log).read_text())
                assert (found.rank, found.taken, found.whole, found.read_whole) == (rank, share, whole, 0)
                assert found.taken < found.brought < 0.85 * whole, "rows of half the matrices, all of the others"
        assert reports[1].hosted is not None
        os.kill(reports[1].hosted.pids[0], signal.SIGKILL)
        for hosts, instance in zip(nodes, starts, strict=True):
            failed = await hosts.reported(instance, lambda r: r.state == "failed")
            assert failed.error is not None
            await hosts.left_nothing(instance)
    finally:
        for hosts in nodes:
            hosts.close()
        for loader in loaders:
            loader.terminate()
            loader.wait()
