"""Implement `thaw docs` (hidden): references that are generated from the code.

Maintainers of the documents use them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

import thaw
from thaw.cli.output import Document, Json, verb
from thaw.errors import CommandError

app = typer.Typer(help="Generated references.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    pass


@app.command("settings")
@verb
def settings(as_json: Json = False) -> Document:
    """Print the reference of every setting (docs/configuration.md) as Markdown.

    Example: [bold]thaw docs settings > docs/configuration.md[/]
    """
    # The services' settings classes are theirs; the command line does not import services, so a
    # script beside the documents does.
    script = Path(thaw.__file__).resolve().parent.parent / "docs" / "generate_reference.py"
    if not script.exists():
        raise CommandError("The reference is generated in a checkout only.", "Read docs/configuration.md of the release.")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommandError(
            f"The reference could not be generated: {done.stderr.strip().splitlines()[-1:]}", f"Run {script} yourself."
        )
    if not as_json:
        print(done.stdout, end="")
    return {"markdown": done.stdout}
