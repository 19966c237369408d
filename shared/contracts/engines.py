"""Define the known engines and the features of each.

The scheduler, the gateways and the nodes know them without asking an engine.
"""

from __future__ import annotations

from typing import Literal

from shared.contracts.base import Frozen

Engine = Literal["builtin", "vllm", "llamacpp", "sglang", "ollama", "tensorrt-llm", "openai"]
ToolFormat = Literal[
    "hermes",
    "llama3",
    "mistral",
    "mistral_v11",
    "qwen3_coder",
    "glm45",
    "glm47",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "minimax_m2",
    "seed_oss",
    "openai",
    "gemma3",
    "gemma4",
    "functiongemma",
    "granite",
    "phi4_mini_json",
    "pythonic",
    "llama4_pythonic",
]
"""The form in which a model writes tool calls into its text: a family of models
(docs/adr/0077, docs/adr/0100).
"""
EVERYTHING = "*"
"""In `Capabilities.honours`: every field goes to the engine, which refuses what it cannot do
itself.
"""


class Capabilities(Frozen):
    """The abilities of an engine.

    `openai` is the least that any command which opens an OpenAI-compatible port can.
    """

    token_resume: bool = False
    """Takes a prompt as token ids and reports the ids it generated, so that another instance can
    resume where it stopped.
    """
    may_resume: bool = False
    """One of its servers does, which only the host knows: its requests are moved when an operator
    asks for it, and not by the scheduler's choice.
    """
    sleep_levels: tuple[int, ...] = ()
    """Levels of `SleepEngine` beyond 0: 1 keeps the weights in host memory, 2 drops them and reads
    them again.
    """
    snapshot: bool = True
    """True if Thaw may freeze and page out, or checkpoint, the engine's processes without its help.
    """
    lora: bool = False
    """Thaw has it load LoRA adapters."""
    honours: frozenset[str] = frozenset()
    """Fields of `shared.contracts.openai.NOT_HONOURED` that it honours."""
    passes_through: bool = True
    """Answers in HTTP's form; the client gets the engine's own words."""
    routes: tuple[str, ...] = ()
    """Paths that it serves besides chat and text completions and embeddings."""
    runtime_bytes: int = 512 << 20
    """Private memory of its processes on `cpu` beyond weights and KV cache, for a first
    reservation; then what was measured counts.
    """
    run_by_us: bool = False
    """True if Thaw's own tests run the real engine; else only a fake of its published API."""


_MIB = 1 << 20
_ALL = frozenset({EVERYTHING})
_STRUCTURED_OUTPUT = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
CAPABILITIES: dict[Engine, Capabilities] = {
    "builtin": Capabilities(
        token_resume=True,
        lora=True,
        snapshot=True,
        honours=_STRUCTURED_OUTPUT | {"tool_choice"},
        passes_through=False,
        runtime_bytes=192 * _MIB,
        run_by_us=True,
    ),
    "vllm": Capabilities(
        token_resume=True,
        sleep_levels=(1, 2),
        lora=True,
        honours=_ALL,
        routes=(
            "/v1/responses",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/rerank",
            "/v1/score",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
        ),
        # Measured with 0.32 on cpu: 2.97 GB over its four processes, with a 4M-parameter model.
        runtime_bytes=3072 * _MIB,
        run_by_us=True,
    ),
    "llamacpp": Capabilities(
        may_resume=True,
        honours=frozenset({"response_format", "tool_choice", "functions", "function_call", "suffix"}),
        routes=("/v1/rerank",),
        runtime_bytes=384 * _MIB,
        run_by_us=True,
    ),
    "sglang": Capabilities(
        sleep_levels=(1, 2),
        honours=_ALL,
        routes=("/v1/rerank", "/v1/score", "/v1/responses"),
        runtime_bytes=3072 * _MIB,
    ),
    "ollama": Capabilities(sleep_levels=(2,), honours=frozenset({"response_format", "suffix"})),
    "tensorrt-llm": Capabilities(honours=_ALL, routes=("/v1/responses",), runtime_bytes=4096 * _MIB),
    "openai": Capabilities(honours=_ALL),
}
"""`sleep_levels` of vLLM and SGLang hold on cuda only; the host answers which the running engine
has (`HostedEngine.sleep_levels`).
"""
