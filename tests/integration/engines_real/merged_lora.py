"""Tokens of a model into which a LoRA adapter is merged."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.adapters import merge

TOKENS = 24
PROMPT = "The ice"


def merged(base: Path, adapter: Path | None) -> list[int]:
    """Return the tokens of transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        merge(model, adapter)
    prompt = AutoTokenizer.from_pretrained(base)(PROMPT, return_tensors="pt")["input_ids"]
    model.generation_config.eos_token_id = None
    out = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = out[0, prompt.shape[1] :].tolist()
    return tokens
