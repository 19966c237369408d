"""llguidance through its C interface, which its extension module exports.

Calls through ctypes release the interpreter's lock. The constructor of the library's own Python
class holds it: a vocabulary of 150,000 tokens would stop all other threads for some hundred
milliseconds (docs/adr/0100). Source of the declarations: `parser/llguidance.h` of llguidance 1.9.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

_TOKENIZE = ctypes.CFUNCTYPE(c_size_t, c_void_p, POINTER(c_uint8), c_size_t, POINTER(c_uint32), c_size_t)
_SPECIAL = b"\xff"
"""Begins the bytes of a special token, which no text has."""
_ERROR_BYTES = 1024
_ENCODED_BYTES = 2048
"""Bytes of a text that a grammar forces which are encoded at once; more if there are long tokens.

The library encodes all of it for each mask, and uses the first token.
"""
_RESERVE = 512
"""Bytes behind a structure that the library fills, for fields that a newer one has."""
VERSION = "1.9"
"""The releases whose interface this module declares."""


class _Limits(Structure):
    _fields_ = (
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
    )


class _ConstraintInit(Structure):
    _fields_ = (
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("limits", _Limits),
        ("reserve", c_uint8 * _RESERVE),
    )


class _TokenizerInit(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", POINTER(c_uint32)),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", _TOKENIZE),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", POINTER(c_char_p)),
        ("tok_eos_extra", POINTER(c_uint32)),
        ("tok_eos_extra_count", c_uint32),
    )


@dataclass(frozen=True)
class Limits:
    """Bounds of a compilation and of each mask, in the library's units."""

    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int


class LibraryError(RuntimeError):
    """The installed library cannot be used."""


@cache
def _library() -> ctypes.CDLL:
    import llguidance._lib

    found = ctypes.CDLL(llguidance._lib.__file__)
    for name, result, *arguments in (
        ("llg_get_version", c_char_p),
        ("llg_new_tokenizer_v2", c_void_p, POINTER(_TokenizerInit), c_char_p, c_size_t),
        ("llg_free_tokenizer", None, c_void_p),
        ("llg_constraint_init_set_defaults", None, POINTER(_ConstraintInit), c_void_p),
        ("llg_new_matcher", c_void_p, POINTER(_ConstraintInit), c_char_p, c_char_p),
        ("llg_clone_matcher", c_void_p, c_void_p),
        ("llg_free_matcher", None, c_void_p),
        ("llg_matcher_get_error", c_char_p, c_void_p),
        ("llg_matcher_is_error", c_bool, c_void_p),
        ("llg_matcher_is_stopped", c_bool, c_void_p),
        ("llg_matcher_is_accepting", c_bool, c_void_p),
        ("llg_matcher_consume_token", c_int32, c_void_p, c_uint32),
        ("llg_matcher_get_mask_byte_size", c_size_t, c_void_p),
        ("llg_matcher_compute_mask_into", c_int32, c_void_p, c_void_p, c_size_t),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    version = (found.llg_get_version() or b"").decode().split()[0].partition("@")[2]
    if not version.startswith(f"{VERSION}."):
        raise LibraryError(f"llguidance {version} is installed, and {VERSION} is needed. Install llguidance=={VERSION}.*")
    return found


class Vocabulary:
    """The library's copy of a model's tokens. Thread-safe."""

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], encode: Callable[[bytes], Sequence[int]]
    ) -> None:
        """Build the copy. Other threads run meanwhile.

        Args:
            tokens: The bytes of each token.
            special: Tokens that no text consists of.
            eos: Tokens that may end a response; at least one.
            encode: Returns the tokens of a text.
        """
        self._library = library = _library()
        marked = list(tokens)
        for token in special:
            marked[token] = _SPECIAL + marked[token].removeprefix(_SPECIAL)
        self._encode = encode
        self._encoded_bytes = max(_ENCODED_BYTES, 4 * max(map(len, tokens), default=0))
        self._latest: tuple[bytes, Sequence[int]] = b"", ()
        self._callback = _TOKENIZE(self._tokenize)
        lens = array("I", map(len, marked))
        extra = (c_uint32 * len(eos))(*eos[1:])
        # No slices: they save microseconds of a mask, and more than double the time of this call.
        slices = (c_char_p * 1)(None)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=len(marked),
            tok_eos=eos[0],
            token_lens=ctypes.cast(lens.buffer_info()[0], POINTER(c_uint32)),
            token_bytes=b"".join(marked),
            tokenize_assumes_string=True,
            tokenize_fn=self._callback,
            slices=slices,
            tok_eos_extra=extra,
            tok_eos_extra_count=len(eos) - 1,
        )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self.handle = library.llg_new_tokenizer_v2(byref(init), error, _ERROR_BYTES)
        if not self.handle:
            raise LibraryError(f"The vocabulary cannot be used for grammars: {error.value.decode(errors='replace')}")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.llg_free_tokenizer(self.handle)

    def _tokenize(self, _: Any, text: Any, size: int, out: Any, room: int) -> int:
        end = min(size, self._encoded_bytes)
        while end < size and text[end] & 0xC0 == 0x80:  # not within a character
            end -= 1
        part = ctypes.string_at(text, end)
        # The library asks again, with more room, if the text has more tokens than it expected.
        latest, found = self._latest
        if part != latest:
            found = self._encode(part) if part else ()
            self._latest = part, found  # replaced as one: other threads ask too
        for i, token in enumerate(found[:room]):
            out[i] = token
        return len(found)


