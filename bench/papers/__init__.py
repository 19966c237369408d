"""Reproduce the papers' experiments in the simulator: `python -m bench.papers`.

There is one script for each figure, with the paper's statements beside the results.
"""
