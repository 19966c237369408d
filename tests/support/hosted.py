"""Real hosts of engines under test, and what comes back through them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from shared.contracts.engine import EngineStart
from shared.contracts.inference import InferData, InferEnd, InferFailed, InferResponse
from shared.contracts.models import ModelCard, ModelInfo, ModelSpec
from tests.support.engines import Engines, Stream

MIB = 1 << 20


class HostedAnswer:
    """An answer in HTTP's form, whole."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        heads = [r for r in stream.replies if isinstance(r, InferResponse)]
        self.status = heads[0].status if heads else 0
        self.body = b"".join(base64.b64decode(r.data) for r in stream.replies if isinstance(r, InferData))
        last = stream.replies[-1]
        self.usage = last.usage if isinstance(last, InferEnd) else None
        self.error = last.error if isinstance(last, InferFailed) else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of a stream's events but the last, `[DONE]`."""
        found = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        assert found[-1] == "[DONE]"
        return [json.loads(e) for e in found[:-1]]

    def text(self) -> str:
        """Of a stream of text or chat completions."""
        choices = [e["choices"][0] for e in self.events() if e["choices"]]
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


class Hosts(Engines):
    """The nodeagent's and the gateway's side of the hosted engines of one node."""

    def host(self, card: ModelCard, *, cgroup_procs: str | None = None, **environment: str) -> EngineStart:
        """Start a host as the nodeagent does."""
        start = self.spec(card, **environment).model_copy(update={"cgroup_procs": cgroup_procs})
        self.spawn(start, "services.enginehost")
        return start

    async def whole(self, instance_id: str, endpoint: Any, **body: Any) -> HostedAnswer:
        stream = await self.ask(instance_id, endpoint, **body)
        await stream.until(lambda r: bool(r) and isinstance(r[-1], InferEnd | InferFailed))
        return HostedAnswer(stream)


def hosted_card(source: Path | str, engine: str = "openai", *, context: int = 256, **options: Any) -> ModelCard:
    """A card as the scheduler makes it, without asking a loader."""
    spec = ModelSpec.model_validate(
        {"name": "demo", "source": str(source), "engine": engine, "max_model_len": context, "max_concurrency": 4, **options}
    )
    info = ModelInfo(
        source=str(source),
        revision="r1",
        architecture="LlamaForCausalLM",
        model_type="llama",
        task="generate",
        weights_bytes=10 * MIB,
        parameters=1000,
        dtype="bfloat16",
        context_length=max(context, 1024),
        kv_bytes_per_token=64,
        has_chat_template=True,
    )
    return ModelCard(spec=spec, info=info, created=0)
