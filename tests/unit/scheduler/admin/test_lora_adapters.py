"""LoRA adapters in the catalogue: which base fits, and what registration changes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from services.scheduler.domain.admin.lora_adapters import resolve_info
from services.scheduler.domain.effects import DeleteCatalog, PutCatalog
from services.scheduler.domain.events import AddModelsRequested, RemoveModelRequested
from shared.contracts.admin import ModelAwake, ModelsAdded
from shared.contracts.base import Done, ErrorBody
from shared.contracts.model_info import AdapterInfo, LinearShape, ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.errors import CheckpointInvalid
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.world import World

Q = LinearShape(name="model.layers.*.self_attn.q_proj", rows=64, columns=64, count=4)


def base_info(source: str = "/m/a", *modules: LinearShape) -> ModelInfo:
    return model_info(source, 100 * MIB).model_copy(update={"modules": modules or (Q,)})


def adapter_info(*modules: LinearShape) -> ModelInfo:
    adapter = AdapterInfo(rank=4, alpha=8, made_for="org/base", modules=modules or (Q,))
    return model_info("/a/sql", MIB).model_copy(update={"adapter": adapter, "context_length": 1, "architecture": "LoRA"})


def spec(name: str = "sql", base: str | None = "a", **more: Any) -> ModelSpec:
    return ModelSpec(name=name, source=f"/a/{name}", base=base, **more)


def add(w: World, *specs: ModelSpec, prune: bool = False, **infos: Any) -> Any:
    w._asked += 1
    return w.admin(AddModelsRequested(w.now, f"x{w._asked}", specs, infos, prune, replace=True))


@pytest.fixture
def w() -> World:
    w = World()
    w.node(budget=700 * MIB)
    assert isinstance(add(w, ModelSpec(name="a", source="/m/a", aliases=("al",)), a=base_info()), ModelsAdded)
    return w


def test_adapter_inherits_architecture_and_context_of_its_base(w: World) -> None:
    assert add(w, spec(), sql=adapter_info()).added == ("sql",)
    card = w.state.models["sql"].card
    assert (card.info.architecture, card.info.context_length) == ("LlamaForCausalLM", 2048)
    assert any(e.card == card for e in w.sent(PutCatalog))


def test_model_and_adapter_may_be_registered_together_in_any_order(w: World) -> None:
    answer = add(w, spec(base="b"), ModelSpec(name="b", source="/m/b"), sql=adapter_info(), b=base_info("/m/b"))
    assert answer.added == ("sql", "b")


def test_changed_files_are_a_new_generation_of_the_same_registration(w: World) -> None:
    add(w, spec(), sql=adapter_info())
    base, sql = ModelSpec(name="a", source="/m/a", aliases=("al",)), spec()
    again = add(w, base, sql, a=base_info(), sql=adapter_info())
    assert again.unchanged == ("a", "sql"), "read again, and the same"
    newer = adapter_info().model_copy(update={"revision": "f" * 32})
    assert add(w, base, sql, a=base_info(), sql=newer).changed == ("sql",)
    card = w.state.models["sql"].card
    assert (card.info.revision, card.generation, card.info.architecture) == ("f" * 32, 2, "LlamaForCausalLM")
    assert w.state.models["a"].card.generation == 1


def test_demand_for_an_adapter_starts_only_its_base(w: World) -> None:
    add(w, spec(replicas={"min": 1, "max": 1}), sql=adapter_info())
    w.demand("sql")
    assert [s.command.card.name for s in w.starts("a")] == ["a"]
    assert w.starts("sql") == []


@pytest.mark.parametrize("name", ["sql", "a:sql", "al:sql"])
def test_waking_an_adapter_wakes_its_base(w: World, name: str) -> None:
    add(w, spec(), sql=adapter_info())
    waiter = w.wake(name)
    w.get_ready("a")
    assert isinstance(w.answer(waiter), ModelAwake)


@pytest.mark.parametrize("name", ["b:sql", "sql:a", "a:nothing"])
def test_waking_an_unknown_adapter_returns_not_found(w: World, name: str) -> None:
    add(w, spec(), sql=adapter_info())
    answer = w.answer(w.wake(name))
    assert isinstance(answer, ErrorBody)
    assert answer.code == "model_not_found"


def test_sleep_of_an_adapter_is_refused(w: World) -> None:
    add(w, spec(), sql=adapter_info())
    assert w.answer(w.sleep("sql")).code == "invalid_request"


@pytest.mark.parametrize(
    ("asked", "info", "code"),
    [
        (spec(base="nobody"), adapter_info(), "model_not_found"),
        (spec(base=None), adapter_info(), "invalid_model"),
        (spec(), base_info("/a/sql"), "invalid_model"),
        (spec(base="e"), adapter_info(), "unsupported_architecture"),
        (spec(base="hosted"), adapter_info(), "unsupported_architecture"),
        (spec("other", base="sql"), adapter_info(), "invalid_request"),
        (spec(), adapter_info(Q.model_copy(update={"rows": 32})), "checkpoint_invalid"),
    ],
)
def test_incompatible_adapter_is_refused(w: World, asked: ModelSpec, info: ModelInfo, code: str) -> None:
    embeds = base_info("/m/e").model_copy(update={"task": "embed"})
    add(w, ModelSpec(name="e", source="/m/e"), e=embeds)
    hosted = ModelSpec(name="hosted", source="/m/h", engine="llamacpp", memory=MIB)
    add(w, hosted, hosted=base_info("/m/h"))
    if asked.base == "sql":
        add(w, spec(), sql=adapter_info())
    infos: dict[str, Any] = {asked.name: info}
    answer = add(w, asked, **infos)
    assert isinstance(answer, ErrorBody)
    assert answer.code == code, answer.message
    assert asked.name == "sql" or asked.name not in w.state.models


@pytest.mark.parametrize(
    ("options", "rank", "message"),
    [
        ({}, 4, r"Set engine_args: \{enable_lora: true\} of hosted"),
        ({"engine_args": {"enable_lora": False}}, 4, "enable_lora: true"),
        ({"engine_args": {"enable_lora": True}, "container": {"image": "vllm"}}, 4, "runs in a container"),
        (
            {"engine_args": {"enable_lora": True}},
            17,
            "has rank 17, and hosted allows 16: set engine_args.max_lora_rank of hosted to 32",
        ),
        ({"engine_args": {"enable_lora": True, "max_lora_rank": 8}}, 9, "to 16"),
        ({"engine_args": {"enable_lora": True}}, 600, "no adapter of that rank"),
    ],
)
def test_adapter_that_a_vllm_cannot_serve_is_refused_with_the_remedy(
    w: World, options: dict[str, Any], rank: int, message: str
) -> None:
    hosted = ModelSpec(name="hosted", source="/m/h", engine="vllm", memory=MIB, **options)
    add(w, hosted, hosted=base_info("/m/h"))
    info = adapter_info()
    assert info.adapter is not None
    wide = info.model_copy(update={"adapter": info.adapter.model_copy(update={"rank_pattern": {"q_proj": rank}})})
    answer = add(w, spec(base="hosted"), sql=wide)
    assert isinstance(answer, ErrorBody)
    assert answer.code == "invalid_request"
    assert re.search(message, answer.message)
    assert "sql" not in w.state.models


@pytest.mark.parametrize("value", ["sixteen", None, [16], 0, -1, True])
@pytest.mark.parametrize("name", ["max_lora_rank", "max_loras"])
def test_lora_options_without_a_number_are_refused_before_they_end_every_decision(name: str, value: Any) -> None:
    w = World()  # no node has reported
    options = {"enable_lora": True, name: value}
    answer = add(w, ModelSpec(name="hosted", source="/m/h", engine="vllm", engine_args=options), hosted=base_info("/m/h"))
    assert isinstance(answer, ErrorBody), answer
    assert (answer.code, answer.param) == ("invalid_request", "engine_args")
    assert f"hosted: engine_args.{name} is {value!r}" in answer.message
    assert not w.state.models


def test_lora_options_may_be_numbers_in_quotes(w: World) -> None:
    options = {"enable_lora": True, "max_lora_rank": "8", "max_loras": 2}
    assert add(
        w, ModelSpec(name="h", source="/m/h", engine="vllm", engine_args=options, memory=200 * MIB), h=base_info("/m/h")
    ).added == ("h",)


def test_adapters_of_a_vllm_with_lora_are_served_and_keep_it_on(w: World) -> None:
    hosted = ModelSpec(name="hosted", source="/m/h", engine="vllm", memory=MIB, engine_args={"enable_lora": True})
    add(w, hosted, hosted=base_info("/m/h"))
    assert add(w, spec(base="hosted"), sql=adapter_info()).added == ("sql",)
    without = hosted.model_copy(update={"engine_args": {}})
    answer = add(w, without, hosted=base_info("/m/h"))
    assert isinstance(answer, ErrorBody)
    assert "enable_lora" in answer.message


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"name": "model.layers.*.self_attn.k_proj"}, "does not have .its layers have q_proj.. It was made for org/base"),
        ({"columns": 128}, r"adds \[64, 128\] to .* has \[64, 64\] there"),
        ({"count": 9}, "in 9 layers, and a has 4"),
    ],
)
def test_mismatch_error_names_the_matrix_and_the_expected_shape(wanted: dict[str, Any], message: str) -> None:
    base = ModelCard(spec=ModelSpec(name="a", source="/m/a"), info=base_info(), created=0)
    with pytest.raises(CheckpointInvalid, match=message):
        resolve_info(spec(), adapter_info(Q.model_copy(update=wanted)), base)


@pytest.mark.parametrize("name", ["layers.*.self_attn.q_proj", "language_model.model.layers.*.self_attn.q_proj"])
def test_layer_name_prefixes_may_differ_between_adapter_and_base(name: str) -> None:
    modules = Q.model_copy(update={"name": name})
    base = ModelCard(spec=ModelSpec(name="a", source="/m/a"), info=base_info("/m/a", modules), created=0)
    assert resolve_info(spec(), adapter_info(), base).context_length == 2048
    old = base.model_copy(update={"info": model_info("/m/a")})  # registered before matrices were reported: the engine decides
    assert resolve_info(spec(), adapter_info(Q.model_copy(update={"rows": 1})), old).context_length == 2048


def test_changed_base_must_still_fit_its_adapters(w: World) -> None:
    add(w, spec(), sql=adapter_info())
    longer = base_info("/m/a2").model_copy(update={"context_length": 4096})
    add(w, ModelSpec(name="a", source="/m/a2"), a=longer)
    assert w.state.models["sql"].card.info.context_length == 4096
    smaller = base_info("/m/a3", Q.model_copy(update={"rows": 32}))
    assert add(w, ModelSpec(name="a", source="/m/a3"), a=smaller).code == "checkpoint_invalid"
    assert w.state.models["a"].card.spec.source == "/m/a2"


def test_base_can_only_be_removed_with_its_adapters(w: World) -> None:
    add(w, spec(), sql=adapter_info())
    answer = w.admin(RemoveModelRequested(w.now, "r1", "a"))
    assert answer.code == "conflict"
    assert "sql" in answer.message
    assert w.admin(RemoveModelRequested(w.now, "r2", "a", with_adapters=True)) == Done()
    assert {e.name for e in w.sent(DeleteCatalog)} == {"a", "sql"}
    assert not w.state.models


def test_prune_does_not_remove_a_base_that_an_adapter_needs(w: World) -> None:
    add(w, spec(), sql=adapter_info())
    assert add(w, spec(), prune=True).code == "model_not_found"
    assert set(w.state.models) == {"a", "sql"}
    assert add(w, ModelSpec(name="a", source="/m/a", aliases=("al",)), prune=True).removed == ("sql",)


def test_context_above_the_models_limit_is_refused(w: World) -> None:
    asked = ModelSpec(name="b", source="/m/b", max_model_len=100_000_000)
    refused = add(w, asked, b=base_info("/m/b"))
    assert isinstance(refused, ErrorBody)
    assert "context of 2048 tokens" in refused.message
    assert "b" not in w.state.models
    assert add(w, asked.model_copy(update={"max_model_len": 2048}), b=base_info("/m/b")).added == ("b",)


def test_model_with_code_of_its_own_cannot_ask_for_a_shared_process(w: World) -> None:
    asked = ModelSpec(name="b", source="/m/b", isolation="shared", trust_remote_code=True)
    refused = add(w, asked, b=base_info("/m/b"))
    assert isinstance(refused, ErrorBody)
    assert refused.param == "isolation"
    assert "never shared" in refused.message
    assert add(w, asked.model_copy(update={"isolation": "dedicated"}), b=base_info("/m/b")).added == ("b",)
