"""The model's tokenizer: encode, decode, chat templates, token bytes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.engine import remote_code
from services.engine.domain.error_text import first_paragraph
from shared.errors import CheckpointInvalid, InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_PROBE = "thaw_probe"
_PROBE_SCHEMA = {"type": "object", "properties": {}}
_RESERVED = frozenset(
    {"chat_template", "conversation", "messages", "tokenize", "return_tensors", "return_dict", "padding", "truncation"}
)


def _byte_alphabet() -> dict[str, int]:
    """Map the printable characters of byte-level BPE (GPT-2's table) back to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenization:
    """The tokenizer of one model.

    Thread-safe, because no caller pads or truncates with it.
    """

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
        """Read the tokenizer in `directory`.

        Raises `CheckpointInvalid` if there is none or it is damaged.
        """
        try:
            with remote_code.guard_remote_code(trust_remote_code):
                found = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code, local_files_only=True)
            return cls(found)
        except Exception as e:  # the Rust side raises bare Exceptions for a damaged tokenizer.json
            raise CheckpointInvalid(f"The tokenizer cannot be read: {type(e).__name__}: {first_paragraph(e)}") from e

    def _decoder(self, backend: Any) -> Callable[[list[int]], str]:
        """Return a function from token ids to text without special tokens.

        It calls the Rust decoder directly where the Python wrapper would add nothing.
        """
        tokenizer = self.tokenizer
        if backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
            return lambda ids: str(backend.decode(ids, skip_special_tokens=True))
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))

    def decode_with(self, shown: frozenset[int]) -> Callable[[list[int]], str]:
        """Return a function like `decode`, with the text of the special tokens `shown`."""
        if not shown:
            return self.decode
        decode, names = self.decode, {token: str(self.tokenizer.convert_ids_to_tokens(token)) for token in shown}

        def decode_parts(ids: list[int]) -> str:
            parts: list[str] = []
            begin = 0
            for i, token in enumerate(ids):
                if token in names:
                    parts += (decode(ids[begin:i]) if i > begin else "", names[token])
                    begin = i + 1
            return "".join(parts) + (decode(ids[begin:]) if begin < len(ids) else "")

        return decode_parts

    @cached_property
    def tool_template(self) -> str | None:
        """The chat template that renders tools; None if it ignores them."""
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        if not isinstance(template, str):
            return None
        probe = {"type": "function", "function": {"name": _PROBE, "description": _PROBE, "parameters": _PROBE_SCHEMA}}
        try:
            text = self.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tools=[probe], tokenize=False)
        except Exception:  # it refuses this conversation; a template may raise anything
            return template if "tools" in template else None
        return template if _PROBE in str(text) else None

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the ids of those `texts` that are special tokens."""
        added = {entry.content: token for token, entry in self.tokenizer.added_tokens_decoder.items() if entry.special}
        return {text: added[text] for text in texts if text in added}

    def warm(self) -> None:
        """Run slow first-time work: compile the template, load encoder tables."""
        self.decode(self.encode("warm", special_tokens=True))
        if self.tokenizer.chat_template:
            with contextlib.suppress(InvalidRequest):  # a template may refuse this message; requests report their own errors
                self.chat([{"role": "user", "content": "warm"}], None, True, {})

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special_tokens)
        return ids

    def special_tokens(self) -> frozenset[int]:
        """Return the tokens that no text consists of. `decode` leaves them out."""
        added = self.tokenizer.added_tokens_decoder.items()
        return self._special | {token for token, entry in added if entry.special}

    def token_bytes(self, token: int) -> bytes:
        """The bytes of `token`, even if they are only part of a character."""
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
        """Render the chat template to token ids.

        Raises:
            InvalidRequest: The model has no template, or the template refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise InvalidRequest("This model has no chat template; use /v1/completions", param="messages")
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
            raise InvalidRequest(f"The model's chat template refuses these messages: {e}", param="messages") from e
        return self.encode(str(text), special_tokens=False)