class Matcher:
    """The state of one response in its grammar. Use it on one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, handle: int) -> None:
        self._vocabulary = vocabulary  # freed after its matchers
        self._library = vocabulary._library
        self._handle = handle
        self._mask_bytes = self._library.llg_matcher_get_mask_byte_size(handle)

    @classmethod
    def compile(cls, vocabulary: Vocabulary, grammar: str, limits: Limits) -> Matcher:
        """Compile a grammar in the library's JSON form.

        A fault of the grammar is the matcher's `error`.
        """
        library = vocabulary._library
        init = _ConstraintInit()
        library.llg_constraint_init_set_defaults(byref(init), vocabulary.handle)
        init.log_buffer_level = init.log_stderr_level = 0
        init.limits.initial_lexer_fuel = limits.initial_lexer_fuel
        init.limits.step_lexer_fuel = limits.step_lexer_fuel
        init.limits.step_max_items = limits.step_max_items
        init.limits.max_lexer_states = limits.max_lexer_states
        init.limits.max_grammar_size = limits.max_grammar_size
        init.limits.verbose_errors = False
        return cls(vocabulary, library.llg_new_matcher(byref(init), b"llguidance", grammar.encode()))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.llg_free_matcher(self._handle)

    def copy(self) -> Matcher:
        """Return a matcher in the same state."""
        return Matcher(self._vocabulary, self._library.llg_clone_matcher(self._handle))

    @property
    def error(self) -> str:
        """Why it cannot continue; empty if it can."""
        if not self._library.llg_matcher_is_error(self._handle):
            return ""
        return (self._library.llg_matcher_get_error(self._handle) or b"unknown").decode(errors="replace")

    @property
    def is_stopped(self) -> bool:
        """True after the end of the response, and after an error."""
        return bool(self._library.llg_matcher_is_stopped(self._handle))

    @property
    def is_accepting(self) -> bool:
        """True if the response may end here."""
        return bool(self._library.llg_matcher_is_accepting(self._handle))

    def consume_token(self, token: int) -> bool:
        """Follow a token. Returns False for one that the grammar does not allow."""
        return bool(self._library.llg_matcher_consume_token(self._handle, token) == 0)

    def compute_mask(self) -> bytearray | None:
        """Return a bit for each token that may follow, lowest first; None after an error."""
        mask = bytearray(self._mask_bytes)
        pointer = (c_uint8 * self._mask_bytes).from_buffer(mask)
        failed = self._library.llg_matcher_compute_mask_into(self._handle, ctypes.addressof(pointer), self._mask_bytes)
        del pointer
        return None if failed else mask
