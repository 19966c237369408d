"""The gateway's prompt length equals the engine's."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import Replace, StripAccents
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Split, Whitespace
from tokenizers.pre_tokenizers import Sequence as PreSequence
from transformers import AutoTokenizer

from services.gateway.adapters.chat_template import ChatTemplate, Unrenderable
from services.gateway.adapters.prompt_length import PromptLengthChecker, TokenCounter
from services.gateway.adapters.token_bound import longest_token_bytes
from services.gateway.adapters.tokenizer_files import NAMES, TokenizerFiles
from services.loader.adapters.small_files import read_part
from shared.contracts.loader import ModelFilePart, ReadModelFile
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest
from shared.errors import ContextLengthExceeded, NotFound, Unreachable
from tests.support.fake_engine import card_of
from thaw.demo.tokenizer import write_tokenizer
from weights.cache.store import SsdCache
from weights.sources.sources import Sources

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
TRICKY = """{%- if tools is not none %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if loop.index > 50 %}{% break %}{% endif %}
<|{{ m['role'] }}|>{% generation %}{{ m['content'] | trim }}{% endgeneration %}
{%- if m.tool_calls is defined %}{{ m.tool_calls[0].function.arguments.a }}{% endif %}{{ eos_token }}
{% endfor %}
{%- if messages[0]['role'] == 'system' and style is defined %}{{ raise_exception('no style') }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello, wörld 日本"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "  spaced  "}], "tools": [TOOL]},
    {
        "messages": [
            {"role": "user", "content": "call"},
            {
                "role": "assistant",
                "content": "so",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x y"}'}}],
            },
            {"role": "tool", "content": "done", "tool_call_id": "1"},
        ]
    },
]

