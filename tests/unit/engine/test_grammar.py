"""Grammars with the tokenizer of a demo model: only valid output passes the masks."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.domain.output_format import OutputFormat, read_output_format
from services.engine.domain.sampling_params import SamplingParams
from services.engine.generation.philox import Draw
from services.engine.generation.sampling import History, sample
from services.engine.grammar import compiler as grammar_compiler
from services.engine.grammar.compiler import _LIMITS, Grammar, GrammarCompiler, _grammar_text
from services.engine.grammar.library import Matcher, Vocabulary
from services.engine.grammar.matcher import TokenMatcher
from services.engine.tokenization import Tokenization
from shared.errors import EngineFailed, InvalidRequest
from tests.unit.engine.random_output import EOS, generate

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": ["small", "large"]}, "ok": {"type": "boolean"}},
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokens(demo_directory: Path) -> Tokenization:
    return Tokenization.read(demo_directory, False)


@pytest.fixture(scope="module")
def compiler(tokens: Tokenization) -> GrammarCompiler:
    return GrammarCompiler(tokens, tokens.size + 40, EOS)


def compiled(compiler: GrammarCompiler, **body: Any) -> Grammar:
    wanted = read_output_format(body)
    assert wanted is not None
    return compiler.compile(wanted)


def test_keys_share_no_compiled_grammars_and_all_of_them_are_bounded(tokens: Tokenization) -> None:
    compiler = GrammarCompiler(tokens, tokens.size, EOS)
    wanted = OutputFormat("regex", "ab*", "guided_regex")
    first = compiler.compile(wanted, "alice")
    assert compiler.compile(wanted, "alice") is first
    assert compiler.compile(wanted, "bob") is not first
    assert compiler.compile(wanted) is not first
    for number in range(64):
        compiler.compile(wanted, f"key {number}")
    assert len(compiler._kept) == 64
    assert compiler.compile(wanted, "alice") is not first


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_within_a_schema_are_valid_json(compiler: GrammarCompiler, tokens: Tokenization, seed: int) -> None:
    made = generate(compiled(compiler, guided_json=SCHEMA), seed)
    assert made[-1] in EOS
    value = json.loads(tokens.decode(made))
    assert value.keys() == SCHEMA["properties"].keys()
    assert len(value["name"]) <= 6
    assert value["size"] in ("small", "large")
    assert isinstance(value["ok"], bool)


def test_slow_compilation_does_not_delay_others(tokens: Tokenization, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes too long is abandoned, and still runs."""
    slow, began, go = OutputFormat("regex", "slow", "guided_regex"), threading.Event(), threading.Event()
    compile_format = grammar_compiler._compile

    def compile_slowly(wanted: OutputFormat, vocabulary: Vocabulary) -> Matcher:
        if wanted is slow:
            began.set()
            go.wait(60)
        return compile_format(wanted, vocabulary)

    monkeypatch.setattr(grammar_compiler, "_compile", compile_slowly)
    compiler = GrammarCompiler(tokens, tokens.size, EOS)
    compiler.prepare()
    threads = [threading.Thread(target=compiler.compile, args=(slow,))]
    threads[0].start()
    assert began.wait(60)
    threads.append(threading.Thread(target=compiler.compile, args=(OutputFormat("regex", "ab*", "guided_regex"),)))
    threads[1].start()
    threads[1].join(20)
    is_done = not threads[1].is_alive()
    go.set()
    for thread in threads:
        thread.join()
    assert is_done


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"guided_regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no", 'a "word"']}, 'yes|no|a "word"'),
        ({"guided_grammar": 'start: "x" y\ny: "1" | "2" y'}, "x2*1"),
        ({"guided_grammar": 'root ::= "x" y\ny ::= [0-9] "z"'}, "x[0-9]z"),
        ({"structured_outputs": {"json": {"const": [1, {"a": 2}]}, "disable_any_whitespace": True}}, re.escape('[1,{"a":2}]')),
    ],
)
def test_output_matches_the_demand(compiler: GrammarCompiler, tokens: Tokenization, body: dict[str, Any], expected: str) -> None:
    grammar = compiled(compiler, **body)
    for seed in range(4):
        text = tokens.decode(generate(grammar, seed))
        assert re.fullmatch(expected, text), text


