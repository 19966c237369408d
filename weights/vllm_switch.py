"""Replace the model of a running vLLM by another model of the same shape.

vLLM keeps its processes, compiled code and the memory of its KV cache. Weights, tokenizer, chat
template, generation defaults and served name change. Each of the three parts runs in the process
that owns the state:

- `ModelSwitch` is an ASGI middleware of the API server (`--middleware`). It answers
  `POST /thaw/model` and replaces what the server derived from the model's files.
- `register` adds the method `EngineCore.thaw_change_model`, which drops caches and replaces the
  grammar compiler's tokenizer.
- `SwitchWorker` (`--worker-extension-cls`) copies the weights into the existing parameters.

The caller proves that both models have one shape (`weights.shape`) and that no request is running.
After a failure the engine is unusable: the caller stops it. Written against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weights.vllm_plugin import weights

if TYPE_CHECKING:
    import torch

PATH = "/thaw/model"
MIDDLEWARE = "weights.vllm_switch.ModelSwitch"
WORKER_EXTENSION = "weights.vllm_switch.SwitchWorker"
_CHECKED_TENSORS = 8
_CHECKED_ROWS = 64
_BODY_BYTES = 1 << 16

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class SwitchError(RuntimeError):
    """The engine cannot serve the other model."""


class ModelSwitch:
    """ASGI middleware that answers `POST /thaw/model`.

    The request's body is JSON: `model` (a directory), `name` (served), `source`, `socket` (of the
    node's loader; null: the engine reads the files) and `log` (the file for this server's output,
    or empty).
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        if not _is_authorized(scope):
            await _answer(send, 401, {"error": "unauthorized"})
            return
        try:
            asked = json.loads(await _body(receive))
            found = await _change_model(scope["app"].state, **asked)
        except Exception as e:  # the caller gets the reason and stops this engine
            await _answer(send, 500, {"error": f"{type(e).__name__}: {e}"[:1000]})
            return
        await _answer(send, 200, found)


def _is_authorized(scope: Scope) -> bool:
    """True if the request has the server's key. vLLM itself checks keys only below /v1."""
    key = os.environ.get("VLLM_API_KEY")
    given = dict(scope["headers"]).get(b"authorization", b"")
    return not key or hmac.compare_digest(given, f"Bearer {key}".encode())


async def _body(receive: Receive) -> bytes:
    found = bytearray()
    while True:
        message = await receive()
        found += message.get("body", b"")
        if len(found) > _BODY_BYTES:
            raise SwitchError("the request is too large")
        if not message.get("more_body"):
            return bytes(found)


async def _answer(send: Send, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _change_model(state: Any, model: str, name: str, source: str, socket: str | None, log: str = "") -> dict[str, Any]:
    """Change the weights and, meanwhile, what the API server derived from the model's files."""
    _redirect(log)
    client = state.engine_client
    _point_at(client.vllm_config.model_config, model)
    client.vllm_config.model_config.served_model_name = name
    checked, _ = await asyncio.gather(
        client.engine_core.call_utility_async("thaw_change_model", model, source, socket, log),
        _renew_server(state, model, name),
    )
    gc.collect()  # the earlier tokenizer refers to itself; vLLM's server collects rarely
    return {"checked_tensors": checked}


async def _renew_server(state: Any, model: str, name: str) -> None:
    """Derive the server's state from the model's files, as at its start. It needs no weights."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # type: ignore[import-not-found]
    from vllm.renderers import renderer_from_config  # type: ignore[import-not-found]
    from vllm.v1.engine.input_processor import InputProcessor  # type: ignore[import-not-found]

    client, args = state.engine_client, state.args
    before, client.renderer = client.renderer, await asyncio.to_thread(renderer_from_config, client.vllm_config)
    client.input_processor = InputProcessor(client.vllm_config, client.renderer)
    client.output_processor.tokenizer = client.renderer.tokenizer
    before.shutdown()
    args.model, args.served_model_name = model, [name]
    await init_app_state(client, state, args, await client.get_supported_tasks())


def _point_at(config: Any, model: str) -> None:
    """Set the paths of a `ModelConfig` to the model's files."""
    from vllm.tokenizers.registry import cached_get_tokenizer  # type: ignore[import-not-found]
    from vllm.utils import func_utils  # type: ignore[import-not-found]

    config.model = config.tokenizer = model
    config.model_weights = ""
    config.revision = config.tokenizer_revision = None
    # These caches keep 128 entries. Tokenizers and their methods are keys or values of them, and a
    # tokenizer takes some 10 MB.
    cached_get_tokenizer.cache_clear()
    func_utils._supports_kw.cache_clear()


def _redirect(log: str) -> None:
    """Write to the log of the instance that this process now belongs to."""
    if not log:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with Path(log).open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def register() -> None:
    """Add `thaw_change_model` to `EngineCore`. vLLM calls this in each of its processes."""
    from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found]

    EngineCore.thaw_change_model = _thaw_change_model


