"""Settings of the loader."""

from __future__ import annotations

from pydantic import Field

from shared.settings import NodeSettings


class LoaderSettings(NodeSettings):
    """The hub is configured by huggingface_hub's own variables: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE."""

    loader_threads: int = Field(default=4, ge=1, le=64, description="Threads that read one model's weight files.")
