"""vLLM's endpoints for LoRA adapters, as the fake server has them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

MAX_RANK = 16


class FakeLora:
    """The adapters of a fake engine. Each request reads its adapter's files again."""

    def __init__(self) -> None:
        self.loaded: dict[str, Path] = {}

    def load(self, asked: Any) -> Response:
        name, path = asked["lora_name"], Path(asked["lora_path"])
        if name in self.loaded:
            return _refusal(400, f"The lora adapter '{name}' has already been loaded.")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > MAX_RANK:
            return _refusal(500, f"LoRA rank {rank} is greater than max_lora_rank {MAX_RANK}.")
        self.loaded[name] = path
        return PlainTextResponse("Success")

    def unload(self, asked: Any) -> Response:
        if self.loaded.pop(asked["lora_name"], None) is None:
            return _refusal(404, "The lora adapter cannot be found.")
        return PlainTextResponse("Success")

    def describe(self, name: str) -> str:
        """Return the digest of an adapter's weights; empty if there is none of this name."""
        if name not in self.loaded:
            return ""
        return hashlib.sha256((self.loaded[name] / "adapter_model.safetensors").read_bytes()).hexdigest()[:16]


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)
