"""SGLang's server, according to its documentation; not run by tests.

Source: docs.sglang.io, server arguments and native APIs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.enginehost.drivers.port import Command, Driver, flags
from services.enginehost.http1 import Client, call, json_request
from shared.contracts.models import ModelCard

_OURS = frozenset({"kv_cache_bytes"})
_KV = "kv_cache"
_WEIGHTS = "weights"


class Sglang(Driver):
    location_variables = ("THAW_SGLANG_PYTHON",)
    module = "sglang"
    salts_prefixes = True

    def body(self, body: Mapping[str, Any], adapter: ModelCard | None = None) -> dict[str, Any]:
        """Drop a `max_tokens` of null, which SGLang refuses."""
        return {k: v for k, v in super().body(body, adapter).items() if k != "max_tokens" or v is not None}

    def command(self) -> Command:
        return Command((self.launch.settings.sglang_python, "-m", "sglang.launch_server", *self.arguments()))

    def arguments(self) -> tuple[str, ...]:
        launch, spec = self.launch, self.card.spec
        found = ["--model-path", launch.model, "--served-model-name", self.served_name]
        found += ["--host", launch.host, "--port", str(launch.port)]
        found += ["--context-length", str(self.card.context_length), "--max-running-requests", str(spec.max_concurrency)]
        found += ["--dtype", spec.dtype]
        if launch.revision:
            found += ["--revision", launch.revision]
        if spec.trust_remote_code:
            found.append("--trust-remote-code")
        if self.card.info.task == "embed":
            found.append("--is-embedding")
        given = {k: v for k, v in spec.engine_args.items() if k not in _OURS}
        tokens = self.launch.kv_bytes // max(1, self.card.info.kv_bytes_per_token)
        if tokens and not {"mem_fraction_static", "max_total_tokens"} & given.keys():
            found += ["--max-total-tokens", str(tokens)]
        if launch.on_cuda:
            if "enable_memory_saver" not in given:
                found.append("--enable-memory-saver")
            if self.sleep_levels and "enable_weights_cpu_backup" not in given:
                found.append("--enable-weights-cpu-backup")
        elif "device" not in given:
            found += ["--device", "cpu"]
        return (*found, *flags(given, no_prefix=False))

    def headers(self) -> dict[str, str]:
        """No headers: every user could read a key on the command line."""
        return {}

    def environment(self) -> dict[str, str]:
        return {} if self.launch.remote else {"HF_HUB_OFFLINE": "1"}

    @property
    def sleep_levels(self) -> tuple[int, ...]:
        """Level 1 needs a copy of the weights in host memory.

        Without it the weights are lost.
        """
        args = self.card.spec.engine_args
        if not self.launch.on_cuda or not args.get("enable_memory_saver", True):
            return ()
        return (1, 2) if args.get("enable_weights_cpu_backup", True) else (2,)

    async def sleep(self, client: Client, level: int) -> None:
        """Release KV cache and weights.

        After level 1 SGLang restores its own copy, after level 2 it reads them again.
        """
        tags = {"tags": [_KV, _WEIGHTS]}
        await call(client, json_request("/release_memory_occupation", tags), f"putting SGLang to sleep at level {level}")

    async def wake(self, client: Client, level: int) -> None:
        await call(client, json_request("/resume_memory_occupation", {"tags": [_WEIGHTS]}), "waking SGLang")
        if level == 2:
            reload = {"model_path": self.launch.model}
            await call(client, json_request("/update_weights_from_disk", reload), "having SGLang read its weights again")
        await call(client, json_request("/resume_memory_occupation", {"tags": [_KV]}), "waking SGLang")
