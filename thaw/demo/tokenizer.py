"""The byte-level BPE tokenizer of demo models."""

from __future__ import annotations

import json
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


def build(vocab_size: int) -> str:
    """Return a tokenizer as the text of a `tokenizer.json`.

    Its merges are the first ones of `merges.json`. Those were trained on the text of the language
    reference in `pydoc` of Python 3.11.7 (`tokenizers.trainers.BpeTrainer`, 700 kB of English), and
    are a file because the text differs between versions and distributions of Python: a demo model
    has the same tokens everywhere.

    Raises:
        ValueError: More tokens than `merges.json` has, or fewer than the bytes need.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known = json.loads((Path(__file__).parent / "merges.json").read_text())
    if not len(tokens) <= vocab_size <= len(tokens) + len(known):
        raise ValueError(f"The demo's tokenizer has {len(tokens)} to {len(tokens) + len(known)} tokens, not {vocab_size}")
    merges = [(left, right) for left, right in (line.split(" ") for line in known[: vocab_size - len(tokens)])]
    tokens += (left + right for left, right in merges)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    text: str = tokenizer.to_str()
    return text


def write_tokenizer(directory: Path, vocab_size: int, context_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    (directory / "tokenizer.json").write_text(build(vocab_size))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
