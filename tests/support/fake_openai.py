"""A small OpenAI-compatible server that stands for engines that are not installed.

It is a real process that listens, streams, forks and misbehaves as its options (fake_options.py)
and requests say. `--like NAME`: it serves only the endpoints that the engine's documentation
publishes.

A body's `fake` decides an answer: {"tokens": n, "pace": s, "status": code, "exit": status};
{"adapter": true} answers with the weights of the LoRA adapter that the request names;
{"until": file} ends a stream once the file exists;
{"mute": true} and {"dropped": true} (other text) hold from then on; {"eat": true} takes memory
without end; {"says": text} makes one like vLLM generate that (fake_tokens.py). A text asks for the
digests of images (fake_digests.py).
GET /stats returns options, environment and calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.fake_digests import answer, asks_for_digests
from tests.support.fake_lora import FakeLora
from tests.support.fake_options import parse
from tests.support.fake_ranks import follow, meet
from tests.support.fake_tokens import prompt_of, saying, saying_llama, text_of

RUNNER = "import sys, time; held = b'w' * (int(sys.argv[1]) << 20); print('loaded', flush=True); time.sleep(600)"
_NOTED_BYTES = 4 << 20
"""Of a larger body only the size is noted."""
_OTHER_APIS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
_KEYS = {"vllm": "VLLM_API_KEY", "llamacpp": "LLAMA_API_KEY"}


class Fake:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.like: str = options.like
        self.calls: list[list[Any]] = []
        self.cancelled = 0
        self.has_lost_core = False
        """True if the engine core of vLLM has ended behind its server."""
        self.asleep: list[str] = []
        self.is_changed = False
        self.stored: set[str] = set()
        self.weights = b"" if self.like == "ollama" else b"w" * (options.ballast << 20)
        self.runner: subprocess.Popen[bytes] | None = None
        self.dropped = False
        """True if the weights were released and not read again."""
        self.key = os.environ.get(_KEYS.get(self.like, ""), "")
        self.lora = FakeLora()
        self.has_lora = self.like == "vllm" and options.enable_lora and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in os.environ
        self.name = getattr(options, "served_model_name", None) or getattr(options, "alias", None) or "m"

    def routes(self) -> list[Route]:
        found = [
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            Route("/v1/rerank", self.echo, methods=["POST"]),
            Route("/v1/audio/transcriptions", self.transcribe, methods=["POST"]),
            *(Route(path, self.digest, methods=["POST"]) for path in _OTHER_APIS),
            Route("/stats", self.stats, methods=["GET"]),
        ]
        published = {
            "vllm": [
                ("/health", self.healthy),
                ("/sleep", self.sleep),
                ("/wake_up", self.wake),
                ("/collective_rpc", self.rpc),
                ("/thaw/model", self.change_model),
                ("/tokenize", self.tokenize),
                ("/detokenize", self.detokenize),
                *([("/v1/load_lora_adapter", self.load_adapter), ("/v1/unload_lora_adapter", self.unload_adapter)] * self.has_lora),
            ],
            "sglang": [
                ("/health", self.healthy),
                ("/release_memory_occupation", self.sleep),
                ("/resume_memory_occupation", self.wake),
                ("/update_weights_from_disk", self.rpc),
            ],
            "llamacpp": [("/health", self.healthy), ("/tokenize", self.tokenize), ("/detokenize", self.detokenize)],
            "ollama": [
                ("/api/version", self.healthy),
                ("/api/show", self.show),
                ("/api/pull", self.pull),
                ("/api/create", self.create),
                ("/api/blobs/{digest}", self.blob),
                ("/api/generate", self.load),
                ("/api/embed", self.load),
            ],
        }
        return found + [
            Route(path, handler, methods=["GET", "POST", "HEAD"])
            for path, handler in published.get(self.like, [("/health", self.healthy)])
        ]

    async def _note(self, request: Request) -> Any:
        body = await request.body()
        received: Any = len(body)
        with contextlib.suppress(ValueError):
            received = json.loads(body)
        if len(body) > _NOTED_BYTES:
            self.calls.append([request.method, request.url.path, len(body)])
            return received
        self.calls.append([request.method, request.url.path + (f"?{request.url.query}" if request.url.query else ""), received])
        return received

    def _refused(self, request: Request) -> Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    async def healthy(self, request: Request) -> Response:
        if self.has_lost_core:
            return PlainTextResponse("", 503)
        return PlainTextResponse("ok")

    async def stats(self, request: Request) -> Response:
        env = {
            k: v
            for k, v in os.environ.items()
            if k.startswith(("VLLM_", "OMP_", "OLLAMA_", "HF_", "CUDA_", "THAW_", "GIVEN", "AWS_"))
        }
        return JSONResponse({"argv": sys.argv[1:], "env": env, "calls": self.calls, "cancelled": self.cancelled})

    async def echo(self, request: Request) -> Response:
        return JSONResponse({"echo": await self._note(request)})

    async def digest(self, request: Request) -> Response:
        return JSONResponse(answer(request.url.path, await self._note(request)))

    async def transcribe(self, request: Request) -> Response:
        """Answer with the size and digest of the file.

        The form's prompt "exit PATH" ends the server, unless the path exists, which it makes.
        """
        async with request.form() as form:
            file, prompt = form["file"], str(form.get("prompt") or "")
            assert isinstance(file, UploadFile)
            if prompt.startswith("exit "):
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(prompt.removeprefix("exit "), os.O_CREAT | os.O_EXCL))
                    os._exit(9)
            hashed, size = hashlib.sha256(), 0
            while data := await file.read(1 << 20):
                hashed.update(data)
                size += len(data)
            fields = sorted(name for name in form if name != "file")
            return JSONResponse({"text": f"{size} {hashed.hexdigest()}", "fields": fields, "model": form["model"]})

    async def generate(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await self._note(request)
        fake = body.get("fake") or {}
        if "exit" in fake:
            sys.stderr.write("fake: exit as requested\n")
            sys.stderr.flush()
            os._exit(fake["exit"])
        if fake.get("eat"):
            held = []
            while True:
                held.append(b"x" * (1 << 20))
        if self.is_changed and self.options.change == "nan":
            sys.stderr.write("the logits are not finite\n")
            sys.stderr.flush()
            os._exit(1)
        self.dropped = self.dropped or bool(fake.get("dropped"))
        self.options.mute = self.options.mute or self.options.mute_end or bool(fake.get("mute"))
        self.has_lost_core = self.has_lost_core or (bool(fake.get("loses_core")) and not body.get("stream"))
        if self.options.mute or self.asleep or "status" in fake:
            status = fake.get("status", 500)
            after = BackgroundTask(os._exit, 0) if self.options.mute_end else None
            error = {"message": "no", "type": "odd", "param": "fake", "code": "own_code"}
            return JSONResponse({"error": error}, status, background=after)
        if body.get("model") not in (self.name, *self.lora.loaded) and self.like != "ollama" and self.name != "m":
            return JSONResponse({"error": {"message": f"no model {body.get('model')}", "code": 404}}, 404)
        if body.get("priority") and getattr(self.options, "scheduling_policy", None) != "priority":
            return JSONResponse({"error": {"message": "Got priority but Priority scheduling is not enabled.", "code": 400}}, 400)
        chat = request.url.path.endswith("chat/completions")
        if asks_for_digests(body):
            return JSONResponse(answer(request.url.path, body))
        if "says" in fake:
            events = saying_llama(body) if self.like == "llamacpp" and not chat else saying(body, chat=chat)
            if "fails_after" in fake:
                events = self._fail(events, fake["fails_after"], loses_core=bool(fake.get("loses_core")))
            return StreamingResponse(events, media_type="text/event-stream")
        tokens = int(fake.get("tokens", body.get("max_tokens") or 4))
        if body.get("stream"):
            events = self._events(body, chat, tokens, float(fake.get("pace", 0.0)), fake.get("until"))
            return StreamingResponse(events, media_type="text/event-stream")
        text = f"{self.name}: " if fake.get("named") else self.lora.describe(body.get("model")) if fake.get("adapter") else ""
        text += "".join(_token(i, "x" if self.dropped else "t") for i in range(tokens))
        message = {"role": "assistant", "content": text, "tool_calls": _calls(body)}
        choice = {"index": 0, "finish_reason": "stop", **({"message": message} if chat else {"text": text})}
        return JSONResponse({"id": "x", "model": body.get("model"), "choices": [choice], "usage": _usage(tokens)})

    async def _fail(self, events: AsyncIterator[str], after: int, *, loses_core: bool) -> AsyncIterator[str]:
        """End a stream with an error as vLLM does, also if its engine core has ended."""
        for _ in range(after):
            yield await anext(events)
        self.has_lost_core = loses_core
        error = {"message": "EngineCore encountered an issue", "type": "InternalServerError", "param": None, "code": 500}
        yield f"data: {json.dumps({'error': error})}\n\n"
        yield "data: [DONE]\n\n"

    async def _events(self, body: Any, chat: bool, tokens: int, pace: float, until: str | None) -> AsyncIterator[str]:
        done = False
        try:
            for i in range(tokens):
                delta = {"delta": {"content": _token(i)}} if chat else {"text": _token(i)}
                yield f"data: {json.dumps({'id': 'x', 'model': body.get('model'), 'choices': [{'index': 0, **delta}]})}\n\n"
                if until is not None and Path(until).exists():
                    break
                if pace:
                    await asyncio.sleep(pace)
            if (body.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps({'id': 'x', 'choices': [], 'usage': _usage(tokens)})}\n\n"
            yield "data: [DONE]\n\n"
            done = True
        finally:
            self.cancelled += not done

    async def embed(self, request: Request) -> Response:
        body = await self._note(request)
        return JSONResponse({"data": [{"index": 0, "embedding": [0.5, 0.25]}], "model": body["model"], "usage": _usage(0)})

    # vLLM and SGLang

    async def load_adapter(self, request: Request) -> Response:
        return self._refused(request) or self.lora.load(await self._note(request))

    async def unload_adapter(self, request: Request) -> Response:
        return self._refused(request) or self.lora.unload(await self._note(request))

    async def sleep(self, request: Request) -> Response:
        received = await self._note(request)
        self.asleep = list(received["tags"]) if isinstance(received, dict) else ["all"]
        uncopied = self.like == "sglang" and "weights" in self.asleep and not self.options.enable_weights_cpu_backup
        self._forget(dropped=request.query_params.get("level") == "2" or uncopied)
        return JSONResponse({})

    def _forget(self, *, dropped: bool) -> None:
        self.dropped = dropped
        if self.options.hoard:
            return
        self.weights = b""
        if self.runner is not None:
            self.runner.kill()
            self.runner.wait()
            self.runner = None

    def _bring_back(self) -> None:
        if self.like != "ollama":
            self.weights = self.weights or b"w" * (self.options.ballast << 20)
        elif self.runner is None:
            self.runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(self.options.ballast)], stdout=subprocess.PIPE)
            assert self.runner.stdout is not None
            self.runner.stdout.readline()

    async def wake(self, request: Request) -> Response:
        received = await self._note(request)
        tags = received["tags"] if isinstance(received, dict) else [request.query_params.get("tags")]
        self.asleep = [] if tags == [None] or "kv_cache" in tags else self.asleep
        self._bring_back()
        return JSONResponse({})

    async def rpc(self, request: Request) -> Response:
        await self._note(request)
        self.dropped = self.dropped and self.options.no_reload
        return JSONResponse({})

    async def change_model(self, request: Request) -> Response:
        """Do what weights/vllm_switch.py adds to vLLM."""
        if (refused := self._refused(request)) is not None:
            return refused
        asked = await self._note(request)
        if self.options.change == "exit":
            os._exit(5)
        if self.options.change == "refuse" or self.options.middleware is None:
            return JSONResponse({"error": "no such change"}, 500)
        with open(asked["log"], "ab") as file:  # noqa: ASYNC230, PTH123
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        self.name = asked["name"]
        self.is_changed = True
        return JSONResponse({"checked_tensors": 8})

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": prompt_of(await self._note(request))})

    async def detokenize(self, request: Request) -> Response:
        name = "content" if self.like == "llamacpp" else "prompt"
        return JSONResponse({name: text_of((await self._note(request))["tokens"])})

    # Ollama

    async def show(self, request: Request) -> Response:
        name = (await self._note(request))["model"]
        return JSONResponse({}, 200 if name in self.stored else 404)

    async def pull(self, request: Request) -> Response:
        name = (await self._note(request))["model"]
        if name == "nowhere":
            return PlainTextResponse('{"error":"pull model manifest: file does not exist"}\n')
        self.stored.add(name)
        return StreamingResponse(self._download(), media_type="application/x-ndjson")

    async def _download(self) -> AsyncIterator[str]:
        for line in ({"status": "pulling manifest"}, {"status": "pulling", "total": 100, "completed": 40}):
            yield json.dumps(line) + "\n"
        while self.options.hold_pull is not None and not self.options.hold_pull.exists():  # noqa: ASYNC110  # made by another process
            await asyncio.sleep(0.02)
        yield json.dumps({"status": "success"}) + "\n"

    async def blob(self, request: Request) -> Response:
        await self._note(request)
        return Response(status_code=404 if request.method == "HEAD" else 201)

    async def create(self, request: Request) -> Response:
        self.stored.add((await self._note(request))["model"])
        return JSONResponse({"status": "success"})

    async def load(self, request: Request) -> Response:
        body = await self._note(request)
        if request.url.path == "/api/embed" and not body.get("input"):
            return JSONResponse({"error": "invalid input type"}, 400)
        if request.url.path == "/api/generate" and body["keep_alive"] and "embed" in body["model"]:
            return JSONResponse({"error": f'"{body["model"]}" does not support generate'}, 400)
        self.asleep = ["all"] if body.get("keep_alive") == 0 else []
        if self.asleep:
            self._forget(dropped=self.options.no_reload)
        else:
            self._bring_back()
        return JSONResponse({}, 200 if body["model"] in self.stored else 404)


def _token(i: int, letter: str = "t") -> str:
    return f"{letter}{i} "


def _calls(body: Any) -> Any:
    return [{"id": "c", "type": "function", "function": body["tools"][0]["function"]}] if body.get("tools") else None


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}


def main() -> None:
    options = parse(sys.argv[1:])
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fork and os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    if options.share:
        memory = SharedMemory(create=True, size=4096)
        resource_tracker.unregister(f"/{memory.name}", "shared_memory")
        lock = multiprocessing.get_context("spawn").Semaphore()
        name: str = lock._semlock.name  # type: ignore[attr-defined]  # no public attribute
        resource_tracker.unregister(name, "semaphore")
        sys.stderr.write(f"shared: {memory.name} sem.{name.removeprefix('/')}\n")
    if options.retitle:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
    ranks = []
    if getattr(options, "nnodes", None):
        if int(options.node_rank):
            assert options.headless
            assert options.module == "weights.vllm_rank"
            sys.exit(follow(options))
        ranks = meet(options)
    until = time.monotonic() + options.ready_after
    while time.monotonic() < until or (options.ready_with is not None and not options.ready_with.exists()):
        sys.stderr.write("still loading\n")
        time.sleep(0.1)
    if options.die_after:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(3))
        signal.setitimer(signal.ITIMER_REAL, options.die_after)
    host, port = getattr(options, "host", None), getattr(options, "port", None)
    if options.like == "ollama":
        host, _, port = os.environ["OLLAMA_HOST"].partition(":")
    path = getattr(options, "uds", None)
    if options.like == "llamacpp" and str(host).endswith(".sock"):
        path = host
    app = Starlette(routes=Fake(options).routes())
    config = uvicorn.Config(app, host=host or "127.0.0.1", port=int(port or 0), uds=path, log_level="warning")
    server = uvicorn.Server(config)
    if options.ignore_term:
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # older uvicorn
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    server.run()
    for connection in ranks:
        connection.close()


if __name__ == "__main__":
    main()
