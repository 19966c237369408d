"""Adapters in the tables of `thaw ps` and `thaw models list`."""

from __future__ import annotations

import io

from rich.console import Console

from shared.contracts.admin import ClusterView, ModelView, NodeView
from shared.contracts.engine import EngineLoad, LoadedAdapter
from shared.contracts.model_info import AdapterInfo
from shared.contracts.node import InstanceState
from tests.unit.cli.views import VIEW, instance
from thaw.cli.listing import adapters_after_bases, shown_name
from thaw.cli.ps import show_models


def adapter(name: str) -> ModelView:
    spec = VIEW.card.spec.model_copy(update={"name": name, "base": "m"})
    info = VIEW.card.info.model_copy(update={"adapter": AdapterInfo(rank=8, alpha=8)})
    return VIEW.model_copy(update={"card": VIEW.card.model_copy(update={"spec": spec, "info": info})})


def test_adapter_is_listed_below_its_base_with_its_location() -> None:
    load = EngineLoad(adapters=(LoadedAdapter(name="sql", nbytes=3 << 20, active=2),))
    ready = instance(InstanceState.READY).model_copy(update={"load": load})
    cluster = ClusterView(
        scheduler="s",
        epoch=1,
        models=(adapter("awake"), VIEW, adapter("sql")),
        nodes=(NodeView(node="node-0", alive=True, instances=(ready,)),),
    )
    assert [shown_name(v.card) for v in adapters_after_bases(cluster.models)] == ["m", "m:awake", "m:sql"]
    file = io.StringIO()
    show_models(Console(file=file, width=160), cluster)
    rows = {line.split()[0]: line.split() for line in file.getvalue().splitlines()}
    assert rows["m:awake"][1:] == ["cold"]
    assert rows["m:sql"][1:] == ["loaded", "node-0", "cpu:0", "3.0", "MiB", "2", "i-ready"]
