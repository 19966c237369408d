"""Explain decisions: the plan of a model or request, its place in the queue, and what-if plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError
from pydantic import ValidationError

from services.scheduler.adapters import clock
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.what_if import evaluate_what_if, queue_position
from shared.contracts import subjects
from shared.contracts.admin import ExplainPlan, PlanExplained
from shared.contracts.migration import RequestFound
from shared.contracts.plans import PlanRecord
from shared.contracts.traces import RequestTrace
from shared.errors import InvalidRequest, NotFound, Unavailable

if TYPE_CHECKING:
    from shared.messaging import Mesh


class Explainer:
    """Reads the loop's state, and older records from the database and the trace stream."""

    def __init__(self, mesh: Mesh, state: ClusterState, repository: Repository, policy: Policy, migrations: Migrations) -> None:
        self._mesh = mesh
        self._migrations = migrations
        self._state = state
        self._repository = repository
        self._policy = policy

    async def explain(self, asked: ExplainPlan) -> PlanExplained:
        """Answer an explain request.

        Raises:
            InvalidRequest: It names nothing to explain.
            NotFound: The named model, plan or request is unknown.
        """
        if asked.about is not None:
            return await self._explain_subject(asked, asked.about)
        if asked.plan_id is not None:
            return await self._of_plan(asked, asked.plan_id)
        if asked.request_id is not None:
            return await self._of_request(asked, asked.request_id)
        if asked.model is None:
            raise InvalidRequest("The request names nothing to explain. Give a model, a plan_id or a request_id")
        return await self._of_model(asked, asked.model)

    async def _explain_subject(self, asked: ExplainPlan, name: str) -> PlanExplained:
        """Explain a name: 1. a model, 2. a plan, 3. a request."""
        if self._state.serving_model(name) is not None:
            return await self._of_model(asked, name)
        if await self._find(name) is not None:
            return await self._of_plan(asked, name)
        if (found := await self._of_known_request(asked, name)) is None:
            raise NotFound(f"{name!r} is no model (see `thaw models list`), and no plan or request of the last seven days")
        return found

    async def _of_plan(self, asked: ExplainPlan, plan_id: str) -> PlanExplained:
        plan = await self._find(plan_id)
        if plan is None:
            raise NotFound(f"No plan {plan_id!r}; plans are kept for seven days", param="plan_id")
        return self._explain_plan(asked, plan)

    async def _of_request(self, asked: ExplainPlan, request_id: str) -> PlanExplained:
        if (found := await self._of_known_request(asked, request_id)) is None:
            raise NotFound(f"No gateway has a request {request_id!r}, and no trace of the last seven days", param="request_id")
        return found

    async def _of_known_request(self, asked: ExplainPlan, request_id: str) -> PlanExplained | None:
        """Explain a request: 1. a finished one, 2. a running one. None: it is unknown."""
        if (trace := await self._trace(request_id)) is not None:
            return await self._of_trace(asked, trace)
        if (running := await self._migrations.find_request(request_id)) is not None:
            return await self._of_running(asked, request_id, running)
        return None

    async def _of_running(self, asked: ExplainPlan, request_id: str, running: RequestFound) -> PlanExplained:
        """Explain the plan that started its instance; while it waits, the model's last decision."""
        plan = None
        if running.instance_id is not None:
            instance = self._state.instances.get(running.instance_id)
            plan = await self._find(instance.plan_id) if instance is not None else None
            plan = plan or await self._repository.plan_of_instance(running.instance_id)
        explained = self._explain_plan(asked, plan) if plan is not None else await self._of_model(asked, running.model)
        return explained.model_copy(update={"running": running.model_copy(update={"request_id": request_id})})

    async def _of_trace(self, asked: ExplainPlan, trace: RequestTrace) -> PlanExplained:
        """Explain the plan that the request waited for, else the plan that started its instance."""
        plan = await self._find(trace.load_plan_id) if trace.load_plan_id else None
        if plan is None and trace.instance_id is not None:
            plan = await self._repository.plan_of_instance(trace.instance_id)
        if plan is None:
            raise NotFound(f"Request {trace.request_id} waited for no plan that is still kept", param="request_id")
        return self._explain_plan(asked, plan).model_copy(update={"request": trace})

    async def _of_model(self, asked: ExplainPlan, name: str) -> PlanExplained:
        model = self._state.serving_model(name)
        key = model.key if model else name
        plan = self._state.last_plan_of(key) or await self._repository.last_plan(key)
        if plan is None and (model is None or not asked.what_if):
            raise NotFound(f"Nothing has been decided for {name!r} yet; `thaw wake {name}` asks for a decision")
        return self._explain_plan(asked, plan or PlanRecord(plan_id="", model=key, created=0.0, trigger="", way="wait"))

    def _explain_plan(self, asked: ExplainPlan, plan: PlanRecord) -> PlanExplained:
        model, now = self._state.models.get(plan.model), clock.now()
        if model is None:
            if asked.what_if:
                raise NotFound(f"{plan.model} is no longer registered. Register it first")
            return PlanExplained(plan=plan)
        queue = queue_position(self._state, model, now)
        if not asked.what_if:
            return PlanExplained(plan=plan, queue=queue)
        found = evaluate_what_if(self._state, model, asked.what_if, now, self._policy)
        return PlanExplained(
            plan=found.plan, queue=queue, assumed=found.assumed, others=found.others, runs_already=found.runs_already
        )

    async def _find(self, plan_id: str) -> PlanRecord | None:
        return self._state.plans.get(plan_id) or await self._repository.plan(plan_id)

    async def _trace(self, request_id: str) -> RequestTrace | None:
        try:
            js = self._mesh.nc.jetstream(timeout=5)
            found = await js.get_last_msg(subjects.TRACE_STREAM, subjects.request_trace(request_id))
            return RequestTrace.model_validate_json(found.data or b"")
        except (NotFoundError, ValidationError):
            return None
        except (NatsError, TimeoutError) as e:
            raise Unavailable(f"Failed to read the traces: {type(e).__name__}", should_retry=True) from e
