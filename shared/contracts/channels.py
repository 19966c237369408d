"""Map subjects to messages; the AsyncAPI document is generated from this map.

A test holds it against the contracts: every message class of this package is on some channel.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts import (
    admin,
    audit,
    base,
    demand,
    engine,
    executor,
    inference,
    keys,
    latencies,
    limits,
    loader,
    logs,
    migration,
    node,
    objectives,
    request_body,
    stages,
    subjects,
    traces,
    usage,
)
from shared.contracts.base import Message


@dataclass(frozen=True)
class Channel:
    """`replies` is empty for events.

    `listener` is the process that receives `messages`.
    """

    name: str
    address: str
    listener: str
    summary: str
    messages: tuple[type[Message], ...]
    replies: tuple[type[Message], ...] = ()


_P = subjects.PREFIX

CHANNELS: tuple[Channel, ...] = (
    Channel(
        "demand",
        subjects.DEMAND,
        "scheduler (leader)",
        "What waits in a gateway for a model; a level, repeated every second.",
        (demand.Demand,),
        (demand.DemandNoted, base.Failure),
    ),
    Channel(
        "objectives",
        subjects.OBJECTIVES,
        "scheduler (leader)",
        "How many requests met their model's objective; repeated until acknowledged.",
        (objectives.ReportObjectives,),
        (base.Done, base.Failure),
    ),
    Channel(
        "usage",
        subjects.USAGE,
        "scheduler (leader)",
        "What finished requests used, repeated until recorded; and what keys have spent.",
        (usage.ReportUsage, usage.ViewSpending),
        (usage.UsageRecorded, usage.SpendingViewed, base.Failure),
    ),
    Channel(
        "admin",
        subjects.ADMIN,
        "scheduler (leader)",
        "What operators ask.",
        (
            admin.AddModels,
            admin.RemoveModel,
            admin.WakeModel,
            admin.SleepModel,
            admin.PullModel,
            admin.CancelPulls,
            admin.ExplainPlan,
            admin.ChangeNode,
            admin.ViewCluster,
            admin.Migrate,
            admin.ViewMigrations,
            usage.ViewUsage,
        ),
        (
            admin.ModelsAdded,
            admin.ModelAwake,
            admin.ModelAsleep,
            admin.ModelPulled,
            admin.PullsCancelled,
            admin.PlanExplained,
            admin.ClusterView,
            admin.MigrationsViewed,
            usage.UsageViewed,
            base.Done,
            base.Failure,
        ),
    ),
    Channel(
        "loadFailed",
        subjects.LOAD_FAILED,
        "gateway",
        "A model could not be made ready: fail those who wait.",
        (demand.LoadFailed,),
    ),
    Channel("statusWanted", subjects.STATUS_WANTED, "nodeagent", "Send a status now.", (node.StatusWanted,)),
    Channel(
        "nodeCommand",
        f"{_P}.node.{{node}}.command",
        "nodeagent",
        "Fenced commands about instances.",
        (node.StartInstance, node.StopInstance, node.SuspendInstance, node.ResumeInstance),
        (base.Done, base.Failure),
    ),
    Channel(
        "nodeStatus",
        f"{_P}.node.{{node}}.status",
        "scheduler, gateway, loader",
        "The whole state of a node, on every change and every second.",
        (node.NodeStatus,),
    ),
    Channel(
        "nodeChanges",
        f"{_P}.node.{{node}}.changes",
        "scheduler, gateway",
        "The changes of a node with many instances, between two statuses.",
        (node.NodeChanges,),
    ),
    Channel(
        "nodeLogs",
        f"{_P}.node.{{node}}.logs",
        "nodeagent",
        "The last lines of the logs of a node, for admin keys.",
        (logs.ListLogs, logs.ReadLog),
        (logs.LogsListed, logs.LogRead, base.Failure),
    ),
    Channel("engineReport", f"{_P}.node.{{node}}.engines", "nodeagent", "An engine about itself.", (engine.EngineReport,)),
    Channel(
        "loaderCommand",
        f"{_P}.loader.{{node}}.command",
        "loader",
        "Inspect, prepare, attach, release and prefetch weights.",
        (
            loader.InspectModel,
            loader.PrepareWeights,
            loader.AttachWeights,
            loader.ReleaseWeights,
            loader.PrefetchWeights,
            loader.CancelPrefetch,
            loader.ExpectModels,
            loader.FetchModelFiles,
            audit.AuditMemory,
        ),
        (
            loader.Inspected,
            loader.WeightsAttached,
            loader.WeightsReleased,
            loader.ModelFilesFetched,
            audit.MemoryAudited,
            base.Done,
            base.Failure,
        ),
    ),
    Channel(
        "loaderFiles",
        f"{_P}.loader.{{node}}.files",
        "loader",
        "The small files of a model, for gateways on other machines that count tokens with them.",
        (loader.ReadModelFile,),
        (loader.ModelFilePart, base.Failure),
    ),
    Channel(
        "loaderStatus",
        f"{_P}.loader.{{node}}.status",
        "scheduler, nodeagent, engine, loader",
        "What a loader holds, on every change and every second.",
        (loader.LoaderStatus,),
    ),
    Channel(
        "infer",
        f"{_P}.engine.{{instance}}.infer",
        "engine",
        "A request to an engine; answers arrive on the `replies` channel.",
        (inference.InferRequest,),
    ),
    Channel(
        "engineControl",
        f"{_P}.engine.{{instance}}.control",
        "engine",
        "Ping, drain, cancel, load and drop an adapter; sleep, wake and probe a hosted engine; what it serves, and taking it elsewhere.",
        (
            engine.PingEngine,
            engine.DrainEngine,
            inference.CancelInfer,
            engine.DropAdapter,
            engine.LoadAdapter,
            engine.SleepEngine,
            engine.WakeEngine,
            engine.ProbeEngine,
            engine.ChangeModel,
            migration.ListRequests,
            migration.ReadTokens,
            migration.PrepareResume,
            migration.ForgetResume,
            migration.YieldInfer,
        ),
        (
            engine.EngineReport,
            engine.EngineAsleep,
            engine.EngineProbed,
            migration.RequestsListed,
            migration.TokensRead,
            migration.ResumePrepared,
            base.Done,
            base.Failure,
        ),
    ),
    Channel(
        "executorControl",
        f"{_P}.executor.{{executor}}.control",
        "executor",
        "Attach and detach instances.",
        (executor.AttachInstance, executor.DetachInstance, executor.PingExecutor),
        (executor.InstanceAttached, executor.InstanceDetached, executor.ExecutorReport, base.Failure),
    ),
    Channel(
        "stageAddress",
        f"{_P}.stages.{{group}}",
        "engine",
        "Where a stage of a group accepts the stage before it, until they are connected.",
        (stages.StageListening,),
    ),
    Channel(
        "replies",
        f"{_P}.replies.{{gateway}}.{{request}}",
        "gateway",
        "What an engine generates, numbered without gaps.",
        (
            inference.InferStarted,
            inference.InferChunk,
            inference.InferFinished,
            inference.EmbeddingsPart,
            inference.EmbeddingsFinished,
            inference.InferResponse,
            inference.InferData,
            inference.InferEnd,
            inference.InferRaw,
            inference.InferYielded,
            inference.InferFailed,
        ),
    ),
    Channel(
        "bodyParts",
        f"{_P}.replies.{{gateway}}.body.read",
        "gateway",
        "Parts of a request's body that exceeds a message; a reply is a line of JSON and then the bytes themselves.",
        (request_body.ReadBodyPart,),
        (request_body.BodyPart, base.Failure),
    ),
    Channel(
        "gatewayControl",
        f"{_P}.gateway.{{gateway}}.control",
        "gateway",
        "Continue a running request on another instance.",
        (migration.MoveRequest,),
        (migration.RequestMoved, base.Failure),
    ),
    Channel(
        "gatewayPresent",
        subjects.GATEWAY_PRESENT,
        "gateway",
        "A gateway exists, or leaves; repeated while a key has limits.",
        (limits.GatewayPresent,),
    ),
    Channel(
        "gatewayLimits",
        f"{_P}.gateway.{{gateway}}.limits",
        "gateway",
        "Lease a share of a key's limits from the gateway that owns the key.",
        (limits.LeaseLimits,),
        (limits.LimitsLeased, base.Failure),
    ),
    Channel(
        "findRequest",
        subjects.FIND_REQUEST,
        "gateway",
        "Which running request has this id for its client.",
        (migration.FindRequest,),
        (migration.RequestFound,),
    ),
    Channel(
        "viewLatencies",
        subjects.VIEW_LATENCIES,
        "gateway",
        "What every gateway has of a model's latencies in the last hour.",
        (latencies.ViewLatencies,),
        (latencies.LatenciesViewed,),
    ),
    Channel(
        "migrations",
        f"$KV.{subjects.MIGRATIONS_BUCKET}.{{migration}}",
        "migrator, scheduler",
        "Orders to move requests and how far they are, written with compare-and-set by the scheduler first and then by the holder of the lease.",
        (migration.MigrationRecord,),
    ),
    Channel(
        "requestTrace",
        f"{_P}.traces.request.{{request}}",
        "stream THAW_TRACES",
        "Where the time of a request went; written by its gateway after the response.",
        (traces.RequestTrace,),
    ),
    Channel(
        "loadTrace",
        f"{_P}.traces.load.{{plan}}",
        "stream THAW_TRACES",
        "Where the time of a model load went; written by the scheduler.",
        (traces.LoadTrace,),
    ),
    Channel(
        "keyChanged",
        subjects.AUDIT_KEYS,
        "stream THAW_AUDIT",
        "Who changed which API key; written by a gateway before the change.",
        (keys.KeyChanged,),
    ),
)
