"""Inspection of registered models, for every engine kind."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelSpec
from shared.errors import CheckpointInvalid
from weights.formats.foreign import describe_foreign
from weights.formats.known_architectures import check_known
from weights.sources.sources import Sources


def describe_model(spec: ModelSpec, sources: Sources) -> ModelInfo:
    """Describe the model of `spec` from its headers. Blocks.

    An engine that loads files by itself may use formats that have no segment.

    Raises:
        InvalidModel: The model cannot be served; also its subclasses.
        Unavailable: The source cannot be reached.
    """
    info = describe_foreign(spec) if spec.loads_itself else None
    info = info or sources.inspect(spec.source, trust_remote_code=spec.trust_remote_code)
    _refuse_division(spec, info)
    check_known(spec, info)
    return info


def _refuse_division(spec: ModelSpec, info: ModelInfo) -> None:
    """Raise `CheckpointInvalid` for files divided for other ranks than the model has."""
    if info.ranks == 1:
        return
    size = spec.engine_args.get("tensor_parallel_size", 1)
    if spec.engine != "vllm" or spec.loads_itself or not spec.stages == info.ranks == size:
        raise CheckpointInvalid(
            f"{info.source} belongs to a model divided for {info.ranks} ranks. Use the original, or engine: vllm with stages: {info.ranks} "
            f"and engine_args: load_format: thaw, tensor_parallel_size: {info.ranks}"
        )


class Inspections:
    """Inspections in progress.

    A repeated request waits for the first: NATS may have lost its reply.
    """

    def __init__(self, sources: Sources, threads: Executor) -> None:
        self._sources, self._threads = sources, threads
        self._running: dict[str, asyncio.Future[ModelInfo]] = {}

    async def describe(self, spec: ModelSpec) -> ModelInfo:
        """Return what `describe_model` returns; it continues if the caller is cancelled."""
        key = spec.model_dump_json()
        running = self._running.get(key)
        if running is None:
            running = asyncio.get_running_loop().run_in_executor(self._threads, describe_model, spec, self._sources)
            self._running[key] = running
            running.add_done_callback(lambda ended: self._end(key, ended))
        return await asyncio.shield(running)

    def _end(self, key: str, ended: asyncio.Future[ModelInfo]) -> None:
        del self._running[key]
        if not ended.cancelled():
            ended.exception()  # read, in case no request waits for it any more
