"""The model's tokenizer as the engine uses it: encode, decode, chat templates, and the bytes of a single token."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.engine import remote_code
from services.engine.domain.error_text import first_words
from shared.errors import CheckpointInvalid, InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_RESERVED = frozenset(
    {"chat_template", "conversation", "messages", "tokenize", "return_tensors", "return_dict", "padding", "truncation"}
)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table), reversed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenization:
    """Thread-safe as long as nobody pads or truncates with the same tokenizer, and nobody does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "_tokenizer", None)
        self._byte_level = backend is not None and "ByteLevel" in str(json.loads(backend.to_str()).get("decoder"))
        self._bytes = _byte_alphabet() if self._byte_level else {}
        self.decode = self._decoder(backend)

    @classmethod
    def read(cls, directory: Path, trust_remote_code: bool) -> Tokenization:
        """Raises `CheckpointInvalid` if there is no tokenizer in `directory` that can be read."""
        try:
            with remote_code.exclusive(trust_remote_code):
                found = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code, local_files_only=True)
            return cls(found)
        except Exception as e:  # the Rust side raises bare Exceptions for a damaged tokenizer.json
            raise CheckpointInvalid(f"the tokenizer cannot be read: {type(e).__name__}: {first_words(e)}") from e

    def _decoder(self, backend: Any) -> Callable[[list[int]], str]:
        """Text of token ids without special tokens; straight from the Rust decoder where the Python wrapper would add nothing."""
        tokenizer = self.tokenizer
        if backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
            return lambda ids: str(backend.decode(ids, skip_special_tokens=True))
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))

    def warm(self) -> None:
        """Do once what is slow the first time: compile the chat template, load the encoder's tables."""
        self.decode(self.encode("warm", special_tokens=True))
        if self.tokenizer.chat_template:
            with contextlib.suppress(InvalidRequest):  # some templates refuse this or that; a request will tell
                self.chat([{"role": "user", "content": "warm"}], None, True, {})

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for, also where they are only part of a character."""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token not in self._special and self._byte_level:
            return bytes(self._bytes[c] for c in piece) if all(c in self._bytes for c in piece) else piece.encode()
        if (hit := _BYTE_TOKEN.match(piece)) is not None:
            return bytes([int(hit[1], 16)])
        return bytes(piece.replace("\u2581", " ").encode())

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template_arguments: dict[str, Any],
    ) -> list[int]:
        """The prompt that the model's chat template makes. Raises `InvalidRequest` if there is none or it refuses the messages."""
        if not self.tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        if refused := _RESERVED & template_arguments.keys():
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(sorted(refused))}", param="chat_template_kwargs")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_arguments,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as e:
            raise InvalidRequest(f"the model's chat template refuses these messages: {e}", param="messages") from e
        return self.encode(str(text), special_tokens=False)
