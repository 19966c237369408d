"""The view of the cluster that the console's pages receive."""

from __future__ import annotations

from services.gateway.domain.console_view import cluster_view
from shared.contracts.admin import ClusterView, LoaderView, NodeView
from shared.contracts.loader import LinkStatus


def test_bandwidth_that_is_a_setting_is_labelled() -> None:
    links = (LinkStatus(link="device:a", bytes_per_second=5.0, is_paced=True), LinkStatus(link="ssd:b", bytes_per_second=7.0))
    node = NodeView(node="n", alive=True, loader=LoaderView(links=links))
    view = cluster_view(ClusterView(scheduler="s", epoch=1, nodes=(node,)))
    assert [(link["link"], link["is_paced"]) for link in view["nodes"]["n"]["links"]] == [("device:a", True), ("ssd:b", False)]
