"""An admin API without a key accepts no commands or code.

Inference requests carry none.
"""

from __future__ import annotations

from typing import Any

import pytest

from shared.contracts.models import ContainerOptions, ModelSpec, code_fields
from tests.integration.gateway.conftest import CARDS, ServeFn, until_listed
from tests.support.fake_engine import FakeNode

OWN = {"name": "own", "source": "engine://own", "engine": "openai", "memory": 1 << 30, "max_model_len": 128}
SPECS: list[dict[str, Any]] = [
    OWN | {"command": ["/bin/sh"]},
    OWN | {"container": {"image": "i"}},
    {"name": "own", "source": "/m", "engine": "vllm", "env": {"A": "b"}},
    {"name": "own", "source": "/m", "engine": "vllm", "engine_args": {"middleware": "evil.Middleware"}},
    {"name": "own", "source": "hf://someone/theirs", "trust_remote_code": True},
]


RUNS_CODE = {"command", "env", "container", "trust_remote_code", "engine_args", "network"}
"""Decision about every option of a model (`network: host` opens an engine to other users).

A new option fails this test until it has one.
"""


def test_every_option_that_can_execute_code_is_listed() -> None:
    example = {
        "command": ("sh",), "env": {"A": "b"}, "container": ContainerOptions(image="i"), "trust_remote_code": True, "engine_args": {"a": 1}
    }  # fmt: skip
    for field in ModelSpec.model_fields:
        spec = ModelSpec(name="m", source="/m", engine="vllm").model_copy(update={field: example.get(field, "x")})
        assert (field in code_fields(spec)) == (field in RUNS_CODE), field
    assert not code_fields(ModelSpec(name="m", source="/m", engine_args={"kv_cache_bytes": 1}))


@pytest.mark.parametrize("spec", SPECS)
async def test_open_admin_api_accepts_no_commands(node: FakeNode, serve: ServeFn, spec: dict[str, Any]) -> None:
    async with serve() as served:
        await until_listed(served, CARDS)
        answer = await served.http.post("/admin/v1/models", json={"specs": [spec]})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "permission_denied"
    async with serve(admin_key="root") as served:
        await until_listed(served, CARDS)
        assert (await served.http.post("/admin/v1/models", json={"specs": [spec]})).status_code == 401
        headers = {"authorization": "Bearer root"}
        # The request passes authorization; the missing scheduler is another error.
        assert (await served.http.post("/admin/v1/models", json={"specs": [spec]}, headers=headers)).status_code == 503
