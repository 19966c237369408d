"""One command that runs and measures all that only a GPU can show: `python -m bench.gpu`."""
