"""Create ordered JetStream consumers and remove them with their reader.

nats-py ends a subscription and leaves its consumer to the server, which keeps the consumer of a
bucket's watcher for five minutes; a stream has room for a thousand.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

FORGOTTEN_S = 5.0
"""The server removes a consumer that has had no reader for so long: of a process that died, or lost
its connection.
"""


@asynccontextmanager
async def watching(bucket: KeyValue, keys: str = ">", *, ignore_deletes: bool = False) -> AsyncIterator[Any]:
    """Watch `keys` while the block runs.

    The watcher is nats-py's `KeyWatcher`, whose methods have no types.
    """
    watcher: Any = await bucket.watch(keys, ignore_deletes=ignore_deletes, inactive_threshold=FORGOTTEN_S)
    # This task of nats-py looks four times a second for flow control to answer. With a callback
    # there is none: the client answers at once.
    watcher._sub._sub._jsi._fctask.cancel()
    try:
        if watcher._init_done:
            await _check_empty(watcher)
        yield watcher
    finally:
        await end(watcher._sub)


async def _check_empty(watcher: Any) -> None:
    """Withdraw the end of the entries if some have been sent and have not arrived.

    nats-py reports the end at once if the server has nothing left to send and the client has
    received nothing. What the server has sent may still be on its way: its answer to the request
    for the consumer's state overtakes it.
    """
    watcher._updates.get_nowait()  # The end; no other task has run since it was put.
    watcher._init_done = False
    info = await watcher._sub.consumer_info()
    is_sent = info.num_pending or (info.delivered and info.delivered.consumer_seq)
    # Otherwise nats-py reports the end after the last entry.
    if not is_sent and not watcher._init_done:
        watcher._init_done = True
        await watcher._updates.put(None)


async def end(subscription: Any) -> None:
    """Unsubscribe a nats-py `PushSubscription`, and remove its consumer.

    Without a connection the server removes the consumer by itself; the client would subscribe again
    when it reconnects.
    """
    js: JetStreamContext = subscription._js
    if js._nc.is_closed:
        return
    await subscription.unsubscribe()
    if not js._nc.is_connected:
        return
    with contextlib.suppress(NatsError, TimeoutError):
        await js.delete_consumer(subscription._stream, subscription._consumer)
