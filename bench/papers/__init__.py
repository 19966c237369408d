"""The papers' experiments in the simulator: one script for each figure, the paper's statements beside what comes out. `python -m bench.papers`."""
