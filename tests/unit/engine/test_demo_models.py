from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from thaw.demo.models import SIZES, make_demo_model
from thaw.demo.tokenizer import build


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    a, b, c = (make_demo_model(tmp_path / n, "test", seed) for n, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert weights(a) == weights(b) != weights(c)
    assert (a / "tokenizer.json").read_bytes() == (c / "tokenizer.json").read_bytes()


def test_tokenizer_is_the_same_with_every_python() -> None:
    assert {size: hashlib.sha256(build(size).encode()).hexdigest()[:16] for size in (1024, 8192)} == {
        1024: "bbcdfdf4b47a1609",
        8192: "c40bdd34767f0a36",
    }


@pytest.mark.parametrize("size", [258, 8193])
def test_tokenizer_of_other_sizes_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"has 259 to 8192 tokens"):
        build(size)


def test_demo_model_replaces_an_existing_directory(tmp_path: Path) -> None:
    make_demo_model(tmp_path / "m", "test")
    (tmp_path / "m" / "old").touch()
    on_response: list[float] = []
    make_demo_model(tmp_path / "m", "test", progress=on_response.append)
    assert not (tmp_path / "m" / "old").exists()
    assert on_response == sorted(on_response)
    assert on_response[-1] == 1.0
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_failed_creation_leaves_no_files(tmp_path: Path) -> None:
    def fail(done: float) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_demo_model(tmp_path / "m", "test", progress=fail)
    assert not list(tmp_path.iterdir())


def test_making_a_demo_model_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from thaw.demo.models import make_demo_model; "
        "make_demo_model(Path(sys.argv[1]), 'test'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], check=True, timeout=60)


def test_model_sizes_match_their_names(demo_directory: Path) -> None:
    from safetensors import safe_open

    with safe_open(demo_directory / "model.safetensors", "np") as file:
        count = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118  # not a mapping
    assert count < 1_000_000
    assert set(SIZES) == {"test", "5m", "60m", "250m"}


def test_transformers_loads_the_model_and_renders_tools(demo_directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(demo_directory)
    assert str(model.dtype) == "torch.float32"
    tokenizer = AutoTokenizer.from_pretrained(demo_directory)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": {"at": "Bern"}}}]},
        {"role": "tool", "content": "sunny"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert text.count("<|im_start|>system") == 1
    assert "Be brief." in text
    assert '"name": "weather"' in text
    assert '"Bern"' in text
    assert text.endswith("<|im_start|>assistant\n")
    generated = "Grüße, 世界 \U0001f600\n"
    assert tokenizer.decode(tokenizer.encode(generated)) == generated
    assert json.loads((demo_directory / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
