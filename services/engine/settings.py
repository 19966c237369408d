"""Settings of the engine process."""

from __future__ import annotations

from pydantic import Field

from shared.settings import StageSettings


class EngineSettings(StageSettings):
    engine_threads: int = Field(
        default=0, ge=0, description="CPU threads that an engine computes with; 0: as many as torch chooses."
    )
    engine_step_tokens: int = Field(default=8192, ge=1, description="Most tokens that one step of an engine computes.")
    engine_overlap: bool = Field(
        default=True, description="Compute prompts layer by layer while weights are loading; false: when every byte is there."
    )
    engine_chunk_tokens: int = Field(
        default=256, ge=1, description="Most prompt tokens in one step while other requests are being answered."
    )
    stage_result_within: float = Field(
        default=300.0, gt=0, description="Seconds after which a step of a pipeline group without a result ends the group."
    )
