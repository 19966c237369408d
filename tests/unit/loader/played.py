"""The loader's decisions, one event after the other, as its shell sends them."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.loader.domain.decide import decide
from services.loader.domain.effects import Effect, Grant, RemoveRecord, Vacate
from services.loader.domain.events import Completed, Event, Indexed, LaidOut, Prepare
from services.loader.domain.state import State
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.errors import CheckpointInvalid
from weights.pool.chunks import Chunks

ERROR = CheckpointInvalid("damaged").body()


def card(revision: str = "w1", *, pin: bool = False) -> ModelCard:
    info = ModelInfo(
        source="/m",
        revision=revision,
        architecture="LlamaForCausalLM",
        model_type="llama",
        task="generate",
        weights_bytes=100,
        parameters=1,
        dtype="float32",
        context_length=10,
        kv_bytes_per_token=1,
    )
    return ModelCard(spec=ModelSpec(name=revision, source="/m", pin=pin), info=info, created=0)


@dataclass
class Played:
    """The shell's running effects after the events so far."""

    state: State = field(default_factory=lambda: State(chunks=Chunks(64)))
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)

    def do(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = decide(self.state, event, self.now)
        self.effects.extend(effects)
        return effects


VACATE = (RemoveRecord("w1"), Vacate(1, (0,), 100, 0, "w1"))
"""Effects that release w1's memory."""


def granted(p: Played, weights_id: str = "w1", run: int = 1, nbytes: int = 100, room: int = 1 << 40) -> None:
    """Grant the run its chunks and its index."""
    assert any(isinstance(e, Grant) for e in p.do(LaidOut(weights_id, run, nbytes, room)))
    p.do(Indexed(weights_id, run, "/m", nbytes))


def loaded(*instances: str) -> Played:
    """Complete the weights w1, with `instances` as holders."""
    p = Played()
    for n, i in enumerate(instances):
        p.do(Prepare(n, i, card(), 1))
    granted(p)
    p.do(Completed("w1", 1))
    return p
