"""When a request of a batch may start, and what follows its response.

Batches use what interactive requests leave. A request starts only if

1. no interactive request waits in this gateway, for any model,
2. the model's ready instances have a free place, one of which stays free for the next interactive
   request,
3. or no instance is ready, no other request of a batch waits for the model, and the start costs
   interactive models nothing: a device has no instance, or all of its instances have been idle for
   a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.domain.dispatcher import Dispatcher

BATCH_PRIORITY = -100
"""The lowest priority. Requests with it are taken for those of batches."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 60.0
_MAX_FAILURES = 4
_RETRIED = frozenset({408, 409, 429})
_UNAVAILABLE = frozenset({429, 503, 504})


@dataclass(frozen=True)
class ModelLoad:
    """A model as a gateway sees it.

    Attributes:
        interactive_waiting: Waiting requests of all models that are not of batches.
        places: Requests that the ready instances of the model compute at once, over all of them.
        busy: Requests that these instances have, from all gateways.
        started: Requests of batches that have started at this gateway and have not ended.
        idle_s: Longest time for which all instances of one device have been idle, in seconds;
            infinity for a device without an instance, 0 without a device.
    """

    interactive_waiting: int
    places: int
    busy: int
    started: int
    idle_s: float


def may_start(load: ModelLoad, start_after_idle_s: float) -> bool:
    """Decide whether a request of a batch may start now."""
    if load.interactive_waiting:
        return False
    if load.places:
        return max(load.busy, load.started) < max(1, load.places - 1)
    return not load.started and load.idle_s >= start_after_idle_s


def load_of(dispatcher: Dispatcher, model: str, started: int, now: float) -> ModelLoad:
    """Read the load of a model from what the gateway knows."""
    ready = [route for route in dispatcher.routes.iter_routes(model) if route.is_ready]
    return ModelLoad(
        interactive_waiting=dispatcher.count_above(BATCH_PRIORITY),
        places=sum(max(1, route.status.capacity) for route in ready),
        busy=sum(route.own + route.others for route in ready),
        started=started,
        idle_s=dispatcher.routes.longest_idle_s(now),
    )


def retry_delay_s(status: int, failures: int, retry_after_s: float | None) -> float | None:
    """Return after how many seconds a request is repeated; None: its response is final.

    Args:
        status: HTTP status of the response.
        failures: Responses so far, this one included.
        retry_after_s: The response's `retry-after` in seconds.
    """
    if status < 500 and status not in _RETRIED:
        return None
    if status not in _UNAVAILABLE and failures >= _MAX_FAILURES:
        return None
    return min(_MAX_DELAY_S, max(retry_after_s or 0.0, _FIRST_DELAY_S * 2.0 ** min(failures - 1, 10)))
