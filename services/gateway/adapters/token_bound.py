"""A lower bound of a text's tokens, without tokenizing it."""

from __future__ import annotations

import json
from typing import Any

_KEEPING_NORMALIZERS = {"Sequence", "Prepend", "Replace"}
_KEEPING_PRE_TOKENIZERS = {"Sequence", "ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"}
_BYTE_FALLBACK = tuple(f"<0x{byte:02X}>" for byte in range(256))


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Return an upper bound of the bytes of text that one token stands for.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.

    Returns:
        None if there is no bound: the tokenizer drops text, or makes one token of unknown text.
    """
    if not _keeps_all_text(tokenizer):
        return None
    tokens = (tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size()))
    return max(len(token.encode()) for token in tokens if token is not None)


def _keeps_all_text(tokenizer: Any) -> bool:
    if type(tokenizer.model).__name__ != "BPE":
        return False
    if any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values()):  # they take in spaces of any number
        return False
    normalizers, pre_tokenizers = _parts(tokenizer.normalizer), _parts(tokenizer.pre_tokenizer)
    is_kept = all(_keeps_length(n) for n in normalizers) and all(
        p["type"] in _KEEPING_PRE_TOKENIZERS and p.get("behavior") != "Removed" for p in pre_tokenizers
    )
    return is_kept and _knows_all_bytes(tokenizer, any(p["type"] == "ByteLevel" for p in pre_tokenizers))


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _KEEPING_NORMALIZERS
    found = normalizer["pattern"].get("String")
    return found is not None and len(normalizer["content"].encode()) >= len(found.encode())


def _knows_all_bytes(tokenizer: Any, is_byte_level: bool) -> bool:
    from tokenizers.pre_tokenizers import ByteLevel

    if is_byte_level:
        return all(tokenizer.token_to_id(character) is not None for character in ByteLevel.alphabet())
    return bool(tokenizer.model.byte_fallback) and all(tokenizer.token_to_id(name) is not None for name in _BYTE_FALLBACK)


def _parts(component: Any) -> list[dict[str, Any]]:
    """Describe a normalizer or pre-tokenizer, and those it consists of."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    parts, found = [described], []
    while parts:
        part = parts.pop()
        found.append(part)
        parts += part.get("normalizers", []) + part.get("pretokenizers", [])
    return found
