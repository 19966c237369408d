"""Keys whose owner is gone."""

from __future__ import annotations

from services.gateway.adapters.idempotency_store import LEASE_S, Claim, Entry, ExistingKey, IdempotencyStore


async def claim_if_abandoned(store: IdempotencyStore, key: str) -> Claim | None:
    """Wait until a key has ended, and claim it if its owner stops renewing it before.

    Returns:
        None: the key has ended, or is deleted.
    """
    found: ExistingKey | None = None
    async with store.watch(key) as watcher:
        while True:
            try:
                update = await watcher.updates(timeout=LEASE_S)
                is_abandoned = False
            except TimeoutError:
                update, is_abandoned = None, True
            if update is not None:
                if update.operation is not None:
                    return None
                found = ExistingKey(key, Entry.model_validate_json(update.value), update.revision)
                is_abandoned = not found.entry.owner
            if found is None or found.entry.state == "done":
                return None
            if is_abandoned and (claim := await store.take_over(found)) is not None:
                return claim
