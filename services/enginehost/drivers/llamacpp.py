"""llama.cpp: its own llama-server, or the server of llama-cpp-python.

Thaw's tests run the latter.
"""

from __future__ import annotations

from pathlib import Path

from services.enginehost.drivers.port import Command, Driver, flags
from services.enginehost.drivers.token_api import LlamaServerTokens, TokenApi
from shared.errors import InvalidModel

_OURS = frozenset({"kv_cache_bytes"})


class LlamaCpp(Driver):
    location_variables = ("THAW_LLAMACPP_PYTHON", "THAW_LLAMACPP_SERVER")
    module = "llama_cpp"

    @property
    def _native(self) -> bool:
        return bool(self.launch.settings.llamacpp_server) or self.card.spec.container is not None

    @property
    def takes_socket(self) -> bool:
        return self._native

    @property
    def health_path(self) -> str:  # type: ignore[override]  # the two servers differ
        return "/health" if self._native else "/v1/models"

    @property
    def stream_usage(self) -> bool:  # type: ignore[override]  # llama-cpp-python's server does not know the option
        return self._native

    @property
    def tokens(self) -> TokenApi | None:
        """Token API of llama-server.

        llama-cpp-python's server takes only text prompts and reports no token ids.
        """
        return LlamaServerTokens() if self._native else None

    @property
    def caches_prefixes(self) -> bool:
        return self._native and bool(self.card.spec.engine_args.get("cache_prompt", True))

    def command(self) -> Command:
        settings = self.launch.settings
        if self._native:
            return Command((settings.llamacpp_server, *self.arguments()))
        return Command((settings.llamacpp_python, "-m", "llama_cpp.server", *self._python_arguments()))

    def arguments(self) -> tuple[str, ...]:
        """Arguments of llama-server. Its slots share the context."""
        launch, spec = self.launch, self.card.spec
        slots = spec.max_concurrency
        # A host that ends with .sock is a Unix socket to it.
        where = ["--host", launch.socket] if launch.socket else ["--host", launch.host, "--port", str(launch.port)]
        found = ["--model", self._file(), "--alias", self.served_name, *where]
        found += ["--ctx-size", str(self.card.context_length * slots), "--parallel", str(slots), "--jinja"]
        if self.card.info.task == "embed" and not {"embedding", "embeddings"} & spec.engine_args.keys():
            found.append("--embeddings")
        if launch.on_cuda and "n_gpu_layers" not in spec.engine_args:
            found += ["--n-gpu-layers", "999"]
        if launch.threads and "threads" not in spec.engine_args:
            found += ["--threads", str(launch.threads)]
        return (*found, *flags(self._select_arguments()))

    def _python_arguments(self) -> tuple[str, ...]:
        launch, given = self.launch, self._select_arguments()
        found = ["--model", self._file(), "--model_alias", self.served_name, "--host", launch.host, "--port", str(launch.port)]
        found += ["--n_ctx", str(self.card.context_length)]
        if launch.on_cuda and "n_gpu_layers" not in given:
            found += ["--n_gpu_layers", "-1"]
        if self.card.info.task == "embed" and "embedding" not in given:
            found += ["--embedding", "true"]
        if launch.threads and "n_threads" not in given:
            found += ["--n_threads", str(launch.threads)]
        # By default a second request interrupts the first one.
        found += ["--interrupt_requests", "false"]
        values = {k: str(v).lower() if isinstance(v, bool) else v for k, v in given.items()}
        return (*found, *flags(values, underscores=True))

    def environment(self) -> dict[str, str]:
        return {"LLAMA_API_KEY": self.launch.key} if self._native else {"API_KEY": self.launch.key}

    def _select_arguments(self) -> dict[str, object]:
        return {k: v for k, v in self.card.spec.engine_args.items() if k not in _OURS}

    def _file(self) -> str:
        """The GGUF file; the first of several shards, which names the others."""
        source = Path(self.launch.model)
        if source.suffix == ".gguf":
            return str(source)
        found = sorted(source.glob("*.gguf"))
        if not found:
            raise InvalidModel(f"{source} has no .gguf file, and llama.cpp reads no other format")
        return str(found[0])
