"""The gateway's admin API, as the command line calls it."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
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
    ModelsAdded,
    PlanExplained,
    SleepModel,
    WakeModel,
)
from shared.contracts.migration import MigrationRecord
from shared.contracts.models import ModelSpec
from shared.contracts.traces import LoadTrace, RequestTrace, TracePage
from thaw.errors import CommandError, NotRunning
from thaw.launcher.home import Home, read_json

M = TypeVar("M", bound=BaseModel)
_TIMEOUT = httpx.Timeout(15.0, connect=3.0)
_SLACK_S = 10.0
_TAKEOVER_S = 6.0
_PAUSE_S = 0.2
_NOBODY_HEARD = "unreachable"
_REMEDIES = {
    "model_not_found": "`thaw models list` shows those that are registered; `thaw models add NAME SOURCE` adds one.",
    "invalid_api_key": "Set THAW_API_KEY for `thaw chat` and the demo (`thaw keys add NAME` makes a key), THAW_ADMIN_KEY for other commands.",
    "unreachable": "`thaw doctor` shows which part is missing; it may be starting again.",
    "unavailable": "Try again; `thaw ps` and `thaw doctor` show whether a part of the mesh is missing.",
    "insufficient_memory": "`thaw explain MODEL` shows what was considered; give the device more room, or a smaller max_model_len.",
    "checkpoint_invalid": "Repair the model's files or download them again; if it was loaded before, register it again too.",
    "unsupported_architecture": "The builtin engine runs what transformers' auto classes run.",
    "engine_killed": "Something else on its node killed the engine; `thaw ps --json` names the instance.",
    "engine_failed": "`thaw ps --json` names the instance that failed; `thaw logs INSTANCE` shows all that it said.",
    "queue_full": "Try again later, or raise queue.max_waiting of the model.",
    "not_found": "",
}


class Api:
    """Raises `CommandError` for everything that fails: the gateway's own words, and what to do. `own`: it is of this machine, and its
    certificate, if it has one, for a name of the outside."""

    def __init__(self, url: str, admin_key: str | None = None, api_key: str | None = None, *, own: bool = False) -> None:
        self.url = url.rstrip("/")
        self._admin_key = admin_key
        self.api_key = api_key
        self.own = own

    @classmethod
    def find(cls, home: Home | None = None) -> Api:
        """The gateway that THAW_URL names, or that of the mesh under THAW_HOME."""
        key = os.environ.get("THAW_ADMIN_KEY") or _secret("thaw_admin_key")
        if url := os.environ.get("THAW_URL"):
            if not url.startswith(("http://", "https://")):
                raise CommandError(f"THAW_URL is {url!r}.", "Set it to http://HOST:PORT of a gateway.", code="bad_setting")
            return cls(url, key, os.environ.get("THAW_API_KEY"))
        local = cls.local(home or Home.from_environment())
        return cls(local.url, key or local._admin_key, local.api_key, own=True)

    @classmethod
    def local(cls, home: Home) -> Api:
        """The gateway of the mesh under `home`, whatever THAW_URL and THAW_ADMIN_KEY say: they may be another mesh's."""
        endpoints = read_json(home.endpoints_file)
        if endpoints is None:
            raise NotRunning(home.root)
        return cls(str(endpoints["url"]), str(endpoints["admin_key"]), os.environ.get("THAW_API_KEY"), own=True)

    def client(self, timeout: httpx.Timeout) -> httpx.Client:
        """A client to be closed by its user. Proxies of the environment are not for a mesh; its authorities (SSL_CERT_FILE) are."""
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, verify=self._trusted())

    def _trusted(self) -> ssl.SSLContext | bool:
        if self.own or not self.url.startswith("https:"):
            return False
        named = any(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
        return ssl.create_default_context() if named else True

    def request(self, method: str, path: str, body: BaseModel | None = None, *, timeout: float | None = None, **params: str) -> Any:
        """One call's JSON. While no scheduler leads (one was killed, the next takes over within 3 s) nobody has heard the call yet,
        so it is made again."""
        deadline = time.monotonic() + _TAKEOVER_S
        while True:
            try:
                return self._request(method, path, body, timeout, params)
            except CommandError as e:
                if e.code != _NOBODY_HEARD or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _request(self, method: str, path: str, body: BaseModel | None, timeout: float | None, params: dict[str, str]) -> Any:
        headers = {"authorization": f"Bearer {self._admin_key}"} if self._admin_key else {}
        content = body.model_dump_json() if body is not None else None
        if content is not None:
            headers["content-type"] = "application/json"
        limit = httpx.Timeout(timeout + _SLACK_S, connect=3.0) if timeout else _TIMEOUT
        try:
            with self.client(limit) as client:
                response = client.request(method, path, content=content, headers=headers, params=params or None)
        except httpx.ConnectError as e:
            raise self.unreachable(e) from e
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise CommandError(
                f"The gateway at {self.url} did not answer ({type(e).__name__}: {e}).", "`thaw logs gateway` says why."
            ) from e
        if response.is_error:
            raise error_of(response)
        try:
            return response.json() if response.content else {}
        except ValueError as e:
            raise CommandError(
                f"What answers at {self.url} is no gateway of Thaw.", "Set THAW_URL to one.", code="no_gateway"
            ) from e

    def unreachable(self, error: httpx.ConnectError) -> CommandError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return CommandError(
                f"The certificate of {self.url} is not trusted: {error}",
                "Set SSL_CERT_FILE to the certificate of its authority.",
                code="certificate",
            )
        return CommandError(
            f"No gateway answers at {self.url}.",
            "`thaw up` starts the mesh; `thaw logs gateway` says why if it does run; THAW_URL names another one.",
            code="no_gateway",
        )

    def _get(self, reply: type[M], method: str, path: str, body: BaseModel | None = None, **options: Any) -> M:
        data = self.request(method, path, body, **options)
        try:
            return reply.model_validate(data)
        except ValidationError as e:
            raise CommandError(f"The gateway's answer to {path} is not understood.", "Is it of another version of Thaw?") from e

    def ready(self) -> bool:
        """Whether the gateway says it can serve."""
        try:
            with self.client(_TIMEOUT) as client:
                return client.get("/ready").is_success
        except (httpx.HTTPError, httpx.InvalidURL):
            return False

    def cluster(self) -> ClusterView:
        return self._get(ClusterView, "GET", "/admin/v1/cluster")

    def add_models(self, specs: tuple[ModelSpec, ...], *, prune: bool = False, reread: bool = False) -> ModelsAdded:
        limit = AddModels.usual_ms() / 1e3
        request = AddModels(specs=specs, prune=prune, reread=reread)
        return self._get(ModelsAdded, "POST", "/admin/v1/models", request, timeout=limit)

    def remove_model(self, name: str, *, with_adapters: bool = False) -> None:
        params = {"adapters": "true"} if with_adapters else {}
        self.request("DELETE", f"/admin/v1/models/{quote(name, safe='')}", timeout=120.0, body=None, **params)

    def wake(self, name: str) -> ModelAwake:
        return self._get(ModelAwake, "POST", f"/admin/v1/models/{quote(name, safe='')}/wake", timeout=WakeModel.usual_ms() / 1e3)

    def sleep(self, name: str) -> ModelAsleep:
        return self._get(ModelAsleep, "POST", f"/admin/v1/models/{quote(name, safe='')}/sleep", timeout=SleepModel.usual_ms() / 1e3)

    def explain(self, asked: ExplainPlan) -> PlanExplained:
        return self._get(PlanExplained, "POST", "/admin/v1/explain", asked)

    def change_node(self, node: str, action: str) -> None:
        self.request("POST", f"/admin/v1/nodes/{quote(node, safe='')}/{action}", timeout=60.0)

    def migrate(
        self, what: str, *, is_instance: bool, node: str | None, device: str | None, wait: bool
    ) -> tuple[MigrationRecord, ...]:
        named = {"instance_id": what} if is_instance else {"request_id": what}
        order = Migrate(node=node, device=device, wait=wait, **named)
        return self._get(MigrationsViewed, "POST", "/admin/v1/migrations", order, timeout=Migrate.usual_ms() / 1e3).migrations

    def migrations(self, limit: int = 50, migration_id: str | None = None) -> list[MigrationRecord]:
        """Those under way and those of the last hour, the latest first; or one."""
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


def _secret(name: str) -> str | None:
    """A file of THAW_SECRETS_DIR, as the services' settings read it: in a gateway's container the admin key lies there."""
    directory = os.environ.get("THAW_SECRETS_DIR")
    path = Path(directory) / name if directory else None
    return path.read_text().strip() if path is not None and path.is_file() else None


def error_of(response: httpx.Response) -> CommandError:
    """The OpenAI-shaped error of `response` as ours."""
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), str(error.get("code") or error.get("type") or response.status_code)
    except (ValueError, KeyError, TypeError):
        message, code = f"HTTP {response.status_code} from {response.url.path}", str(response.status_code)
    return CommandError(message, _REMEDIES.get(code, ""), code=code)
