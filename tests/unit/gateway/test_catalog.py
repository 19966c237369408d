"""Model lookup by name: its own, an alias, an adapter's, or `base:adapter`."""

from __future__ import annotations

import pytest

from services.gateway.domain.catalog import Catalog
from services.gateway.domain.engine_request import EngineRequest
from shared.contracts.inference import InferRequest
from shared.contracts.model_info import AdapterInfo, LinearShape
from shared.contracts.models import ModelCard, ModelSpec
from shared.errors import ModelNotFound
from tests.support.fake_node import model_info


def card(name: str, base: str | None = None, *aliases: str) -> ModelCard:
    info = model_info(f"/m/{name}")
    if base is not None:
        shape = LinearShape(name="q", rows=1, columns=1)
        adapter = AdapterInfo(rank=2, alpha=3, alpha_pattern={"q": 5}, modules=(shape,))
        info = info.model_copy(update={"adapter": adapter, "modules": (shape,)})
    return ModelCard(spec=ModelSpec(name=name, source=f"/m/{name}", base=base, aliases=aliases), info=info, created=1)


@pytest.fixture
def catalog() -> Catalog:
    catalog = Catalog()
    for one in (card("llama", None, "chat"), card("qwen"), card("sql", "llama", "db"), card("orphan", "gone")):
        catalog.put(one)
    return catalog


@pytest.mark.parametrize("name", ["sql", "db", "llama:sql", "chat:sql", "llama:db"])
def test_adapter_name_resolves_to_its_base(catalog: Catalog, name: str) -> None:
    assert catalog.resolve(name).name == "llama"
    adapter = catalog.lora_adapter(name)
    assert adapter is not None
    assert adapter.name == "sql"


def test_a_model_is_no_adapter(catalog: Catalog) -> None:
    assert catalog.resolve("chat").name == "llama"
    assert catalog.lora_adapter("chat") is None


@pytest.mark.parametrize(
    "name", ["orphan", "gone:orphan", "qwen:sql", "sql:llama", "llama:qwen", "llama:", ":sql", "a:llama:sql", ""]
)
def test_unknown_names_do_not_exist(catalog: Catalog, name: str) -> None:
    with pytest.raises(ModelNotFound):
        catalog.resolve(name)


def test_request_for_an_adapter_carries_its_metadata(catalog: Catalog) -> None:
    ask = EngineRequest("chat", b"{}", lora_adapter=catalog.lora_adapter("sql"))
    fields = ask.envelope()
    adapter = InferRequest.model_validate({"request_id": "r", "instance_id": "i", "model": "llama", "body": {}, **fields}).adapter
    assert adapter is not None
    assert (adapter.name, adapter.spec.base, adapter.info.revision) == ("sql", "llama", "rev-/m/sql")
    assert adapter.info.adapter is not None
    assert adapter.info.adapter.scale_of("q") == 2.5
    assert adapter.info.modules == adapter.info.adapter.modules == ()
    assert "adapter" not in EngineRequest("chat", b"{}").envelope()
