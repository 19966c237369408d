"""Views of a model, and statuses of its instances, that the command line shows."""

from __future__ import annotations

from shared.contracts.admin import ModelView
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState, InstanceStatus

INFO = ModelInfo(
    source="/m", revision="r", architecture="A", model_type="a", task="generate", weights_bytes=1, parameters=1, dtype="float32",
    context_length=8, kv_bytes_per_token=1,
)  # fmt: skip
VIEW = ModelView(card=ModelCard(spec=ModelSpec(name="m", source="/m"), info=INFO, created=0))


def instance(state: InstanceState) -> InstanceStatus:
    return InstanceStatus(
        instance_id=f"i-{state.value}",
        plan_id="p",
        token=1,
        model="m",
        generation=1,
        revision="r",
        device_ids=("cpu:0",),
        state=state,
    )
