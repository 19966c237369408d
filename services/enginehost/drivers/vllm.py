"""vLLM's OpenAI server, as documented; tests run version 0.32 on cpu."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.enginehost.drivers.overlay import plugin_path
from services.enginehost.drivers.port import Command, Driver, flags
from services.enginehost.drivers.token_api import VllmTokens
from services.enginehost.http1 import Client, HttpError, HttpRequest, call, json_request
from services.enginehost.settings import HostSettings
from shared.contracts.inference import FairShare
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard
from shared.errors import EngineFailed, InvalidModel, UnsupportedParameter
from shared.template_key import can_change_model

_SLEEP_PATH = "/sleep"
SWITCH_PATH = "/thaw/model"
MIDDLEWARE = "weights.vllm_switch.ModelSwitch"
LATER_RANK = "weights.vllm_rank"
WORKER_EXTENSION = "weights.vllm_switch.SwitchWorker"
"""The parts of the plug-in that replace the model (weights/vllm_switch.py, in vLLM's processes)."""
_OURS = frozenset({"kv_cache_bytes"})
_ANY_SHARE = "0.01"
_IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Computes in the engine core's process.

On cpu vLLM replaces its own name for it, `uni`, by `mp`: a worker process that imports all of vLLM
once more, so that vLLM can bind that process's threads to cores.
"""
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
LAST_PRIORITY = 101
"""vLLM's priority of work that waits for all requests; those of requests are from -100 to 100."""
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class Vllm(Driver):
    location_variables = ("THAW_VLLM_PYTHON",)
    module = "vllm"
    program = "vllm.entrypoints.openai.api_server"

    tokens = VllmTokens()
    takes_socket = True
    salts_prefixes = True

    @property
    def caches_prefixes(self) -> bool:
        return bool(self.card.spec.engine_args.get("enable_prefix_caching", True))

    @property
    def lowest_priority_fields(self) -> dict[str, Any]:
        return {"priority": LAST_PRIORITY} if self._policy == "priority" else {}

    def share_fields(self, share: FairShare) -> dict[str, Any]:
        """vLLM serves lower numbers first. An operator who set a policy chooses the priorities."""
        is_ours = self._policy == "priority" and "scheduling_policy" not in self.card.spec.engine_args
        return {"priority": -share.priority} if is_ours and share.priority else {}

    @property
    def _policy(self) -> str | None:
        """The scheduling policy; None: the operator wrote the command line."""
        spec = self.card.spec
        if spec.command or (spec.container is not None and spec.container.args is not None):
            return None
        return str(spec.engine_args.get("scheduling_policy", "priority"))

    def body(self, body: Mapping[str, Any], adapter: ModelCard | None = None) -> dict[str, Any]:
        """Reject a priority, unless the operator enabled priorities for clients.

        Raises `UnsupportedParameter`.
        """
        if body.get("priority") and self.lowest_priority_fields and "scheduling_policy" not in self.card.spec.engine_args:
            raise UnsupportedParameter(
                "This model's requests have no priority. Set engine_args: scheduling_policy: priority to allow it",
                param="priority",
            )
        return super().body(body, adapter)

    def command(self) -> Command:
        if self._is_later_rank:
            return Command((self.launch.settings.vllm_python, "-m", LATER_RANK, *self.arguments()))
        # Not the `vllm` command: builds under another distribution name lack the metadata that it
        # looks for.
        return Command((self.launch.settings.vllm_python, "-m", self.program, *self.arguments()))

    @classmethod
    def spare_command(cls, settings: HostSettings) -> Command | None:
        return Command((settings.vllm_python, "-m", cls.program), {**_QUIET, "HF_HUB_OFFLINE": "1"})

    def arguments(self) -> tuple[str, ...]:
        launch, spec = self.launch, self.card.spec
        where = ["--uds", launch.socket] if launch.socket else ["--host", launch.host, "--port", str(launch.port)]
        where += self._rank_arguments()
        found = ["--model", launch.model, "--served-model-name", self.served_name, *where]
        found += ["--max-model-len", str(self.card.context_length), "--max-num-seqs", str(spec.max_concurrency)]
        found += ["--dtype", spec.dtype]
        if launch.revision:
            found += ["--revision", launch.revision]
        if spec.trust_remote_code:
            found.append("--trust-remote-code")
        given = {k: v for k, v in spec.engine_args.items() if k not in _OURS}
        if launch.kv_bytes and not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & given.keys():
            # vLLM's option is per GPU; Thaw's is for all GPUs.
            found += ["--kv-cache-memory-bytes", str(launch.kv_bytes // max(1, len(launch.gpus)))]
            if launch.on_cuda:
                # The option no longer sets the size, but vLLM refuses to start while a smaller
                # share of the GPU is free.
                found += ["--gpu-memory-utilization", _ANY_SHARE]
        if not launch.on_cuda and "enforce_eager" not in given:
            # Compiling takes a minute on cpu and gains little there.
            found.append("--enforce-eager")
        if self._has_own_threads and "distributed_executor_backend" not in given and _has_one_rank(given):
            found += ["--distributed-executor-backend", _IN_CORE]
        if self.sleep_levels and "enable_sleep_mode" not in given:
            found.append("--enable-sleep-mode")
        if "scheduling_policy" not in given:
            found += ["--scheduling-policy", "priority"]  # prefill for migrations has the lowest priority
        if self.changes_model:
            found += ["--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION]
        if self._from_loader:
            extra: dict[str, Any] = {"socket": str(loader_socket(launch.settings.node_state)), "source": self.card.info.source}
            if launch.rank is not None or self.card.info.ranks > 1:
                extra["part"] = True  # the ranks of one node share all weights instead
            given["model_loader_extra_config"] = {**extra, **dict(given.get("model_loader_extra_config") or {})}
        return (*found, *flags(given))

    @property
    def _is_later_rank(self) -> bool:
        return self.launch.rank is not None and self.launch.rank.index > 0

    def _rank_arguments(self) -> list[str]:
        """Options of vLLM's own launch over several nodes; none on one node."""
        rank = self.launch.rank
        if rank is None:
            return []
        found = ["--nnodes", str(rank.count), "--node-rank", str(rank.index)]
        found += ["--master-addr", rank.address, "--master-port", str(rank.port)]
        return [*found, "--distributed-executor-backend", "mp", *(["--headless"] if self._is_later_rank else [])]

    @property
    def _has_own_threads(self) -> bool:
        """True if Thaw limits the compute threads, and vLLM binds none of them to a core."""
        return not self.launch.on_cuda and 0 < self.launch.threads < (os.cpu_count() or 1)

    @property
    def _from_loader(self) -> bool:
        """True if vLLM gets its weights from this node's loader, through Thaw's plug-in."""
        return self.card.spec.engine_args.get("load_format") == "thaw"

    def environment(self) -> dict[str, str]:
        found = {**_QUIET, "VLLM_API_KEY": self.launch.key}
        if self.launch.directory:
            # A killed vLLM leaves its sockets, which are in /tmp by default.
            found["VLLM_RPC_BASE_PATH"] = self.launch.directory
        if self.sleep_levels:
            found["VLLM_SERVER_DEV_MODE"] = "1"  # the sleep endpoints
        if not self.launch.remote:
            found["HF_HUB_OFFLINE"] = "1"
        if self._has_own_threads:
            # By default vLLM binds a thread to each core but one, so all engines of a node would
            # use the same cores.
            found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(self.launch.threads)}
        if self.adapter_slots:
            found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # the endpoints that load adapters; they require the key
        if self.launch.rank is not None:
            found["VLLM_HOST_IP"] = self.launch.rank.own_address
        if self._from_loader or self._is_later_rank or (self.adapter_slots and not self.launch.on_cuda):
            found["PYTHONPATH"] = self._plugin()
        return found

    def _plugin(self) -> str:
        """The path of Thaw's plug-in: weights from the loader, later ranks, LoRA on cpu."""
        if self.card.spec.container is not None:
            raise InvalidModel(
                f"{self.card.name}: load_format thaw is for vLLM as a process; in a container it cannot reach the loader"
            )
        try:
            overlay = str(plugin_path(self.launch.settings.node_state / "agent" / "vllm-plugin"))
        except OSError as e:
            raise EngineFailed(f"The directory of vLLM's plug-in cannot be written: {e}") from e
        return os.pathsep.join(filter(None, (overlay, os.environ.get("PYTHONPATH"))))

    @property
    def adapter_slots(self) -> int:
        """Number of adapters that vLLM keeps in host memory: it reads the files of others again.

        A container cannot read the host's copies of adapters.
        """
        args = self.card.spec.engine_args
        if not args.get("enable_lora") or self.card.spec.container is not None:
            return 0
        return int(args.get("max_cpu_loras") or args.get("max_loras") or 1)

    async def load_adapter(self, client: Client, name: str, directory: Path) -> None:
        asked = {"lora_name": name, "lora_path": str(directory)}
        try:
            status, body = await client.ask(json_request("/v1/load_lora_adapter", asked))
        except HttpError as e:
            raise EngineFailed(f"vLLM did not load the adapter {name}: {e}") from e
        if not 200 <= status < 300:
            raise InvalidModel(f"vLLM cannot load the adapter {name}: {body[:300].decode(errors='replace')}", param="model")

    async def unload_adapter(self, client: Client, name: str) -> None:
        await call(client, json_request("/v1/unload_lora_adapter", {"lora_name": name}), f"having vLLM unload {name}")

    @property
    def changes_model(self) -> bool:
        """True if the model can be changed. A public engine never changes its model."""
        return self.launch.is_private and can_change_model(self.card.spec) and not self.launch.remote and self.launch.rank is None

    async def change_model(self, client: Client, asleep: int) -> None:
        """Replace the model. The plug-in checks the first logits that it computes.

        An engine at level 2 has no weights: it gets room for them first, and its KV cache last.
        """
        if asleep:
            await call(client, HttpRequest("POST", "/wake_up?tags=weights" if asleep == 2 else "/wake_up"), "waking vLLM")
        socket = str(loader_socket(self.launch.settings.node_state))
        source = self.card.info.source
        asked = {"model": self.launch.model, "name": self.served_name, "source": source, "socket": socket, "log": self.launch.log}
        await call(client, json_request(SWITCH_PATH, asked), "having vLLM change its model")
        if asleep == 2:
            await call(client, HttpRequest("POST", "/wake_up?tags=kv_cache"), "waking vLLM")

    @property
    def sleep_levels(self) -> tuple[int, ...]:
        """Sleep levels, only if the engine is private.

        vLLM's sleep endpoints require no key. Reading the weights again into layers that LoRA has
        wrapped was not tried.
        """
        enabled = self.card.spec.engine_args.get("enable_sleep_mode", True)
        if not (self.launch.on_cuda and self.launch.is_private and enabled):
            return ()
        return (1,) if self.adapter_slots else (1, 2)

    async def sleep(self, client: Client, level: int) -> None:
        await call(client, HttpRequest("POST", f"{_SLEEP_PATH}?level={level}"), f"putting vLLM to sleep at level {level}")

    async def wake(self, client: Client, level: int) -> None:
        """Wake vLLM.

        After level 2 the weights are read again before the KV cache returns; otherwise vLLM
        generates garbage.
        """
        if level == 2:
            await call(client, HttpRequest("POST", "/wake_up?tags=weights"), "waking vLLM")
            await call(client, json_request("/collective_rpc", {"method": "reload_weights"}), "having vLLM read its weights again")
            await call(client, HttpRequest("POST", "/wake_up?tags=kv_cache"), "waking vLLM")
        else:
            await call(client, HttpRequest("POST", "/wake_up"), "waking vLLM")


def _has_one_rank(engine_args: Mapping[str, Any]) -> bool:
    return all(str(engine_args.get(name, 1)) == "1" for name in _RANKS)
