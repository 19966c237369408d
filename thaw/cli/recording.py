"""Record a running mesh for `thaw simulate --from-mesh`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console

from shared.contracts.simulation import MAX_STARTS
from shared.contracts.traces import LoadTrace, RequestTrace
from thaw.cli.api import Api
from thaw.errors import CommandError


def record(
    api: Api, directory: Path, out: Console, *, requests: bool, since: float | None = None, latest: int | None = None
) -> dict[str, Path]:
    """Write what the admin API answers into `directory`, from which the simulator makes its files.

    Args:
        requests: The requests are replayed.
        since: Unix seconds; requests that were received before are left out.
        latest: Number of requests at most, the latest ones.

    Returns:
        The simulator's files by option.

    Raises:
        CommandError: The mesh does not answer, or the directory cannot be written.
    """
    with out.status("reading the mesh"):
        cluster = api.cluster()
        traces = [t for t in api.traces() if since is None or t.received >= since]
        traces = traces[-latest:] if latest is not None else traces
        loads = _loads(api, traces)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "mesh.json").write_text(cluster.model_dump_json())
        _write(directory / "requests.jsonl", traces)
        _write(directory / "loads.jsonl", loads)
    except OSError as e:
        raise CommandError(f"{directory} cannot be written: {e.strerror}") from e
    made = {"cluster": directory / "cluster.yaml", "models": directory / "models.yaml"}
    return {**made, "trace": directory / "run.jsonl"} if requests else made


def _loads(api: Api, traces: Iterable[RequestTrace]) -> list[LoadTrace]:
    """Return the latest starts that requests waited for, as far as they are still kept."""
    found = []
    for plan in list(dict.fromkeys(t.load_plan_id for t in traces if t.load_plan_id))[-MAX_STARTS:]:
        try:
            found.append(api.load_trace(plan))
        except CommandError as e:
            if e.code not in ("not_found", "404"):
                raise
    return found


def _write(path: Path, records: Iterable[BaseModel]) -> None:
    path.write_text("".join(f"{record.model_dump_json()}\n" for record in records))