def _thaw_change_model(self: Any, model: str, source: str, socket: str | None, log: str) -> int:
    """Change the model of an `EngineCore`. Returns the number of tensors compared afterwards."""
    _redirect(log)
    if self.scheduler.has_unfinished_requests():
        raise SwitchError("requests are running")
    self._reset_caches(reset_running_requests=False, reset_connector=True)
    _point_at(self.vllm_config.model_config, model)
    checked: list[int] = self.collective_rpc("thaw_change_weights", args=(model, source, socket, log))
    _renew_grammars(self.structured_output_manager)
    gc.collect()
    return min(checked)


def _renew_grammars(grammars: Any) -> None:
    """Have the next request with a grammar create the tokenizer and the compiler for it.

    Most requests have none, and the tokenizer takes 0.1 to 0.3 s of this process.
    """
    from vllm.tokenizers import cached_tokenizer_from_config  # type: ignore[import-not-found]

    if grammars.backend is not None:
        grammars.backend.destroy()
        grammars.backend = None

    def grammar_init(request: Any) -> None:
        grammars.tokenizer = cached_tokenizer_from_config(grammars.vllm_config.model_config)  # an error fails this request only
        del grammars.grammar_init  # restores the method of the class
        grammars.grammar_init(request)

    grammars.grammar_init = grammar_init


class SwitchWorker:
    """Methods added to vLLM's workers."""

    def thaw_change_weights(self: Any, model: str, source: str, socket: str | None, log: str) -> int:
        """Copy the model's weights into the existing parameters.

        Returns:
            The number of parameters compared with the source afterwards.

        Raises:
            SwitchError: The source lacks a parameter, or a parameter differs afterwards.
        """
        _redirect(log)
        comparable = _comparable(self.model_runner.get_model())
        kept: dict[str, torch.Tensor] = {}
        _point_at(self.vllm_config.model_config, model)
        with weights(source, socket) as coming:
            self.reload_weights(weights_iterator=_iter_keeping(coming, comparable, kept, copies=socket is None))
        now = dict(self.model_runner.get_model().named_parameters())
        wrong = [name for name, rows in kept.items() if not bool((now[name][: len(rows)] == rows.to(now[name])).all())]
        if wrong:
            raise SwitchError(f"parameters differ from their source: {', '.join(wrong)}")
        _check_first_logits(self.model_runner.get_model())
        return len(kept)


def _check_first_logits(model: Any) -> None:
    """Check the model's next logits, once: the engine ends if they are not finite numbers.

    A request for log-probabilities would check them too, but vLLM compiles a kernel for it first.
    """
    compute = model.compute_logits

    def compute_checked(*args: Any, **kwargs: Any) -> Any:
        del model.compute_logits  # restores the method of the class
        logits = compute(*args, **kwargs)
        if logits is not None and not bool(logits.amax(-1).isfinite().all()):
            raise SwitchError("the logits of the changed model are not finite")
        return logits

    model.compute_logits = compute_checked


def _comparable(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of parameters that vLLM stores unchanged, on one device.

    These are vectors, and the embedding of the input tokens. vLLM fuses or packs other matrices.
    """
    found = {name for name, parameter in model.named_parameters() if parameter.ndim == 1 and parameter.numel()}
    for name, module in model.named_modules():
        if type(module).__name__ == "VocabParallelEmbedding" and getattr(module, "tp_size", 1) == 1:
            found.add(f"{name}.weight")
    return frozenset(found)


def _iter_keeping(
    coming: Iterator[tuple[str, torch.Tensor]], comparable: frozenset[str], kept: dict[str, torch.Tensor], *, copies: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and keep the first rows of some comparable ones.

    Args:
        coming: The tensors.
        comparable: Names of the tensors to keep.
        kept: Receives the rows.
        copies: Yield copies: a tensor is valid only until the next one, and vLLM collects the
            tensors of a layer.
    """
    for name, tensor in coming:
        if name in comparable and len(kept) < _CHECKED_TENSORS:
            kept[name] = tensor[:_CHECKED_ROWS].clone()
        yield name, tensor.clone() if copies else tensor
