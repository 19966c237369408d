"""The papers' experiments in the simulator: one script for each figure, the paper's statements beside the results. `python -m bench.papers`."""
