"""`GET /admin/v1/doctor`: what is wrong with the mesh, as `thaw doctor` finds it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.errors import json_response
from services.gateway.http.scopes import ScopedRoute
from services.gateway.loop import Gateway
from shared.contracts import subjects
from shared.contracts.admin import ClusterView, ViewCluster
from shared.contracts.findings import Diagnosis, Finding
from shared.contracts.keys import KeyList
from shared.diagnosis import examine_access, examine_admin_access, examine_cluster, examine_gateway, report_no_scheduler
from shared.errors import ThawError

PATH = "/admin/v1/doctor"


class Doctor:
    """Examines this gateway, the scheduler's view of the cluster, and access to the endpoint."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[ScopedRoute]:
        return [ScopedRoute(PATH, self.diagnose, methods=["GET"], needs="read-only")]

    async def diagnose(self, request: Request) -> Response:
        """Return the findings. A part that does not answer is a finding, not an error."""
        gateway = self._gateway
        found = [examine_gateway(f"gateway {gateway.id}", gateway.readiness.not_ready_reasons())]
        try:
            view = await gateway.mesh.request(subjects.ADMIN, ViewCluster(brief=True), ClusterView, with_reports=True)
        except ThawError as e:
            found.append(report_no_scheduler(e.message))
        else:
            found += examine_cluster(view)
        found += self._examine_access()
        return json_response(Diagnosis.from_findings(found).model_dump(mode="json"))

    def _examine_access(self) -> list[Finding]:
        authorizer, settings = self._gateway.authorizer, self._gateway.settings
        keys = KeyList(
            keys=tuple(authorizer.store.list_keys()), configured=len(authorizer.configured), required=authorizer.required
        )
        host = settings.published_address or settings.gateway_host
        return [examine_access(host, keys), examine_admin_access(guarded=authorizer.guards_admin)]
