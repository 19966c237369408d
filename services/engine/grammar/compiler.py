"""Compile output formats for one model's tokens, with llguidance (docs/adr/0073).

The library is imported, and its copy of the vocabulary built, with the first request that needs it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from services.engine.domain.output_format import OutputFormat
from services.engine.grammar.library import Limits, Matcher, Vocabulary
from services.engine.tokenization import Tokenization
from shared.errors import InvalidRequest

_KEPT = 64
"""Compiled grammars that are kept for later requests of the same API key with the same format."""
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""White space between tokens of JSON. Bounded: a small model at a low temperature would otherwise
emit it until `max_tokens`.
"""
_MAX_ERROR_CHARS = 300
_LIMITS = Limits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
)
"""The speeds that the library's documentation gives put the lexer at 20 ms for a grammar and 14 ms
for a mask.
"""


class Grammar:
    """A compiled output format. Thread-safe."""

    def __init__(self, template: Matcher) -> None:
        self._template = template

    def new_matcher(self) -> Matcher:
        """Return a matcher in its first state."""
        return self._template.copy()


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe; call it on a thread that may wait."""

    def __init__(self, tokenization: Tokenization, vocab_size: int, eos: Iterable[int]) -> None:
        """Create a compiler.

        Args:
            tokenization: The model's tokenizer.
            vocab_size: Width of the model's logits.
            eos: Tokens that may end a response.
        """
        self._tokens = tokenization
        self._vocab_size = vocab_size
        self._eos = sorted(token for token in eos if 0 <= token < vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[tuple[str, OutputFormat], Grammar] = OrderedDict()

    def prepare(self) -> None:
        """Import the library, and build its copy of the vocabulary, unless that is done."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._build_vocabulary()

    def compile(self, wanted: OutputFormat, flow: str = "") -> Grammar:
        """Return the grammar of `wanted`.

        Args:
            flow: Opaque id of the API key. Keys share no grammars: the time of a compilation would
                show that another key has used the format.

        Raises:
            InvalidRequest: The format is invalid, too complex, or allows no text at all.
        """
        if not self._eos:
            raise InvalidRequest("This model has no end-of-sequence token, so its output cannot be constrained", param=wanted.param)
        self.prepare()
        vocabulary = self._vocabulary
        assert vocabulary is not None
        with self._lock:
            grammar = self._kept.get((flow, wanted))
        if grammar is None:  # without the lock: another request must not wait for a slow compilation
            grammar = Grammar(_compile(wanted, vocabulary))
        with self._lock:
            grammar = self._kept.setdefault((flow, wanted), grammar)
            self._kept.move_to_end((flow, wanted))
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return grammar

    def _build_vocabulary(self) -> Vocabulary:
        size = self._tokens.size
        tokens = [self._tokens.token_bytes(i) if i < size else b"" for i in range(self._vocab_size)]
        special = sorted(token for token in self._tokens.special_tokens() if token < self._vocab_size)
        return Vocabulary(tokens, special, self._eos, _Encoder(self._tokens, tokens, frozenset(special)))


class _Encoder:
    """Encodes text that a grammar forces."""

    def __init__(self, tokenization: Tokenization, tokens: list[bytes], special: frozenset[int]) -> None:
        self._tokenization = tokenization
        self._tokens = tokens
        self._id_of = {text: i for i, text in enumerate(tokens) if text and i not in special}
        self._longest = max(map(len, self._id_of), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Return the model's own tokens of `text`, or others with exactly these bytes.

        SentencePiece puts a space before a text, which is not in `text`.
        """
        own = self._tokenization.encode(text.decode(errors="replace"), special_tokens=False)
        if b"".join(self._tokens[token] for token in own if token < len(self._tokens)) == text:
            return own
        return self._longest_matches(text)

    def _longest_matches(self, text: bytes) -> list[int]:
        found: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._id_of), None)
            if end is None:
                break  # llguidance allows what is left token by token
            found.append(self._id_of[text[at:end]])
            at = end
        return found


def _compile(wanted: OutputFormat, vocabulary: Vocabulary) -> Matcher:
    matcher = Matcher.compile(vocabulary, _grammar_text(wanted), _LIMITS)
    if not matcher.error:
        matcher.compute_mask()  # a grammar without any text shows here
    if error := matcher.error:
        raise _invalid_format(wanted, error)
    return matcher


def _grammar_text(wanted: OutputFormat) -> str:
    from llguidance import LLMatcher, grammar_from

    match wanted.kind:
        case "json_schema":
            if wanted.is_compact:
                return str(LLMatcher.grammar_from_json_schema(wanted.text, overrides={"whitespace_flexible": False}))
            return str(LLMatcher.grammar_from_json_schema(wanted.text, overrides={"whitespace_pattern": _WHITE_SPACE}))
        case "regex":
            return str(LLMatcher.grammar_from_regex(wanted.text))
        case "grammar":
            try:
                return str(grammar_from("grammar", wanted.text))
            except (ValueError, RecursionError) as e:  # a converter in Python, for GBNF
                raise _invalid_format(wanted, str(e)) from e


def _invalid_format(wanted: OutputFormat, reason: str) -> InvalidRequest:
    noun = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}[wanted.kind]
    first = reason.split("\n<state>", 1)[0].strip() or "it allows no text"
    return InvalidRequest(
        f"The {noun} in {wanted.param} cannot be used: {first[:_MAX_ERROR_CHARS].rstrip('.')}", param=wanted.param
    )
