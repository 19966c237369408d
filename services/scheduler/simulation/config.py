"""What is simulated: cluster.yaml and models.yaml. Bytes and bandwidths in GB (10^9), times in seconds unless the name says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import InvalidRequest

GB = 10**9


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkSpeeds(_Strict):
    """GB per second. `remote` and `ssd` belong to a node and bring one load after the other; `device` to each device."""

    remote: float = Field(gt=0)
    ssd: float = Field(gt=0)
    device: float = Field(gt=0)


class ClusterFile(_Strict):
    nodes: int = Field(ge=1)
    devices: int = Field(ge=1, description="Of each node.")
    device_gb: float = Field(gt=0)
    dram_gb: float = Field(ge=0, description="Of each node, for weights.")
    ssd_gb: float = Field(
        ge=0, description="Of each node, for weights; filled beforehand with models in their order, round robin over the nodes."
    )
    links: LinkSpeeds
    engine_seconds: float = Field(ge=0, description="From the command to an engine that can take weights; overlaps with loading.")
    init_seconds: float = Field(default=0.0, ge=0, description="From the last byte to ready.")
    leave_seconds: float = Field(default=0.0, ge=0, description="From the last request to proved free memory.")
    message_ms: float = Field(default=1.0, ge=0, description="One way, between any two processes.")


class Fixed(_Strict):
    """The plain kind of the older papers: every request takes as long, one after the other on an instance."""

    kind: Literal["fixed"] = "fixed"
    seconds: float = Field(gt=0)


class Batching(_Strict):
    """Prefill at a rate, then a token each `tpot_ms`, and `tpot_ms_more` longer for each request that runs beside it when it begins."""

    kind: Literal["batching"] = "batching"
    prefill_tokens_per_second: float = Field(gt=0)
    tpot_ms: float = Field(gt=0)
    tpot_ms_more: float = Field(default=0.0, ge=0)
    concurrency: int = Field(default=16, ge=1)


class ModelGroup(_Strict):
    """`copies` models alike, called name-0, name-1 …; first come more popular ones."""

    name: str
    copies: int = Field(default=1, ge=1)
    weights_gb: float = Field(gt=0)
    kv_gb: float = Field(default=0.0, ge=0, description="Memory beside the weights.")
    service: Annotated[Fixed | Batching, Field(discriminator="kind")]
    slo_ttft: float = Field(gt=0)
    keep_alive: float = Field(default=300.0, ge=-1)
    replicas_max: int = Field(default=1, ge=1)

    @property
    def capacity(self) -> int:
        """Requests that an instance runs at once."""
        return 1 if isinstance(self.service, Fixed) else self.service.concurrency


class ModelsFile(_Strict):
    models: tuple[ModelGroup, ...] = Field(min_length=1)


File = TypeVar("File", bound=BaseModel)


def read(path: Path, kind: type[File]) -> File:
    """Raises `InvalidRequest` that names the file and the key."""
    try:
        return kind.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError) as e:
        raise InvalidRequest(f"{path} cannot be read: {e}") from e
    except ValidationError as e:
        first = e.errors()[0]
        raise InvalidRequest(f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from e
