"""The command tree of `thaw`, and its entry point."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from typing import Annotated, Any

import typer

import thaw
from thaw.cli.lazy import Entry, group_of
from thaw.cli.shell_completion import repair_completion

COMMANDS = (
    Entry(
        "up",
        "up",
        "up",
        "Start the mesh on this machine: NATS, PostgreSQL, gateway, scheduler, and a nodeagent with a loader for each node.",
    ),
    Entry("down", "up", "down", "Stop the mesh of this machine, and remove what a crash has left of it."),
    Entry("init", "init", "init", "Write a commented thaw.yaml with this machine's devices and memory."),
    Entry("service", "service", "app", "The mesh as a systemd unit: install, show, remove."),
    Entry(
        "ps",
        "ps",
        "ps",
        "Show models, instances, devices, memory and migrations.",
    ),
    Entry("models", "models", "app", "Models: register, list, show, remove."),
    Entry("batches", "batches", "app", "Batches of requests for idle devices: run, list, show, cancel."),
    Entry("keys", "keys", "app", "API keys: add, list, change, rotate, revoke, log."),
    Entry("usage", "usage", "usage", "Show requests, tokens, cold starts, memory held and their cost by API key and model."),
    Entry("wake", "wake", "wake", "Start or resume a model, and wait until it is ready."),
    Entry("sleep", "wake", "sleep", "Free a model's devices after its running requests."),
    Entry(
        "pull",
        "pull",
        "pull",
        "Download a model's weights to a node's disk, or load them into its host memory.",
    ),
    Entry("chat", "chat", "chat", "Chat with a model; it is started or resumed first if necessary."),
    Entry(
        "trace",
        "trace",
        "trace",
        "Draw the phases of a request's time to the first token, its model's load and its hand-offs.",
    ),
    Entry(
        "explain",
        "explain",
        "explain",
        "Explain a placement decision: the chosen device, the cost of every option, and the outcome.",
    ),
    Entry("migrate", "migrate", "migrate", "Move a running request, or all requests of an instance, to another node."),
    Entry(
        "logs",
        "logs",
        "logs",
        "Show the log of a service, or of an engine by its instance's id.",
    ),
    Entry(
        "convert",
        "convert",
        "convert",
        "Convert a checkpoint into aligned, hashed partitions that load straight into memory. Pickles are not executed.",
    ),
    Entry("import", "importing", "app", "Write a thaw.yaml from the configuration of another server."),
    Entry("load", "load", "load", "Time one load of a checkpoint into memory, and free the memory."),
    Entry(
        "simulate",
        "simulate",
        "simulate",
        "Simulate scheduling policies on a cluster's nodes, models and requests.",
    ),
    Entry("demo", "traffic", "app", "Demo: traffic of models that share a device."),
    Entry("node", "node", "app", "Nodes: list, cordon, uncordon, drain, rm."),
    Entry(
        "doctor",
        "doctor",
        "doctor",
        "Check ports, disk, memory, swap, shared memory, GPUs, NATS, PostgreSQL, versions, "
        "who may use the endpoint, what dead meshes left behind, and the conservation of device memory.",
    ),
    Entry("docs", "docs", "app", "Generated references.", hidden=True),
)

app = typer.Typer(
    name="thaw",
    cls=group_of(COMMANDS),
    help="Serve many LLMs on few devices: an idle model uses no device memory, and a request starts or resumes it.",
    epilog="Start with `thaw up --demo`. Every command has an example in its --help, and prints JSON with --json.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
repair_completion()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"thaw {thaw.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _asks_json(arguments: list[str]) -> bool:
    """True if the command is to print one JSON document.

    The answer is a guess, because the arguments are not parsed yet.
    """
    if arguments[:1] == ["simulate"]:  # its --json takes a path
        return "--json=-" in arguments or ("--json", "-") in pairwise(arguments)
    return "--json" in arguments


def _run_ps(arguments: list[str]) -> None:
    """Run `thaw ps` without parsing, if it has no options.

    Parsing one option costs typer more than the command itself.
    """
    from thaw.cli.ps import ps

    ps(as_json=bool(arguments))


def main(arguments: list[str] | None = None) -> int:
    """Run `thaw`; returns the exit status."""
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # Python's own flush at the end would report a broken pipe
    except BrokenPipeError:  # the reader of the output has ended; the rest of the buffer is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(arguments: list[str]) -> int:
    as_json = _asks_json(arguments)
    try:
        if arguments in (["ps"], ["ps", "--json"]):
            _run_ps(arguments[1:])
            return 0
        # Without the library's own handling, usage errors can be JSON too.
        status: Any = app(arguments, prog_name="thaw", standalone_mode=not as_json)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    except typer.Exit as e:
        return e.exit_code
    except typer.Abort:
        return 130
    except Exception as e:
        format_message, code = getattr(e, "format_message", None), getattr(e, "exit_code", None)
        if not as_json or format_message is None or not isinstance(code, int):
            raise
        print(json.dumps({"error": {"code": "usage", "message": format_message(), "remedy": "See --help."}}))
        return code
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
