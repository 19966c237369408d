"""What may be asked of the computing thread, from any thread; it takes effect between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.generation.lora_layers import Adapter
from services.engine.generation.prepared_prefixes import Prepare
from services.engine.generation.request import EmbedRequest, GenerationRequest


@dataclass(frozen=True)
class Cancel:
    """Forget the request; nothing more is delivered for it."""

    request_id: str


@dataclass(frozen=True)
class Yield:
    """Stop the request, to go on elsewhere. Nothing happens if it is not there."""

    request_id: str


@dataclass(frozen=True)
class ForgetAhead:
    """Let go of what `Prepare` keeps under that name."""

    name: str


@dataclass(frozen=True)
class Forget:
    """No request will name `adapter` again; `forgotten` is called, on the computing thread, when it keeps nothing of it."""

    adapter: Adapter
    forgotten: Callable[[], None]


@dataclass(frozen=True)
class Grant:
    """Keys and values may take that many blocks; sequences give way if they have more."""

    kv_blocks: int


@dataclass(frozen=True)
class Stop:
    pass


Command = GenerationRequest | EmbedRequest | Prepare | Cancel | Yield | Forget | ForgetAhead | Grant | Stop
