"""`thaw chat`: one question, or a conversation."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shared.logfiles import strip_control
from thaw.cli.api import Api
from thaw.cli.completions import Completion, Message, stream_chat
from thaw.cli.output import Document, Json, screen, show_error, verb
from thaw.errors import CommandError
from thaw.units import format_duration


@verb
def chat(
    model: Annotated[str, typer.Argument(help="Name or alias of a model.", metavar="MODEL")],
    prompt: Annotated[
        str | None, typer.Argument(help="The message; without it, a conversation (Ctrl-D ends it).", metavar="PROMPT")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the answer at most.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0: greedy.")] = None,
    as_json: Json = False,
) -> Document | None:
    """Chat with a model; it is started or resumed first if necessary.

    Example: [bold]thaw chat demo-60m "Hello"[/]
    """
    options: dict[str, float] = {}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    _check_text(system or "", prompt or "")
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    api, out = Api.find(), screen(as_json)
    if prompt is None and (as_json or not sys.stdin.isatty()):
        prompt = _read_prompt()
        if not prompt:
            raise CommandError("There is no prompt.", "Give it as PROMPT or on standard input.", code="no_prompt")
    if prompt is not None:
        history.append({"role": "user", "content": prompt})
        return {"model": model, **_answer(api, out, model, history, options).document}
    _converse(api, out, model, history, options)
    return None


def _read_prompt() -> str:
    try:
        prompt = sys.stdin.read().strip()
    except UnicodeDecodeError as e:
        raise _make_encoding_error() from e
    _check_text(prompt)
    return prompt


def _check_text(*texts: str) -> None:
    """Refuse text with bytes that are no UTF-8, which Python reads as lone surrogates."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as e:
        raise _make_encoding_error() from e


def _make_encoding_error() -> CommandError:
    return CommandError("The prompt is not UTF-8 text.", "Convert it to UTF-8, for example with iconv.", code="invalid_prompt")


def _answer(api: Api, out: Console, model: str, history: list[Message], options: dict[str, float]) -> Completion:
    completion, has_text = Completion(), False
    try:
        with contextlib.ExitStack() as spinner:
            status = spinner.enter_context(out.status(escape(f"{model} …")))
            pieces = stream_chat(
                api, model, history, completion, waiting=lambda words: status.update(escape(words or f"{model} …")), **options
            )
            for piece in pieces:
                spinner.close()
                out.print(strip_control(piece), end="", markup=False, soft_wrap=True)
                has_text = True
    except (CommandError, KeyboardInterrupt) as e:
        # What is printed next begins on a line of its own; the terminal shows ^C in this one.
        if has_text or isinstance(e, KeyboardInterrupt):
            out.print()
        raise
    out.print()
    # Not every engine reports usage in its streams.
    tokens = completion.usage.get("completion_tokens")
    counted = f"{tokens} tokens, first" if tokens is not None else "first token"
    if completion.ttft_ms is not None:
        out.print(f"[dim]{counted} after {format_duration(completion.ttft_ms / 1e3)}, {completion.request_id}[/]")
    return completion


def _converse(api: Api, out: Console, model: str, history: list[Message], options: dict[str, float]) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and history
    out.print(f"[dim]Talking with {escape(model)}. Ctrl-D ends, /new starts a new conversation.[/]")
    opening = list(history)
    while True:
        try:
            prompt = input("> ").strip()
        except UnicodeDecodeError:
            show_error(_make_encoding_error(), as_json=False)
            continue
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if not prompt:
            continue
        if prompt == "/new":
            history[:] = opening
            continue
        history.append({"role": "user", "content": prompt})
        try:
            _check_text(prompt)
            completion = _answer(api, out, model, history, options)
        except CommandError as e:
            history.pop()
            show_error(e, as_json=False)
            continue
        except KeyboardInterrupt:  # leaving the stream cancels the generation
            history.pop()
            out.print("[dim]interrupted[/]")
            continue
        history.append({"role": "assistant", "content": completion.text})
