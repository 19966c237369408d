"""Engine processes of converted and of embedding models compute while their weights arrive."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers as tf

from shared.contracts.engine import EngineStart
from shared.contracts.inference import EmbeddingsFinished, InferFinished
from shared.messaging import Mesh
from tests.integration.engine.processes import exited, forked
from tests.support.engines import Engines, ZygoteClient
from tests.support.followed_loader import FollowedLoader
from tests.support.segments import card_of

PROMPT = [7, 8, 9, 10, 11]
TOKENS = 8
PAGES = 256 << 20
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="thaw-o-") as directory:  # a socket path must be short
        yield Path(directory)


def saved(model: tf.PreTrainedModel, directory: Path, demo_directory: Path) -> Path:
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_directory / file, directory / file)
    return directory


async def joined(
    engines: Engines,
    client: ZygoteClient,
    loader: FollowedLoader,
    start: EngineStart,
    endpoint: Literal["completion", "embedding"],
    **body: Any,
) -> Any:
    """Send a request before any byte is there, then let all of them arrive; return the replies."""
    if loader.device is not None:
        start = start.model_copy(update={"device": "cpu:1", "separate_memory": True})
    await loader.start()
    pid = await forked(client, start)
    report = await engines.reported(start.instance_id, lambda r: r.accepts_requests or r.state != "loading")
    assert (report.state, report.accepts_requests) == ("loading", True), report.error
    stream = await engines.ask(start.instance_id, endpoint, **body)
    await engines.reported(start.instance_id, lambda r: r.load.waiting + r.load.active == 1)
    await loader.send(0.5)
    assert not stream.replies
    await loader.finish()
    await stream.last()
    assert (await engines.settled(start.instance_id)).state == "ready"
    os.kill(pid, signal.SIGKILL)
    await exited(client, pid)
    await loader.stop()
    return stream


@pytest.mark.parametrize("pages", [0, PAGES], ids=["unified", "separate"])
async def test_a_mixture_of_experts_converts_each_layer_when_it_is_there(
    mesh: Mesh, engines: Engines, client: ZygoteClient, home: Path, demo_directory: Path, tmp_path: Path, pages: int
) -> None:
    torch.manual_seed(0)
    config = tf.MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=4, bos_token_id=None, eos_token_id=None)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    directory = saved(model, tmp_path / "m", demo_directory)
    expected = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), max_new_tokens=TOKENS, do_sample=False
    )[0, len(PROMPT) :].tolist()
    loader = FollowedLoader(mesh, engines.node, home, directory, pages=pages)
    start = engines.spec(card_of(directory), THAW_HOME=str(home))
    ask = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    stream = await joined(engines, client, loader, start, "completion", **ask)
    assert isinstance(stream.replies[-1], InferFinished)
    assert stream.tokens() == expected


@pytest.mark.parametrize("pages", [0, PAGES], ids=["unified", "separate"])
async def test_an_embedding_model_answers_requests_that_joined_its_load(
    mesh: Mesh, engines: Engines, client: ZygoteClient, home: Path, demo_directory: Path, tmp_path: Path, pages: int
) -> None:
    torch.manual_seed(0)
    model = tf.BertModel(tf.BertConfig(**_SIZES)).eval()
    directory = saved(model, tmp_path / "m", demo_directory)
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(model(torch.tensor([PROMPT])).last_hidden_state[0].mean(0), dim=0)
    loader = FollowedLoader(mesh, engines.node, home, directory, pages=pages)
    start = engines.spec(card_of(directory, task="embed"), THAW_HOME=str(home))
    stream = await joined(engines, client, loader, start, "embedding", input=PROMPT)
    done = stream.replies[-1]
    assert isinstance(done, EmbeddingsFinished), done
    found = np.frombuffer(base64.b64decode(done.vectors[0]), dtype="<f4")
    torch.testing.assert_close(torch.from_numpy(found.copy()), expected, atol=1e-5, rtol=1e-4)