def test_white_space_in_json_is_bounded(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    matcher = TokenMatcher(compiled(compiler, guided_json=SCHEMA))
    white = [t for t in range(tokens.size) if tokens.token_bytes(t) and not tokens.token_bytes(t).strip()]
    made = tokens.encode("{", special_tokens=False)
    while any(allowed := matcher.allowed_after(made[matcher.consumed :])[white].tolist()):
        made.append(white[allowed.index(True)])
        assert len(made) < 60


def test_special_tokens_and_padding_are_no_text(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    allowed = TokenMatcher(compiled(compiler, guided_regex="(.|\n)*")).allowed_after(())
    special = sorted(tokens.special_tokens())
    assert len(special) > len(EOS)
    assert [t for t in special if allowed[t]] == sorted(EOS)
    assert not allowed[tokens.size : tokens.size + 40].any()
    assert int(allowed.sum()) > 900


def test_replayed_tokens_give_the_same_mask(compiler: GrammarCompiler) -> None:
    """The state depends on the tokens only: a resumed response continues with the same masks."""
    grammar = compiled(compiler, guided_json=SCHEMA)
    made = generate(grammar, 3)
    followed = TokenMatcher(grammar)
    for count in range(len(made)):
        mask = followed.allowed_after(made[followed.consumed : count])
        assert torch.equal(TokenMatcher(grammar).allowed_after(made[:count]), mask)


def test_tokens_outside_the_grammar_are_an_error(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    with pytest.raises(EngineFailed, match="cannot continue"):
        TokenMatcher(compiled(compiler, guided_regex="a")).allowed_after(tokens.encode("b", special_tokens=False))


def test_the_end_is_the_only_token_after_a_complete_response(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    matcher = TokenMatcher(compiled(compiler, guided_choice=["yes"]))
    for made in (tokens.encode("yes", special_tokens=False), [2], [2]):  # as with `ignore_eos`
        assert matcher.allowed_after(made).nonzero().flatten().tolist() == [*EOS]


def test_equal_formats_are_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiled(compiler, guided_json=SCHEMA) is compiled(compiler, guided_json=SCHEMA)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"guided_json": {"type": "objec"}}, "Invalid type: objec"),
        ({"guided_json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"guided_json": {"$ref": "http://127.0.0.1:9/schema"}}, "not present"),
        ({"guided_json": {"$ref": "#"}}, "NoExtension"),
        ({"guided_json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_grammar": "start: missing"}, "unknown name"),
        ({"guided_grammar": "root ::= ["}, "cannot be used"),
        ({"guided_grammar": "root ::= " + "(" * 20_000}, "cannot be used"),
    ],
)
def test_invalid_grammars_are_refused(compiler: GrammarCompiler, body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        compiled(compiler, **body)
    assert refused.value.param == next(iter(body))
    assert len(refused.value.message) < 600


def _product() -> dict[str, Any]:
    anys = [{"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(7)]
    return {"allOf": anys}


EXPLODING: list[dict[str, Any]] = [
    {"guided_json": _product()},
    {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}},
    {"guided_json": {"enum": [f"v{i}" for i in range(10_000)]}},
    {"guided_json": {"type": "string", "pattern": "^((a{1,200}){1,200}){1,200}$"}},
    {"guided_regex": "(a|b)*a(a|b){200}"},
    {"guided_regex": r"((\w{1,1000}){1,1000}b?){1,1000}"},
    {"guided_grammar": "start: a{1,1000}\na: b{1,1000}\nb: c{1,1000}\nc: start?"},
]


@pytest.mark.parametrize("body", EXPLODING, ids=lambda body: str(body)[:40])
def test_large_and_exploding_grammars_take_bounded_time(compiler: GrammarCompiler, body: dict[str, Any]) -> None:
    """They are refused, or work: in any case within the compilation's and a few masks' time."""
    begun = time.process_time()
    with contextlib.suppress(InvalidRequest, EngineFailed):
        generate(compiled(compiler, **body), 1, limit=20)
    assert time.process_time() - begun < 5


def test_model_without_an_end_token_is_refused(tokens: Tokenization) -> None:
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        GrammarCompiler(tokens, tokens.size, ()).compile(OutputFormat("regex", "a", "guided_regex"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_parameter_allows_a_masked_token(temperature: float) -> None:
    logits = torch.tensor([9.0, 1.0, 2.0, -4.0, 8.0])
    allowed = torch.tensor([False, True, False, True])  # shorter than the logits
    params = SamplingParams(
        temperature=temperature,
        top_k=1,
        min_p=0.2,
        top_p=0.9,
        logit_bias=((0, 100.0), (4, 100.0)),
        frequency_penalty=2.0,
        top_logprobs=1,
    )
    sampled = sample(logits, params, History(frozenset({0}), Counter({1: 1})), Draw(1, 0, 0), allowed)
    assert sampled.token == 1
    assert sampled.top[0][0] == 0  # log-probabilities are the model's own


def test_other_threads_run_while_a_vocabulary_is_built() -> None:
    random = np.random.default_rng(1)
    words = [bytes(random.integers(97, 123, size=random.integers(1, 10)).astype(np.uint8)) for _ in range(40_000)]

    def longest_gap() -> float:
        """Return the longest time in which another thread did not run, as a share of the whole."""
        ticks: list[float] = []
        is_done = threading.Event()

        def tick() -> None:
            while not is_done.is_set():
                ticks.append(time.perf_counter())

        thread = threading.Thread(target=tick)
        thread.start()
        begun = time.perf_counter()
        Vocabulary(words, (), (0,), lambda text: ())
        took = time.perf_counter() - begun
        is_done.set()
        thread.join()
        during = [begun, *(at for at in ticks if begun < at < begun + took), begun + took]
        return max(b - a for a, b in pairwise(during)) / took

    # With the interpreter locked, nearly all of the time is one gap. On a busy machine, it may be
    # one in which the process waits for a processor.
    assert any(longest_gap() < 0.6 for _ in range(5))


def test_text_that_a_grammar_forces_may_have_any_bytes(compiler: GrammarCompiler, tokens: Tokenization) -> None:
    grammar = compiled(compiler, guided_choice=["\u0000 é漢🎉 \ud7ff"])
    assert tokens.decode(generate(grammar, 1)[:-1]) == "\u0000 é漢🎉 \ud7ff"


def test_each_mask_of_a_long_forced_text_encodes_only_its_beginning() -> None:
    """The library encodes all of it for each mask, while the other requests of the step wait."""
    words = [bytes([byte]) for byte in range(256)] + [b"", "\u00e9\u00e9".encode()]
    encoded: list[int] = []

    def encode(text: bytes) -> list[int]:
        encoded.append(len(text))
        text.decode()  # no part of a character
        return list(text)

    vocabulary = Vocabulary(words, (), (256,), encode)
    forced = "\u00e9" * 50_000
    matcher = Matcher.compile(vocabulary, _grammar_text(OutputFormat("json_schema", json.dumps({"const": forced}), "p")), _LIMITS)
    made = b""
    for _ in range(30):
        mask = matcher.compute_mask()
        assert mask is not None
        token = next(i for i in range(len(words)) if mask[i >> 3] >> (i & 7) & 1)
        assert matcher.consume_token(token)
        made += words[token]
    assert json.dumps(forced, ensure_ascii=False).encode().startswith(made)
    assert len(made) >= 30
    assert 0 < max(encoded) <= 2048


def test_a_mask_encodes_its_forced_text_once() -> None:
    """The text has more tokens than the library makes room for, so that it asks twice."""
    encoded: list[bytes] = []

    def encode(text: bytes) -> list[int]:
        encoded.append(text)
        return list(text)

    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b"", b"aa"], (), (256,), encode)
    text = json.dumps({"const": "a" * 1_000})
    matcher = Matcher.compile(vocabulary, _grammar_text(OutputFormat("json_schema", text, "p")), _LIMITS)
    encoded.clear()
    for token in b'"aaa':
        assert matcher.compute_mask() is not None
        assert matcher.consume_token(token)
    assert encoded
    assert len(set(encoded)) == len(encoded), "each beginning once"
