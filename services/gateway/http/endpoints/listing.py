"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request

from shared.errors import InvalidRequest

_NUMBER = re.compile(r"[0-9]{1,6}")


def page_of(request: Request, newest_first: list[dict[str, Any]], *, default: int, most: int) -> dict[str, Any]:
    """Return the page that `after`, `limit` and `order` of a request ask for.

    Raises:
        InvalidRequest: One of them has a wrong value.
    """
    query = request.query_params
    given, order = query.get("limit", str(default)), query.get("order", "desc")
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= most:
        raise InvalidRequest(f"'limit' must be a whole number from 1 to {most}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be asc or desc", param="order")
    rows = newest_first if order == "desc" else newest_first[::-1]
    if (after := query.get("after")) is not None:
        at = next((i for i, row in enumerate(rows) if row["id"] == after), None)
        if at is None:
            raise InvalidRequest(f"'after' names nothing that exists: {after[:100]!r}", param="after")
        rows = rows[at + 1 :]
    data = rows[: int(given)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(rows) > len(data),
    }
