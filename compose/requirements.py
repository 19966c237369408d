"""Prints the requirements in pyproject.toml, those of the named extras included: `python requirements.py [EXTRA...]`.

The images install them in a layer of their own, which lasts while they do not change.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *(r for extra in sys.argv[1:] for r in project["optional-dependencies"][extra])]
sys.stdout.write("\n".join(wanted) + "\n")
