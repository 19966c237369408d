"""Settings of an engine's host process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from shared.settings import StageSettings


class HostSettings(StageSettings):
    vllm_python: str = Field(default="python3", description="Python interpreter of the environment that vLLM is installed in.")
    sglang_python: str = Field(default="python3", description="Python interpreter of the environment that SGLang is installed in.")
    llamacpp_python: str = Field(
        default="python3", description="Python interpreter of the environment that llama-cpp-python[server] is installed in."
    )
    llamacpp_server: str = Field(default="", description="llama.cpp's own llama-server; with it llama-cpp-python is not used.")
    ollama_program: str = Field(default="ollama", description="The ollama program.")
    ollama_models: Path | None = Field(default=None, description="Where Ollama keeps its models; its own default otherwise.")
    trtllm_serve: str = Field(default="trtllm-serve", description="TensorRT-LLM's trtllm-serve.")
    container_socket: Path = Field(
        default=Path("/var/run/docker.sock"),
        description="Unix socket of the Docker (or Podman) API that runs engines as containers.",
    )
    engine_niceness: int = Field(
        default=5,
        ge=0,
        le=19,
        description="Niceness of engines that compute on cpu: where cores are scarce, the mesh's own processes go before them.",
    )
    kill_grace: float = Field(default=5.0, gt=0, description="Seconds from SIGTERM to SIGKILL.")
    probe_interval: float = Field(
        default=30.0, ge=0, description="Seconds without a request after which an engine's health is asked about again; 0: never."
    )
