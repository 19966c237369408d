"""Train a byte-level BPE tokenizer offline.

Its text is part of every Python installation.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""Their ids are 0, 1 and 2."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role in ('system', 'developer') %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer a call as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role in ('system', 'developer')) %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + ((call.function or call) | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def corpus() -> list[str]:
    """Return English text of about 700 kB for training.

    It is the language reference inside `pydoc`, or the library's own sources if a distribution
    omits the reference.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return [path.read_text(errors="replace") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    return [topics[name] for name in sorted(topics)]


def train(vocab_size: int) -> str:
    """A trained tokenizer as the text of a `tokenizer.json`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        ),
    )
    text: str = tokenizer.to_str()
    return text


def train_tokenizer(vocab_size: int, cache: Path) -> str:
    """Train a tokenizer once for all models whose directories are under `cache`."""
    kept = cache / f".tokenizer-{vocab_size}.json"
    try:
        text = kept.read_text()
        json.loads(text)
        return text
    except (OSError, ValueError):
        text = train(vocab_size)
    with tempfile.NamedTemporaryFile("w", dir=cache, prefix=kept.name, delete=False) as file:
        file.write(text)
    Path(file.name).replace(kept)
    return text


def write_tokenizer(directory: Path, vocab_size: int, context_length: int, cache: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    (directory / "tokenizer.json").write_text(train_tokenizer(vocab_size, cache))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
