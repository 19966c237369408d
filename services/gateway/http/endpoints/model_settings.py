"""`/admin/v1/models/NAME/settings`: read a model's settings, and change some of them."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.domain.catalog import unknown_model
from services.gateway.domain.model_change import list_changes, merge_settings, version_of
from services.gateway.domain.model_yaml import model_yaml
from services.gateway.http.endpoints.admin import ask_scheduler, refuse_commands
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.scopes import ScopedRoute, caller_of
from services.gateway.loop import Gateway
from shared.contracts.admin import AddModels, ChangeSettings, ClusterView, ModelsAdded, SettingsChanged, ViewCluster
from shared.contracts.models import ModelSpec
from shared.errors import Conflict

_MAX_BODY = 64 * 1024


class ModelSettings:
    """Reads settings from the catalogue, and has the scheduler change them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[ScopedRoute]:
        path = "/admin/v1/models/{name:path}/settings"
        return [
            ScopedRoute(path, self.read, methods=["GET"], needs="read-only"),
            ScopedRoute(path, self.change, methods=["PATCH"], needs="admin"),
        ]

    async def read(self, request: Request) -> Response:
        """Return the settings: values without secrets, and the thaw.yaml that gives them."""
        card = self._gateway.catalog.find_model(request.path_params["name"])
        public = card.spec.without_secrets()
        spec = card.spec if caller_of(request.scope).is_admin else public
        settings = public.model_dump(mode="json")
        return json_response({"name": card.name, "settings": settings, "yaml": model_yaml(spec)})

    async def change(self, request: Request) -> Response:
        """Change settings, or with `dry_run` list what would change.

        The scheduler's view has them: this gateway's catalogue may lack a change of a moment ago.
        """
        body = validate_body(ChangeSettings, await read_body(request.scope, request.receive, _MAX_BODY))
        name = self._gateway.catalog.find_model(request.path_params["name"]).name
        view = await ask_scheduler(self._gateway, ViewCluster(brief=True), ClusterView)
        before = next((m.card.spec for m in view.models if m.card.name == name), None)
        if before is None:
            raise unknown_model(name)
        version = version_of(before)
        if body.version not in (None, version):
            raise Conflict(f"{name} has been changed since its settings were shown. Show the change again")
        after = validate_body(ModelSpec, json.dumps(merge_settings(before, body.settings)).encode())
        if not self._gateway.authorizer.guards_admin:
            refuse_commands((after,))
        changes = list_changes(before, after)
        if changes and not body.dry_run:
            await ask_scheduler(self._gateway, AddModels(specs=(after,), before=(before,)), ModelsAdded)
            await self._gateway.readiness.catch_up_catalog()
        done = SettingsChanged(name=name, version=version, changes=changes, is_applied=not body.dry_run)
        return json_response(done.model_dump(mode="json"))
