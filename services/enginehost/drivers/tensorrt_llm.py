"""TensorRT-LLM's trtllm-serve, by its documentation; not run by tests.

Source: commands/trtllm-serve, 1.x.
"""

from __future__ import annotations

from services.enginehost.drivers.port import Command, Driver, flags

_OURS = frozenset({"kv_cache_bytes"})


class TensorrtLlm(Driver):
    location_variables = ("THAW_TRTLLM_SERVE",)

    def command(self) -> Command:
        return Command((self.launch.settings.trtllm_serve, *self.arguments()))

    def arguments(self) -> tuple[str, ...]:
        launch, spec = self.launch, self.card.spec
        found = [launch.model, "--host", launch.host, "--port", str(launch.port), "--served_model_name", self.served_name]
        found += ["--max_seq_len", str(self.card.context_length), "--max_batch_size", str(spec.max_concurrency)]
        if spec.trust_remote_code:
            found.append("--trust_remote_code")
        given = {k: v for k, v in spec.engine_args.items() if k not in _OURS}
        return (*found, *flags(given, underscores=True, no_prefix=False))

    def headers(self) -> dict[str, str]:
        """No headers: trtllm-serve has no API keys."""
        return {}

    def environment(self) -> dict[str, str]:
        return {} if self.launch.remote else {"HF_HUB_OFFLINE": "1"}
