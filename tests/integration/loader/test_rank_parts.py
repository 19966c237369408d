"""Parts of tensor-parallel ranks, over the loader's Unix socket as the vLLM plug-in takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.loader import Inspected, InspectModel, PrepareWeights
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.stages import DevicePart, RankOf
from shared.errors import CheckpointInvalid
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.local_socket import path_of
from thaw.demo.models import SIZES, make_demo_model
from weights.convert.job import convert
from weights.rank_views import Taken, rank_tensors
from weights.tensors import load_tensors

RANKS = 2
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")
FORMS = ["safetensors", "divided"]
Take = Callable[[str, torch.Tensor, int], torch.Tensor]


@pytest.fixture(params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Create a model as it is published, or divided by `thaw convert --tensor-parallel`."""
    made = make_demo_model(tmp_path / "made", replace(SIZES["5m"], hidden=256, heads=8, kv_heads=4))
    if request.param == "safetensors":
        return made
    convert(made, tmp_path / "divided", RANKS)
    return tmp_path / "divided"


def take_as_vllm(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return what vLLM's weight loaders copy for a rank."""
    kind = name.split(".")[-2]
    dim = 0 if kind in COLUMNS else 1 if kind in ROWS else None
    if dim is None:
        return tensor.clone()
    size = tensor.shape[dim] // RANKS
    return tensor.narrow(dim, rank * size, size).clone()


def take(loader: LoaderProcess, model: Path, rank: int, taken: Taken, how: Take = take_as_vllm) -> dict[str, torch.Tensor]:
    place = RankOf(index=rank, count=RANKS)
    with rank_tensors(str(model), str(path_of(loader)), place, taken, is_part=True, timeout=60) as coming:
        return {name: how(name, tensor, rank) for name, tensor in coming}


async def test_each_rank_gets_its_elements_from_a_part(loader: LoaderProcess, client: Client, tmp_path: Path, model: Path) -> None:
    whole = load_tensors(tmp_path / "made")
    whole_bytes = sum(t.nbytes for t in whole.values())
    for rank in range(RANKS):
        taken = Taken()
        found = await asyncio.to_thread(take, loader, model, rank, taken)
        assert found.keys() == whole.keys()
        assert all(found[name].equal(take_as_vllm(name, whole[name], rank)) for name in whole)
        assert taken.whole_tensors == 0
        assert taken.nbytes == sum(t.nbytes for t in found.values())
        assert taken.nbytes <= taken.brought_bytes < 0.75 * whole_bytes, "a divided model has the embeddings whole"


async def test_prepared_part_is_the_one_that_the_rank_attaches(
    loader: LoaderProcess, client: Client, tmp_path: Path, model: Path
) -> None:
    args = {"load_format": "thaw", "tensor_parallel_size": RANKS}
    spec = ModelSpec(name="m", source=str(model), engine="vllm", stages=RANKS, engine_args=args)
    subject = subjects.loader_command(loader.node)
    info = (await client.mesh.request(subject, InspectModel(spec=spec, deadline_ms=60_000), Inspected)).info
    assert info.ranks == (RANKS if model.name == "divided" else 1)
    parts = tuple(DevicePart(holder=f"i+s{i}", rank=RankOf(index=i, count=RANKS)) for i in range(RANKS))
    card = ModelCard(spec=spec, info=info, created=0)
    await client.mesh.request(subject, PrepareWeights(token=1, instance_id="i", card=card, parts=parts), Done)
    brought = 0
    for rank in range(RANKS):
        taken = Taken()
        await asyncio.to_thread(take, loader, model, rank, taken)
        assert abs(taken.brought_bytes / info.part_bytes(None, parts[rank].rank) - 1) < 0.05, "as predicted"
        brought += taken.brought_bytes
    assert loader.memory() == brought, "nothing was loaded twice"


def take_all(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.clone()


async def test_engine_that_wants_more_gets_it_from_all_weights(
    loader: LoaderProcess, client: Client, tmp_path: Path, model: Path
) -> None:
    taken = Taken()
    if model.name == "divided":
        with pytest.raises(CheckpointInvalid, match="divided for 2 ranks"):
            await asyncio.to_thread(take, loader, model, 0, taken, take_all)
        return
    whole = load_tensors(model)
    found = await asyncio.to_thread(take, loader, model, 0, taken, take_all)
    assert all(found[name].equal(whole[name]) for name in whole)
    assert taken.whole_tensors == sum(name.split(".")[-2] in COLUMNS for name in whole)


@pytest.mark.parametrize("model", ["divided"], indirect=True)
async def test_divided_model_is_for_its_number_of_ranks_only(client: Client, model: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"divided for 2 ranks.*stages: 2"):
        await client.card(model)
