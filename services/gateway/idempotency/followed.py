"""Responses that ended gateways followed, and of which it is unknown whether they were recorded."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from services.gateway.adapters.idempotency_store import Claim, ClaimLost, IdempotencyStore, store_errors_as_unavailable
from services.gateway.adapters.usage_meter import UsageMeter
from services.gateway.domain.followed_usage import FollowedUsage
from services.gateway.idempotency.abandoned import claim_if_abandoned
from services.gateway.idempotency.store_retry import retry_store
from shared.errors import ThawError

log = logging.getLogger(__name__)
_CONCURRENT = 16


async def record_followed(store: IdempotencyStore, meter: UsageMeter) -> None:
    """Resolve all of `meter.unresolved`: record those whose owners are gone as well.

    If the store is unavailable for more than a minute, the rest is left to the next gateway.
    """
    slots = asyncio.Semaphore(_CONCURRENT)

    async def resolve(usage: FollowedUsage) -> None:
        async with slots:
            try:
                with store_errors_as_unavailable():
                    await retry_store(partial(_resolve, store, meter, usage))
            except ClaimLost:
                log.info("another gateway owned the key of a followed response when it was recorded")
            except ThawError as e:
                log.warning("failed to find out whether a followed response was recorded", extra={"error": repr(e)})

    await asyncio.gather(*map(resolve, meter.unresolved))


async def _resolve(store: IdempotencyStore, meter: UsageMeter, usage: FollowedUsage) -> None:
    claim = await claim_if_abandoned(store, usage.key)
    if claim is None:
        meter.end(usage.request_id)  # its owner recorded it before it ended the key
        return
    async with claim.renewed():
        await _record(store, meter, usage, claim)


async def _record(store: IdempotencyStore, meter: UsageMeter, usage: FollowedUsage, claim: Claim) -> None:
    if claim.entry.reply != usage.reply:
        meter.end(usage.request_id)  # another attempt began, which the gateway records that reads it to its end
        await claim.release()
        return
    meter.record(usage.record, usage.request_id)
    if await store.wait_until_captured(usage.reply, usage.messages):
        await claim.complete(usage.messages, None)
    else:
        await claim.release()  # the next request with the key has the response completed
