"""Repair the zsh script of `thaw --install-completion`, which is Typer's.

zsh runs the file of a completion function at the first Tab. Typer's file only defines the function
then, so that the first Tab of every shell completes nothing. Typer writes an apostrophe of a
description as two, which end and open the quoted text around them, so that zsh drops it.
"""

from __future__ import annotations

from typer import _completion_shared

_ZSH = """
#compdef %(prog_name)s

%(complete_func)s() {
  local answer="$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" %(autocomplete_var)s=complete_zsh %(prog_name)s)"
  eval "${answer//\\'\\'/'\\\\''}"
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  %(complete_func)s "$@"
else
  compdef %(complete_func)s %(prog_name)s
fi
"""


def repair_completion() -> None:
    """Replace Typer's zsh script, unless Typer has changed how it keeps its scripts."""
    scripts = getattr(_completion_shared, "_completion_scripts", None)
    if isinstance(scripts, dict) and "zsh" in scripts:
        scripts["zsh"] = _ZSH
