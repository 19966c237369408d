"""The gateway's admin API with its messages, as the command line calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from shared.contracts.admin import (
    AddModels,
    ClusterView,
    ExplainPlan,
    Migrate,
    MigrationsViewed,
    ModelAsleep,
    ModelAwake,
    ModelPulled,
    ModelsAdded,
    PlanExplained,
    PullOptions,
    PullsCancelled,
    SleepModel,
    WakeModel,
)
from shared.contracts.logs import LogRead, LogsListed
from shared.contracts.migration import MigrationRecord
from shared.contracts.models import ModelSpec
from shared.contracts.traces import LoadTrace, RequestTrace, TracePage
from thaw.cli.gateway import Gateway
from thaw.errors import CommandError

M = TypeVar("M", bound=BaseModel)
_DAY_S = 86_400.0
_TIMEOUT = httpx.Timeout(15.0, connect=3.0)


class Api(Gateway):
    """Client of a gateway whose responses are messages.

    Raises:
        CommandError: Any call failed; the message is the gateway's, with a remedy.
    """

    def client(self, timeout: httpx.Timeout) -> httpx.Client:
        """Make an HTTP client, which the caller closes.

        A mesh is called without the environment's proxies, but with its authorities
        (SSL_CERT_FILE).
        """
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, verify=self._make_ssl_context())

    def _get(self, reply: type[M], method: str, path: str, body: BaseModel | None = None, **options: Any) -> M:
        data = self.request(method, path, body.model_dump_json() if body is not None else None, **options)
        try:
            return reply.model_validate(data)
        except ValidationError as e:
            raise CommandError(f"The gateway's answer to {path} is not understood.", "Is it of another version of Thaw?") from e

    def is_ready(self) -> bool:
        """True if the gateway says it can serve."""
        try:
            with self.client(_TIMEOUT) as client:
                return client.get("/ready").is_success
        except (httpx.HTTPError, httpx.InvalidURL):
            return False

    def cluster(self) -> ClusterView:
        return self._get(ClusterView, "GET", "/admin/v1/cluster")

    def brief_cluster(self) -> ClusterView:
        """Return the cluster without candidates and measurements of plans."""
        return self._get(ClusterView, "GET", "/admin/v1/cluster?brief=true")

    def add_models(
        self, specs: tuple[ModelSpec, ...], *, prune: bool = False, reread: bool = False, replace: bool = False
    ) -> ModelsAdded:
        limit = AddModels.usual_ms() / 1e3
        request = AddModels(specs=specs, prune=prune, reread=reread, replace=replace)
        return self._get(ModelsAdded, "POST", "/admin/v1/models", request, timeout=limit)

    def remove_model(self, name: str, *, with_adapters: bool = False) -> None:
        params = {"adapters": "true"} if with_adapters else {}
        self.request("DELETE", f"/admin/v1/models/{quote(name, safe='')}", timeout=120.0, **params)

    def wake(self, name: str) -> ModelAwake:
        return self._get(ModelAwake, "POST", f"/admin/v1/models/{quote(name, safe='')}/wake", timeout=WakeModel.usual_ms() / 1e3)

    def sleep(self, name: str) -> ModelAsleep:
        return self._get(ModelAsleep, "POST", f"/admin/v1/models/{quote(name, safe='')}/sleep", timeout=SleepModel.usual_ms() / 1e3)

    def pull(self, name: str, options: PullOptions) -> ModelPulled:
        """Wait for a pull, at most a day."""
        return self._get(ModelPulled, "POST", f"/admin/v1/models/{quote(name, safe='')}/pull", options, timeout=_DAY_S)

    def cancel_pulls(self, name: str, node: str | None, tier: str | None) -> PullsCancelled:
        """Cancel the pulls of a model in progress, of one node or tier only if they are given."""
        params = {key: value for key, value in (("node", node), ("tier", tier)) if value is not None}
        return self._get(PullsCancelled, "DELETE", f"/admin/v1/models/{quote(name, safe='')}/pull", None, **params)

    def explain(self, asked: ExplainPlan) -> PlanExplained:
        return self._get(PlanExplained, "POST", "/admin/v1/explain", asked)

    def change_node(self, node: str, action: str) -> None:
        self.request("POST", f"/admin/v1/nodes/{quote(node, safe='')}/{action}", timeout=60.0)

    def remove_node(self, node: str) -> None:
        self.request("DELETE", f"/admin/v1/nodes/{quote(node, safe='')}", timeout=60.0)

    def node_logs(self, node: str) -> LogsListed:
        return self._get(LogsListed, "GET", f"/admin/v1/nodes/{quote(node, safe='')}/logs")

    def read_log(self, node: str, name: str, lines: int, after: int | None = None) -> LogRead:
        """Return the last lines of a log of a node, or the last of those after a position."""
        path = f"/admin/v1/nodes/{quote(node, safe='')}/logs/{quote(name, safe='')}?lines={lines}"
        return self._get(LogRead, "GET", path if after is None else f"{path}&after={after}")

    def migrate(
        self, what: str, *, is_instance: bool, node: str | None, device: str | None, wait: bool
    ) -> tuple[MigrationRecord, ...]:
        named = {"instance_id": what} if is_instance else {"request_id": what}
        order = Migrate(node=node, device=device, wait=wait, **named)
        return self._get(MigrationsViewed, "POST", "/admin/v1/migrations", order, timeout=Migrate.usual_ms() / 1e3).migrations

    def migrations(self, limit: int = 50, migration_id: str | None = None) -> list[MigrationRecord]:
        """Return the migrations of the last hour, the latest first, or one of them."""
        path = "/admin/v1/migrations" + (f"/{quote(migration_id, safe='')}" if migration_id else "")
        return list(self._get(MigrationsViewed, "GET", path, limit=str(limit)).migrations)

    def trace(self, request_id: str | None) -> RequestTrace:
        return self._get(RequestTrace, "GET", f"/admin/v1/traces/{quote(request_id or 'last', safe='')}")

    def traces(self) -> Iterator[RequestTrace]:
        """All that are kept, the oldest first."""
        begin: int | None = 1
        while begin is not None:
            page = self._get(TracePage, "GET", f"/admin/v1/traces?from={begin}&limit=500")
            yield from page.traces
            begin = page.next

    def load_trace(self, plan_id: str) -> LoadTrace:
        return self._get(LoadTrace, "GET", f"/admin/v1/traces/loads/{quote(plan_id, safe='')}")