SOURCES = Sources(SsdCache(Path("/nonexistent"), 0), ())
"""A loader's sources, without a cache."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 2048, 2048)
    return tmp_path


def engines_count(tokenizer: Any, request: ChatCompletionRequest) -> int:
    """Count as services/engine/server/request_reader.py does."""
    from services.engine.server.request_reader import _message

    messages = [_message(i, m) for i, m in enumerate(request.messages)]
    text = tokenizer.apply_chat_template(
        messages, tools=request.tools, add_generation_prompt=request.add_generation_prompt, tokenize=False
    )
    return len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("template", [None, TRICKY])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
async def test_prompt_length_of_a_conversation_equals_the_engines(
    model: Path, template: str | None, conversation: dict[str, Any]
) -> None:
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    request = ChatCompletionRequest.model_validate({"model": "m"} | conversation)
    counter = TokenCounter.from_files({name: (model / name).read_bytes() for name in NAMES if (model / name).exists()})
    assert counter is not None
    assert counter.count_chat(request, "", 10**6) == engines_count(AutoTokenizer.from_pretrained(model), request)


async def test_templates_that_cannot_be_rendered_are_left_to_the_engine(model: Path) -> None:
    (model / "chat_template.jinja").write_text(TRICKY)
    template = ChatTemplate.from_files({"chat_template.jinja": TRICKY.encode()})
    assert template is not None
    picture = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    refused = {"model": "m", "messages": [{"role": "system", "content": "x"}], "chat_template_kwargs": {"style": 1}}
    for body in (picture, refused):
        with pytest.raises(Unrenderable):
            template.render(ChatCompletionRequest.model_validate(body))
    assert ChatTemplate.from_files({"chat_template.jinja": b"{% for %}"}) is None
    escape = ChatTemplate.from_files({"chat_template.jinja": b"{{ messages.__class__.__mro__[1].__subclasses__() }}"})
    assert escape is not None
    with pytest.raises(Unrenderable):
        escape.render(ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]}))


class FarMesh:
    """Two nodes' loaders; the second one has the files."""

    max_body = 16_384
    """Small, so that files have several parts."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.asked = 0

    async def request(self, subject: str, request: ReadModelFile, reply: type[ModelFilePart]) -> ModelFilePart:
        self.asked += 1
        if subject.endswith("LjA.files"):
            raise Unreachable
        part = read_part(SOURCES, request.model_copy(update={"source": str(self.files)}))
        assert len(base64.b64decode(part.data)) <= request.limit < self.max_body
        return part


async def test_tokenizer_files_are_read_in_chunks_and_cached(model: Path) -> None:
    mesh = FarMesh(model)
    files = TokenizerFiles(mesh, lambda: [".0", "one"])  # type: ignore[arg-type]  # only `request` and `max_body` are used
    got = await files.read("/nowhere/here")
    assert got["tokenizer.json"] == (model / "tokenizer.json").read_bytes()
    assert set(got) == {name for name in NAMES if (model / name).exists()}
    lengths, card = PromptLengthChecker(files), card_of("m", context=64)
    asked = mesh.asked
    for _ in range(2):
        with pytest.raises(ContextLengthExceeded):
            await lengths.check(CompletionRequest(model="m", prompt="word " * 500), card)
    assert mesh.asked == 2 * asked
    fits = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    await lengths.check(fits, card)
    # The template's own tokens count.
    tight = card_of("m", context=8)
    with pytest.raises(ContextLengthExceeded):
        await lengths.check(fits, tight)


def test_only_listed_file_names_can_be_read(model: Path) -> None:
    (model / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="name"):
        ReadModelFile.model_validate({"source": str(model), "name": "../config.json"})
    with pytest.raises(NotFound):
        read_part(SOURCES, ReadModelFile(source=str(model), name="special_tokens_map.json"))


def bpe(pre_tokenizer: Any, normalizer: Any = None, added: AddedToken | None = None, *, byte_fallback: bool = False) -> Tokenizer:
    letters = ByteLevel.alphabet() if not byte_fallback else [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: number for number, token in enumerate([*sorted(letters), "ab", "abab"])}
    tokenizer = Tokenizer(BPE(vocab | {"a": 300, "b": 301} if byte_fallback else vocab, [], byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if added is not None:
        tokenizer.add_tokens([added])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "longest"),
    [
        (bpe(ByteLevel(add_prefix_space=False)), 4),
        (bpe(Metaspace(), Replace(" ", "▁"), byte_fallback=True), 6),
        (bpe(ByteLevel(), added=AddedToken("<|sixteen bytes|>", rstrip=False)), 17),
        (bpe(ByteLevel(), added=AddedToken("<|x|>", rstrip=True)), None),
        (bpe(ByteLevel(), StripAccents()), None),
        (bpe(ByteLevel(), Replace("ab", "")), None),
        (bpe(PreSequence([Split(" ", "removed"), ByteLevel()])), None),
        (bpe(Whitespace()), None),
        (Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")), None),
    ],
    ids=["bytes", "byte fallback", "added", "strips", "normalizes", "shortens", "drops", "drops spaces", "unknown words"],
)
def test_a_token_stands_for_a_bounded_number_of_bytes(tokenizer: Tokenizer, longest: int | None) -> None:
    assert longest_token_bytes(tokenizer) == longest


@given(st.text(max_size=200))
def test_token_count_is_at_least_a_quarter_of_the_byte_count(text: str) -> None:
    tokenizer = bpe(ByteLevel(add_prefix_space=False))
    assert len(tokenizer.encode(text).ids) * 4 >= len(text.encode())


async def test_prompt_that_cannot_fit_is_not_tokenized(model: Path) -> None:
    counter = TokenCounter.from_files({"tokenizer.json": (model / "tokenizer.json").read_bytes()})
    assert counter is not None
    longest = counter._longest_token_bytes
    assert longest is not None
    counter._tokenizer = None
    count = counter.count_longest(["x", "a" * (64 * longest + 1)], 64)
    assert count == 65, "a lower bound"
    assert counter.count_longest(["a" * 2_000_000], 2_000_000) is None, "left to the engine"


@pytest.mark.parametrize("unit", ["1 ", "a", "word ", " ", "日本 "])
async def test_counting_does_not_block_the_loop(model: Path, unit: str) -> None:
    """The loop waits for the interpreter lock for less than a tenth of the counting.

    The text is the longest. A thread that kept the lock would make the loop wait for all of the
    counting. A part, and not milliseconds: the counting takes 0.5 s, and ten times that where the
    host of a virtual machine backs memory at its first use. Measured as computing time of the
    counting thread, in which the loop's thread neither ran nor waited for a processor: other work
    on the machine delays both threads, and does not count.
    """
    counter = TokenCounter.from_files({"tokenizer.json": (model / "tokenizer.json").read_bytes()})
    assert counter is not None
    text = unit * ((1 << 20) // len(unit.encode()))
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    watched = threading.Event()
    counted_s: list[float] = []

    def count() -> int | None:
        started.get_loop().call_soon_threadsafe(started.set_result, time.pthread_getcpuclockid(threading.get_ident()))
        watched.wait()
        before = time.thread_time()
        found = counter.count_longest([text], 10**9)
        counted_s.append(time.thread_time() - before)
        return found

    counting = asyncio.create_task(asyncio.to_thread(count))
    clock = await started
    worst_s, last = 0.0, (time.monotonic(), _processor_wait_s(), time.clock_gettime(clock))
    watched.set()
    while not counting.done():
        await asyncio.sleep(0.001)
        now = (time.monotonic(), _processor_wait_s(), time.clock_gettime(clock))
        passed_s, delayed_s, computed_s = (b - a for a, b in zip(last, now, strict=True))
        worst_s, last = max(worst_s, min(passed_s - delayed_s, computed_s)), now
    assert await counting
    assert worst_s < counted_s[0] / 10


def _processor_wait_s() -> float:
    """Return how long this thread was ready to run and had to wait for a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
