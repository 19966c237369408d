"""The usage of a request, for its client: the header `x-thaw-usage`, or a comment in a stream."""

from __future__ import annotations

from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.used import usage_record

USAGE_HEADER = "x-thaw-usage"


def format_usage(request: ActiveRequest) -> str:
    """Format what the ledger records of a finished request, as a dictionary of RFC 9651.

    Returns:
        Tokens as `prompt`, `cached` and `completion`; `compute-ms` of devices, and `cold-start-ms`
        of the whole start that the request waited for, with its plan. Empty if the ledger has no
        record of this request, as for a repeated response.
    """
    record = usage_record(request, "")
    if record is None:
        return ""
    parts = [f"prompt={record.prompt_tokens}", f"cached={record.cached_tokens}", f"completion={record.completion_tokens}"]
    if record.compute_us:
        parts.append(f"compute-ms={record.compute_us / 1e3:.3f};device={record.compute_kind}")
    if record.plan_id is not None:
        parts.append(f'cold-start-ms={record.start_s * 1e3:.3f};plan="{record.plan_id}"')
    return ", ".join(parts)
