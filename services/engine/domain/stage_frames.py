"""Connections between the stages of a group (ADR 0067).

Frames are those of `frames`, with a `StageMessage` and, as data, a tensor row by row.

A connection begins with three records of fixed length, in which both sides prove that they know the
group's secret. No secret, and nothing that helps to guess it, is sent.

    listener → caller    "THAWST01", a nonce of 32 bytes
    caller → listener    a nonce of 32 bytes, HMAC-SHA256 of "caller" and the connection's names
    listener → caller    HMAC-SHA256 of "listener" and the same
"""

from __future__ import annotations

import hmac

from services.engine.domain.frames import Protocol
from shared.contracts.stages import STAGE_MESSAGE, Stage, StageMessage
from shared.engines.secret_proof import Role, prove_secret

STAGES: Protocol[StageMessage] = Protocol(b"TS", "stage", STAGE_MESSAGE)
GREETING = b"THAWST01"


def prove(role: Role, stage: Stage, caller: int, nonces: tuple[bytes, bytes]) -> bytes:
    """Return the proof that this side of a connection knows the group's secret.

    Args:
        role: The side that proves it.
        stage: Any stage of the group.
        caller: Index of the stage that connects.
        nonces: The listener's and the caller's.
    """
    names = stage.group_id, stage.count, caller, (caller + 1) % stage.count
    return prove_secret(role, stage.secret, names, nonces)


def is_proven(proof: bytes, role: Role, stage: Stage, caller: int, nonces: tuple[bytes, bytes]) -> bool:
    """Check a proof, in constant time."""
    return hmac.compare_digest(proof, prove(role, stage, caller, nonces))
